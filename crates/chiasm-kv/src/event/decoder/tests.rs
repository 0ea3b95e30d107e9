use chiasm_types::TokenId;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::Index;
use rmpv::Value;

use super::*;
use crate::event::tests::{any_event, batch, stored, to_bytes, tree};
use crate::event::{BlockRemoved, BlockStored, ExtraKey, decode};

/// Checks that both decoders return the same batch or the same error.
fn check_agreement(decoder: &mut Decoder, payload: &[u8]) -> Result<(), TestCaseError> {
    // Compared as text, because a timestamp may be NaN.
    let fast = decoder
        .decode(payload)
        .map_or_else(|error| error.to_string(), |batch| format!("{batch:?}"));
    let general =
        decode(payload).map_or_else(|error| error.to_string(), |batch| format!("{batch:?}"));
    prop_assert_eq!(fast, general);
    Ok(())
}

/// A writer of batches in unusual but valid forms. Each decision consumes one of the choices; when
/// they are used up, the writer takes the first option.
struct Forms<'c>(std::slice::Iter<'c, u8>);

impl Forms<'_> {
    /// Returns one of `options` options.
    fn choose(&mut self, options: usize) -> usize {
        self.0.next().map_or(0, |choice| usize::from(*choice) % options)
    }

    /// Reorders fields, duplicates some, and inserts unknown ones.
    fn change(&mut self, value: &mut Value) {
        let Value::Array(positions) = value else { panic!("a batch is an array") };
        for _ in 0..self.choose(3) {
            positions.push(Value::Map(vec![(1.into(), Value::Nil)]));
        }
        let Value::Array(events) = &mut positions[1] else { panic!("events are an array") };
        for event in events {
            let Value::Map(fields) = event else { panic!("an event is a map") };
            for _ in 0..self.choose(3) {
                let field = match self.choose(3) {
                    0 => fields[self.choose(fields.len())].clone(),
                    1 => ("medium_size".into(), Value::Array(vec![Value::Nil, 1.5.into()])),
                    _ => (7.into(), "no name".into()),
                };
                fields.insert(self.choose(fields.len() + 1), field);
            }
            for _ in 0..self.choose(3) {
                let one = self.choose(fields.len());
                let other = self.choose(fields.len());
                fields.swap(one, other);
            }
        }
    }

    /// Writes numbers and lengths in any form that is wide enough.
    fn write(&mut self, value: &Value, out: &mut Vec<u8>) {
        match value {
            Value::Integer(number) => match number.as_u64() {
                Some(number) => self.write_number(number, out),
                None => rmpv::encode::write_value(out, value).unwrap(),
            },
            Value::String(text) => {
                let bytes = text.as_bytes();
                self.write_length(bytes.len(), &[(0xa0, 32)], &[0xd9, 0xda, 0xdb], out);
                out.extend(bytes);
            }
            Value::Array(values) => {
                self.write_length(values.len(), &[(0x90, 16)], &[0xdc, 0xdd], out);
                values.iter().for_each(|value| self.write(value, out));
            }
            Value::Map(fields) => {
                self.write_length(fields.len(), &[(0x80, 16)], &[0xde, 0xdf], out);
                for (name, value) in fields {
                    self.write(name, out);
                    self.write(value, out);
                }
            }
            _ => rmpv::encode::write_value(out, value).unwrap(),
        }
    }

    fn write_number(&mut self, number: u64, out: &mut Vec<u8>) {
        let mut forms = Vec::new();
        forms.extend((number < 128).then(|| vec![number as u8]));
        for width in 0..4 {
            let digits = &number.to_be_bytes()[8 - (1 << width)..];
            let bits = 8 << width;
            if bits == 64 || number < 1 << bits {
                forms.push([&[0xcc + width as u8], digits].concat());
            }
            if number < 1 << (bits - 1) {
                forms.push([&[0xd0 + width as u8], digits].concat());
            }
        }
        out.extend(&forms[self.choose(forms.len())]);
    }

    fn write_length(
        &mut self,
        length: usize,
        fixed: &[(u8, usize)],
        markers: &[u8],
        out: &mut Vec<u8>,
    ) {
        let mut forms: Vec<Vec<u8>> = fixed
            .iter()
            .filter(|(_, limit)| length < *limit)
            .map(|(marker, _)| vec![marker | length as u8])
            .collect();
        for (widths_left, marker) in (0..markers.len()).rev().zip(markers) {
            let bytes = 4 >> widths_left;
            if bytes == 4 || length < 1 << (8 * bytes) {
                forms.push([&[*marker], &(length as u32).to_be_bytes()[4 - bytes..]].concat());
            }
        }
        out.extend(&forms[self.choose(forms.len())]);
    }
}

fn any_batch() -> impl Strategy<Value = KvEventBatch> {
    (-1e12..1e12f64, vec(any_event(), 0..5), option::of(any::<u32>())).prop_map(
        |(timestamp, events, data_parallel_rank)| KvEventBatch {
            timestamp,
            events,
            data_parallel_rank,
        },
    )
}

proptest! {
    #[test]
    fn reused_decoder_equals_fresh_decoder(batches in vec(any_batch(), 1..6)) {
        let mut decoder = Decoder::default();
        for batch in &batches {
            prop_assert_eq!(decoder.decode(&batch.encode()).unwrap(), batch);
        }
    }

    #[test]
    fn decoders_agree_on_unusual_forms(
        batches in vec(any_batch(), 1..4),
        choices in vec(any::<u8>(), 0..400),
    ) {
        let mut decoder = Decoder::default();
        let mut forms = Forms(choices.iter());
        for batch in &batches {
            let mut tree = tree(batch);
            forms.change(&mut tree);
            let mut payload = Vec::new();
            forms.write(&tree, &mut payload);
            check_agreement(&mut decoder, &payload)?;
            check_agreement(&mut decoder, &batch.encode())?;
        }
    }

    #[test]
    fn decoders_agree_on_damaged_payloads(
        batches in vec(any_batch(), 1..4),
        damage in vec((any::<Index>(), any::<u8>()), 1..4),
        cut in any::<Index>(),
    ) {
        let mut decoder = Decoder::default();
        for batch in &batches {
            let whole = batch.encode();
            let mut payload = whole.clone();
            for (at, byte) in &damage {
                let at = at.index(payload.len());
                payload[at] = *byte;
            }
            check_agreement(&mut decoder, &payload)?;
            check_agreement(&mut decoder, &whole[..cut.index(whole.len())])?;
            check_agreement(&mut decoder, &whole)?;
        }
    }

    #[test]
    fn decoders_agree_on_token_list_at_payload_end(
        tokens in vec(prop_oneof![0..200u32, 200..70_000u32, any::<u32>()], 0..40),
        field in any::<Index>(),
        byte in any::<u8>(),
    ) {
        let token_ids = tokens.into_iter().map(TokenId).collect();
        let event = KvEvent::BlockStored(BlockStored { token_ids, ..stored() });
        let mut tree = tree(&KvEventBatch { data_parallel_rank: None, ..batch(vec![event]) });
        let Value::Array(positions) = &mut tree else { panic!() };
        let Value::Array(events) = &mut positions[1] else { panic!() };
        let Value::Map(fields) = &mut events[0] else { panic!() };
        let place = fields.iter().position(|(name, _)| name.as_str() == Some("token_ids")).unwrap();
        let list = fields.remove(place);
        fields.push(list);
        let mut payload = to_bytes(&tree);
        check_agreement(&mut Decoder::default(), &payload)?;
        // The same payload with one byte changed.
        let place = field.index(payload.len());
        payload[place] = byte;
        check_agreement(&mut Decoder::default(), &payload)?;
    }
}

/// Returns the payload of a busy step: blocks of four answers, a prompt with an image, and
/// evictions.
fn busy() -> Vec<u8> {
    let text = |blocks: usize, seed: u64| {
        KvEvent::BlockStored(BlockStored {
            block_hashes: (0..blocks as u64)
                .map(|block| ExternalHash::U64(u64::MAX - 1000 * seed - block))
                .collect(),
            parent_block_hash: Some(ExternalHash::U64(1 << 63)),
            token_ids: (0..16 * blocks as u32)
                .map(|token| TokenId(token * 4099 % 151_936))
                .collect(),
            block_size: 16,
            medium: Some("GPU".into()),
            extra_keys: Some(vec![None; blocks]),
            group_idx: Some(0),
            kv_cache_spec_kind: Some("full_attention".into()),
            ..Default::default()
        })
    };
    let mut events: Vec<KvEvent> = (0..4).map(|answer| text(1, answer)).collect();
    let mut image = text(64, 5);
    if let KvEvent::BlockStored(image) = &mut image {
        let media =
            |block: i64| ExtraKey::Media { identifier: "ab".repeat(32), offset: 3 - 16 * block };
        image.extra_keys = Some(
            (0..64).map(|block| Some(vec![media(block), ExtraKey::Text("salt".into())])).collect(),
        );
        image.parent_block_hash = Some(ExternalHash::Bytes(vec![9; 32]));
    }
    events.push(image);
    let block_hashes =
        vec![ExternalHash::Bytes(vec![7; 32]), ExternalHash::U64(3), ExternalHash::U64(u64::MAX)];
    events.push(KvEvent::BlockRemoved(BlockRemoved {
        block_hashes,
        medium: Some("GPU".into()),
        ..Default::default()
    }));
    batch(events).encode()
}

#[test]
fn repeated_payloads_allocate_nothing() {
    let mut decoder = Decoder::default();
    let others: Vec<Vec<u8>> = [
        batch(vec![KvEvent::BlockRemoved(BlockRemoved::default()), KvEvent::BlockStored(stored())]),
        batch(vec![KvEvent::BlockStored(BlockStored { session_id: Some("7".into()), ..stored() })]),
    ]
    .iter()
    .map(KvEventBatch::encode)
    .collect();
    let round = |decoder: &mut Decoder| {
        for payload in [&busy(), &others[0], &busy(), &others[1]] {
            assert_eq!(*decoder.decode(payload).unwrap(), decode(payload).unwrap());
        }
        decoder.spare.kept_bytes
    };
    round(&mut decoder);
    // Buffers move between the spare lists until all are large enough.
    for _ in 0..20 {
        round(&mut decoder);
    }
    let kept = round(&mut decoder);
    for _ in 0..100 {
        assert_eq!(round(&mut decoder), kept);
    }
}

#[test]
fn announced_length_reserves_at_most_payload_size() {
    for name in ["block_hashes", "token_ids", "extra_keys"] {
        let mut tree = tree(&batch(vec![KvEvent::BlockStored(BlockStored {
            extra_keys: Some(Vec::new()),
            ..stored()
        })]));
        let Value::Array(positions) = &mut tree else { panic!() };
        let Value::Array(events) = &mut positions[1] else { panic!() };
        let Value::Map(fields) = &mut events[0] else { panic!() };
        let place = fields.iter().position(|(field, _)| field.as_str() == Some(name)).unwrap();
        fields.truncate(place + 1);
        let head = to_bytes(&tree);
        let mut payload = head
            [..head.windows(name.len()).position(|bytes| bytes == name.as_bytes()).unwrap()]
            .to_vec();
        payload.extend(name.as_bytes());
        payload.extend([0xdd, 0xff, 0xff, 0xff, 0xff, 1, 2, 3]);
        let mut decoder = Decoder::default();
        assert!(decoder.decode(&payload).is_err());
        assert!(decoder.spare.kept_bytes < 10_000, "{name}: {}", decoder.spare.kept_bytes);
    }
}

#[test]
fn memory_of_large_payload_is_freed() {
    let mut decoder = Decoder::default();
    let cleared = batch(vec![KvEvent::AllBlocksCleared]).encode();
    for large in [
        KvEvent::BlockStored(BlockStored { token_ids: vec![TokenId(1); 2 << 20], ..stored() }),
        KvEvent::BlockRemoved(BlockRemoved {
            medium: Some("x".repeat(5 << 20)),
            ..Default::default()
        }),
    ] {
        let large = batch(vec![large]).encode();
        assert_eq!(*decoder.decode(&large).unwrap(), decode(&large).unwrap());
        assert!(decoder.spare.kept_bytes > MAX_KEPT_BYTES);
        decoder.decode(&cleared).unwrap();
        assert!(decoder.spare.kept_bytes < 10_000, "{}", decoder.spare.kept_bytes);
    }
}
