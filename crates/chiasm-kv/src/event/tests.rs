use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use rmpv::Value;

use super::*;

pub(super) fn batch(events: Vec<KvEvent>) -> KvEventBatch {
    KvEventBatch { timestamp: 1.5, events, data_parallel_rank: Some(0) }
}

pub(super) fn stored() -> BlockStored {
    BlockStored {
        block_hashes: vec![ExternalHash::U64(u64::MAX)],
        token_ids: vec![TokenId(1), TokenId(2)],
        block_size: 2,
        ..Default::default()
    }
}

pub(super) fn to_bytes(value: &Value) -> Vec<u8> {
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, value).unwrap();
    bytes
}

/// Returns the batch as a tree of values that a test can change.
pub(super) fn tree(batch: &KvEventBatch) -> Value {
    rmpv::decode::read_value(&mut &batch.encode()[..]).unwrap()
}

fn first_event(tree: &mut Value) -> &mut Vec<(Value, Value)> {
    let Value::Array(positions) = tree else { panic!("a batch is an array") };
    let Value::Array(events) = &mut positions[1] else { panic!("events are an array") };
    let Value::Map(fields) = &mut events[0] else { panic!("an event is a map") };
    fields
}

#[test]
fn unknown_parts_of_later_versions_are_skipped() {
    let known = batch(vec![KvEvent::BlockStored(stored())]);
    let mut later = tree(&known);
    let unknown = Value::Map(vec![("nested".into(), Value::Array(vec![Value::Nil, 1.5.into()]))]);
    first_event(&mut later).insert(1, ("new_field".into(), unknown.clone()));
    let Value::Array(positions) = &mut later else { panic!() };
    positions.push(unknown.clone());
    let Value::Array(events) = &mut positions[1] else { panic!() };
    events.push(Value::Map(vec![("what".into(), unknown), ("type".into(), "BlockDreamt".into())]));

    let decoded = decode(&to_bytes(&later)).unwrap();
    assert_eq!(decoded.events[..1], known.events[..]);
    assert_eq!(decoded.events[1], KvEvent::Unknown("BlockDreamt".into()));
    assert_eq!(decoded.data_parallel_rank, Some(0));
}

#[test]
fn tag_in_last_position_is_found() {
    let known = batch(vec![KvEvent::BlockStored(stored())]);
    let mut reversed = tree(&known);
    first_event(&mut reversed).reverse();
    assert_eq!(decode(&to_bytes(&reversed)).unwrap(), known);
}

#[test]
fn missing_optional_fields_have_defaults() {
    let mut shortest = tree(&batch(vec![KvEvent::BlockStored(stored())]));
    first_event(&mut shortest).retain(|(name, _)| {
        ["type", "block_hashes", "token_ids", "block_size"].contains(&name.as_str().unwrap())
    });
    let Value::Array(positions) = &mut shortest else { panic!() };
    positions.truncate(2);
    let decoded = decode(&to_bytes(&shortest)).unwrap();
    assert_eq!(
        decoded,
        KvEventBatch { data_parallel_rank: None, ..batch(vec![KvEvent::BlockStored(stored())]) }
    );
}

#[test]
fn missing_or_mistyped_field_is_named_in_error() {
    for (field, wrong) in [
        ("block_hashes", None),
        ("token_ids", None),
        ("block_size", None),
        ("block_hashes", Some(Value::from(7))),
        ("token_ids", Some(Value::Array(vec![(-1).into()]))),
        ("block_size", Some(Value::from("2"))),
        ("medium", Some(Value::from(7))),
        ("group_idx", Some(Value::from(-1))),
    ] {
        let mut tree = tree(&batch(vec![KvEvent::BlockStored(BlockStored {
            group_idx: Some(0),
            ..stored()
        })]));
        let fields = first_event(&mut tree);
        match wrong {
            None => fields.retain(|(name, _)| name.as_str() != Some(field)),
            Some(wrong) => {
                fields.iter_mut().find(|(name, _)| name.as_str() == Some(field)).unwrap().1 = wrong
            }
        }
        let error = decode(&to_bytes(&tree)).unwrap_err();
        assert!(error.to_string().contains(field), "{field}: {error}");
    }
}

#[test]
fn extra_keys_of_other_types_are_kept_as_bytes() {
    let digest = to_bytes(&Value::Binary(vec![1, 2, 3]));
    let triple = to_bytes(&Value::Array(vec!["mm".into(), "id".into(), 3.into()]));
    let keys = vec![Some(vec![
        ExtraKey::Text("adapter".into()),
        ExtraKey::Media { identifier: "id".into(), offset: -40 },
        ExtraKey::Other(digest),
        ExtraKey::Other(triple),
    ])];
    let batch =
        batch(vec![KvEvent::BlockStored(BlockStored { extra_keys: Some(keys), ..stored() })]);
    assert_eq!(decode(&batch.encode()).unwrap(), batch);
}

#[test]
fn huge_announced_length_is_refused() {
    // A batch that announces u32::MAX events: [1.5, [ …
    let mut bytes = vec![0x93];
    rmp::encode::write_f64(&mut bytes, 1.5).unwrap();
    rmp::encode::write_array_len(&mut bytes, u32::MAX).unwrap();
    assert!(decode(&bytes).is_err());
}

fn external_hash() -> impl Strategy<Value = ExternalHash> {
    prop_oneof![
        any::<u64>().prop_map(ExternalHash::U64),
        vec(any::<u8>(), 0..40).prop_map(ExternalHash::Bytes),
    ]
}

fn extra_key() -> impl Strategy<Value = ExtraKey> {
    prop_oneof![
        (".{0,70}", any::<i64>())
            .prop_map(|(identifier, offset)| ExtraKey::Media { identifier, offset }),
        ".{0,40}".prop_map(ExtraKey::Text),
        vec(any::<u8>(), 0..40)
            .prop_map(|digest| ExtraKey::Other(to_bytes(&Value::Binary(digest)))),
    ]
}

prop_compose! {
    fn any_stored()(
        block_hashes in vec(external_hash(), 0..5),
        parent_block_hash in option::of(external_hash()),
        token_ids in vec(any::<u32>().prop_map(TokenId), 0..40),
        block_size in any::<u32>(),
        (lora_id, group_idx) in (option::of(any::<i64>()), option::of(any::<u32>())),
        kv_cache_spec_sliding_window in option::of(any::<u32>()),
        lookahead_token_ids in option::of(vec(vec(any::<u32>().prop_map(TokenId), 0..3), 0..5)),
        texts in vec(option::of(".{0,40}"), 6),
        extra_keys in option::of(vec(option::of(vec(extra_key(), 0..4)), 0..5)),
    ) -> BlockStored {
        let mut texts = texts.into_iter();
        let mut text = || texts.next().unwrap();
        BlockStored {
            block_hashes,
            parent_block_hash,
            token_ids,
            block_size,
            lora_id,
            group_idx,
            extra_keys,
            kv_cache_spec_sliding_window,
            lookahead_token_ids,
            medium: text(),
            lora_name: text(),
            kv_cache_spec_kind: text(),
            locality: text(),
            ownership: text(),
            session_id: text(),
        }
    }
}

pub(super) fn any_event() -> impl Strategy<Value = KvEvent> {
    let removed =
        (vec(external_hash(), 0..5), option::of(any::<u32>()), vec(option::of(".{0,40}"), 3))
            .prop_map(|(block_hashes, group_idx, texts)| BlockRemoved {
                block_hashes,
                group_idx,
                medium: texts[0].clone(),
                locality: texts[1].clone(),
                ownership: texts[2].clone(),
            });
    prop_oneof![
        any_stored().prop_map(KvEvent::BlockStored),
        removed.prop_map(KvEvent::BlockRemoved),
        Just(KvEvent::AllBlocksCleared),
        "X[a-z]{0,20}".prop_map(KvEvent::Unknown),
    ]
}

proptest! {
    #[test]
    fn encoded_batch_decodes_to_itself(
        timestamp in -1e12..1e12f64,
        events in vec(any_event(), 0..5),
        data_parallel_rank in option::of(any::<u32>()),
    ) {
        let batch = KvEventBatch { timestamp, events, data_parallel_rank };
        prop_assert_eq!(decode(&batch.encode()).unwrap(), batch);
    }

    #[test]
    fn damaged_payloads_never_panic(
        events in vec(any_event(), 0..3),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = batch(events).encode();
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = decode(&bytes);
        let _ = decode(&bytes[..cut.index(bytes.len())]);
    }
}
