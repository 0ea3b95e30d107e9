//! Frames captured from vLLM 0.32 are decoded completely and encoded again byte for byte.

use std::path::PathBuf;

use chiasm_kv::event::{self, BlockStored, Decoder, ExtraKey, KvEvent, KvEventBatch};
use chiasm_kv::{MediaSpan, PrefixIndex, PromptBlocks, block_keys};
use chiasm_types::{BlockSize, WorkerId};
use serde_json::{Value, json};

/// A captured message, with its entry in the capture's index.
struct Captured {
    name: String,
    facts: Value,
    frames: Vec<Vec<u8>>,
}

fn captured(kind: &str) -> Vec<Captured> {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(kind);
    let index = std::fs::read_to_string(directory.join("index.json")).unwrap();
    let index: Value = serde_json::from_str(&index).unwrap();
    let messages = index["messages"].as_array().unwrap();
    assert!(!messages.is_empty());
    messages
        .iter()
        .map(|message| Captured {
            name: message["name"].as_str().unwrap().to_owned(),
            facts: message.clone(),
            frames: message["frames"]
                .as_array()
                .unwrap()
                .iter()
                .map(|frame| {
                    let bytes =
                        std::fs::read(directory.join(frame["file"].as_str().unwrap())).unwrap();
                    assert_eq!(bytes.len() as u64, frame["nbytes"], "{frame}");
                    bytes
                })
                .collect(),
        })
        .collect()
}

fn sequence(frame: &[u8]) -> i64 {
    i64::from_be_bytes(frame.try_into().unwrap())
}

fn decode(payload: &[u8], name: &str) -> KvEventBatch {
    let batch = event::decode(payload).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(batch.encode(), payload, "{name} is not written as it was read");
    assert_eq!(event::decode(&batch.encode()).unwrap(), batch, "{name}");
    assert_eq!(Decoder::default().decode(payload).unwrap(), &batch, "{name}");
    batch
}

fn kind(event: &KvEvent) -> &'static str {
    match event {
        KvEvent::BlockStored(_) => "BlockStored",
        KvEvent::BlockRemoved(_) => "BlockRemoved",
        KvEvent::AllBlocksCleared => "AllBlocksCleared",
        _ => panic!("captures hold known events only: {event:?}"),
    }
}

/// Converts an event to the notation of the capture's index.
fn facts(event: &KvEvent) -> Value {
    let hashes = |hashes: &[event::ExternalHash]| -> Value {
        hashes
            .iter()
            .map(|hash| match hash {
                event::ExternalHash::U64(hash) => json!(hash),
                event::ExternalHash::Bytes(_) => panic!("captures hold integer hashes only"),
            })
            .collect()
    };
    match event {
        KvEvent::BlockStored(stored) => json!({
            "type": "BlockStored",
            "block_hashes": hashes(&stored.block_hashes),
            "parent_block_hash": stored.parent_block_hash.as_ref().map(|parent| {
                hashes(std::slice::from_ref(parent))[0].clone()
            }),
            "token_ids": format!("{} ids", stored.token_ids.len()),
            "block_size": stored.block_size,
            "lora_id": stored.lora_id,
            "medium": stored.medium,
            "lora_name": stored.lora_name,
            "extra_keys": stored.extra_keys.as_ref().map(|blocks| {
                assert!(blocks.iter().all(Option::is_none));
                Value::from(vec![Value::Null; blocks.len()])
            }),
            "group_idx": stored.group_idx,
            "kv_cache_spec_kind": stored.kv_cache_spec_kind,
        }),
        KvEvent::BlockRemoved(removed) => json!({
            "type": "BlockRemoved",
            "block_hashes": hashes(&removed.block_hashes),
            "medium": removed.medium,
            "group_idx": removed.group_idx,
        }),
        _ => json!({ "type": kind(event) }),
    }
}

#[test]
fn published_messages_equal_capture_index() {
    let mut with_facts = 0;
    let mut with_tags = 0;
    for message in captured("kv_events") {
        let [_topic, seq, payload] = &message.frames[..] else { panic!("{}", message.name) };
        assert!(sequence(seq) >= 0);
        let batch = decode(payload, &message.name);
        if let Some(expected) = message.facts.get("decoded") {
            with_facts += 1;
            assert_eq!(
                batch.events.iter().map(facts).collect::<Value>(),
                *expected,
                "{}",
                message.name
            );
        }
        if let Some(tags) = message.facts.get("tags") {
            with_tags += 1;
            assert_eq!(batch.events.iter().map(kind).collect::<Value>(), *tags, "{}", message.name);
        }
    }
    assert_eq!((with_facts, with_tags), (6, 7));
}

#[test]
fn replayed_messages_decode_up_to_end_marker() {
    let mut ends = 0;
    for message in captured("kv_replay") {
        let [delimiter, topic, seq, payload] = &message.frames[..] else {
            panic!("{}", message.name)
        };
        assert!(delimiter.is_empty());
        if sequence(seq) == -1 {
            ends += 1;
            assert!(topic.is_empty() && payload.is_empty());
            continue;
        }
        let batch = decode(payload, &message.name);
        if let Some(position) = message.name.strip_prefix("full_") {
            assert_eq!(sequence(seq).to_string(), position);
            assert_eq!(batch.data_parallel_rank, Some(0));
        }
    }
    assert_eq!(ends, 2);
}

fn stored(capture: &str, name: &str) -> BlockStored {
    let messages = captured(capture);
    let message = messages.iter().find(|message| message.name == name).unwrap();
    let payload = message.frames.last().unwrap();
    decode(payload, name)
        .events
        .into_iter()
        .find_map(|event| match event {
            KvEvent::BlockStored(stored) => Some(stored),
            _ => None,
        })
        .unwrap()
}

#[test]
fn extra_keys_of_images_differ_from_salts() {
    let image = |offset| Some(vec![ExtraKey::Media { identifier: "ab".repeat(32), offset }]);
    assert_eq!(
        stored("kv_events", "stored_image_0").extra_keys,
        Some(vec![None, image(9), image(-23)])
    );
    assert_eq!(stored("kv_replay", "full_1").extra_keys, Some(vec![image(-55)]));
    assert_eq!(
        stored("kv_events", "stored_salt_2").extra_keys,
        Some(vec![Some(vec![ExtraKey::Text("salty".into())]), None])
    );
}

const BLOCK: BlockSize = BlockSize::new(32).unwrap();
const WORKER: WorkerId = WorkerId(0);

/// Returns the overlap of a prompt after the named messages of a capture were applied in order.
fn overlap(capture: &str, names: &[&str], prompt: &PromptBlocks<'_>) -> usize {
    let index = PrefixIndex::new();
    index.add_worker(WORKER, BLOCK);
    for message in captured(capture) {
        if names.contains(&message.name.as_str()) {
            index.apply(WORKER, &decode(message.frames.last().unwrap(), &message.name));
        }
    }
    index.overlaps(&block_keys(prompt, BLOCK))[0].1
}

#[test]
fn captured_image_blocks_match_prompt() {
    // The 80 placeholder tokens start at 41: at offset 9 in block 1, −23 in block 2, −55 in block
    // 3.
    let first = stored("kv_replay", "full_0");
    let second = stored("kv_replay", "full_1");
    let tokens = [first.token_ids, second.token_ids].concat();
    let image = MediaSpan { hash: "ab".repeat(32).parse().unwrap(), offset: 41, length: 80 };
    let names = ["full_0", "full_1"];
    let overlap_with = |media: &[MediaSpan], salt| {
        overlap("kv_replay", &names, &PromptBlocks { tokens: &tokens, media, lora: None, salt })
    };
    let other_image = MediaSpan { hash: "cd".repeat(32).parse().unwrap(), ..image };
    assert_eq!(overlap_with(&[image], None), 4);
    assert_eq!(overlap_with(&[other_image], None), 1);
    assert_eq!(overlap_with(&[MediaSpan { offset: 40, ..image }], None), 1);
    assert_eq!(overlap_with(&[], None), 1);
    assert_eq!(overlap_with(&[image], Some("salty")), 0);
}

#[test]
fn captured_salted_blocks_match_only_with_salt() {
    let tokens = stored("kv_events", "stored_salt_2").token_ids;
    let overlap_with = |salt| {
        let prompt = PromptBlocks { tokens: &tokens, media: &[], lora: None, salt };
        overlap("kv_events", &["stored_salt_2"], &prompt)
    };
    assert_eq!(overlap_with(Some("salty")), 2);
    assert_eq!(overlap_with(Some("other")), 0);
    assert_eq!(overlap_with(None), 0);
}

#[test]
fn captured_continuation_chains_to_parent() {
    let head = stored("kv_events", "stored_text_1");
    let tail = stored("kv_events", "stored_parent_3");
    let tokens = [head.token_ids, tail.token_ids].concat();
    let prompt = PromptBlocks { tokens: &tokens, ..Default::default() };
    assert_eq!(overlap("kv_events", &["stored_text_1", "stored_parent_3"], &prompt), 4);
    assert_eq!(overlap("kv_events", &["stored_parent_3"], &prompt), 0);
}

#[test]
fn captured_session_leaves_blocks_of_engine() {
    let [index, from_payloads] = [PrefixIndex::new(), PrefixIndex::new()];
    [&index, &from_payloads].into_iter().for_each(|index| index.add_worker(WORKER, BLOCK));
    // The number of copies of each hash, as the engine counts them.
    let mut copies = std::collections::HashMap::<_, i32>::new();
    for message in captured("kv_replay") {
        if !message.name.starts_with("full_") || message.frames[3].is_empty() {
            continue;
        }
        let batch = decode(&message.frames[3], &message.name);
        let payload = &message.frames[3];
        let before = index.stats(WORKER);
        let truncated = from_payloads.apply_payload(
            WORKER,
            &payload[..payload.len() - 1],
            &mut Vec::new(),
            |_| panic!(),
        );
        assert!(truncated.is_err());
        let added = index.apply(WORKER, &batch);
        let mut added_from_payload = Vec::new();
        let inspect =
            |seen: &KvEventBatch| assert_eq!((seen, from_payloads.stats(WORKER)), (&batch, before));
        from_payloads.apply_payload(WORKER, payload, &mut added_from_payload, inspect).unwrap();
        assert_eq!(
            (added_from_payload, from_payloads.stats(WORKER)),
            (added, index.stats(WORKER)),
            "{}",
            message.name
        );
        for event in batch.events {
            match event {
                KvEvent::BlockStored(stored) => stored
                    .block_hashes
                    .into_iter()
                    .for_each(|hash| *copies.entry(hash).or_default() += 1),
                KvEvent::BlockRemoved(removed) => removed
                    .block_hashes
                    .into_iter()
                    .for_each(|hash| *copies.entry(hash).or_default() -= 1),
                _ => copies.clear(),
            }
        }
        assert!(copies.values().all(|copies| *copies >= 0));
        let held = copies.values().filter(|copies| **copies > 0).count();
        let stats = index.stats(WORKER).unwrap();
        assert_eq!(
            (stats.blocks, stats.unkeyed_blocks, stats.unknown_removals),
            (held, 0, 0),
            "{}",
            message.name
        );
    }
    assert!(copies.values().any(|copies| *copies == 2), "the session has a duplicate");
}
