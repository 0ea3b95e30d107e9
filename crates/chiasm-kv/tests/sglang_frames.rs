//! Frames captured from SGLang 0.5.23: its blocks are found by the hashes predicted for prompts.

use std::path::PathBuf;

use chiasm_kv::event::{self, Decoder, KvEvent, KvEventBatch};
use chiasm_kv::{EngineHashing, MediaSpan, PrefixIndex, PromptBlocks};
use chiasm_types::{BlockSize, TokenId, WorkerId};
use serde_json::Value;

const BLOCK: BlockSize = BlockSize::new(16).unwrap();
const WORKER: WorkerId = WorkerId(0);

/// Returns the payload of a captured message.
fn payload(name: &str) -> Vec<u8> {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/sglang_events");
    std::fs::read(directory.join(format!("{name}.f2.bin"))).unwrap()
}

fn batch(name: &str) -> KvEventBatch {
    let payload = payload(name);
    let batch = event::decode(&payload).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(Decoder::default().decode(&payload).unwrap(), &batch, "{name}");
    batch
}

/// Returns an index to which the named messages were applied.
fn index_with(names: &[&str]) -> PrefixIndex {
    let index = PrefixIndex::new();
    index.add_worker_with(WORKER, BLOCK, EngineHashing::Sglang.scheme());
    for name in names {
        index.apply_payload(WORKER, &payload(name), &mut Vec::new(), |_| ()).unwrap();
    }
    index
}

/// Returns the number of leading blocks of a prompt that the worker holds.
fn overlap(index: &PrefixIndex, prompt: &PromptBlocks<'_>) -> usize {
    index
        .overlaps(&EngineHashing::Sglang.keys(prompt, BLOCK))
        .first()
        .map_or(0, |(_, blocks)| *blocks)
}

fn tokens(from: u32, to: u32) -> Vec<TokenId> {
    (from..to).map(TokenId).collect()
}

#[test]
fn messages_equal_capture_index() {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/sglang_events");
    let index: Value =
        serde_json::from_str(&std::fs::read_to_string(directory.join("index.json")).unwrap())
            .unwrap();
    let messages = index["messages"].as_array().unwrap();
    for message in messages {
        let batch = batch(message["name"].as_str().unwrap());
        let kind = |event: &KvEvent| match event {
            KvEvent::BlockStored(_) => "BlockStored",
            KvEvent::BlockRemoved(_) => "BlockRemoved",
            KvEvent::AllBlocksCleared => "AllBlocksCleared",
            _ => panic!("{event:?}"),
        };
        assert_eq!(batch.events.iter().map(kind).collect::<Value>(), message["tags"], "{message}");
        assert_eq!(batch.data_parallel_rank, Some(0));
    }
    assert_eq!(messages.len(), 5);
}

#[test]
fn signed_hashes_decode_without_token_substitutes() {
    let [KvEvent::BlockStored(text)] = &batch("text_0").events[..] else { panic!() };
    assert_eq!(text.token_ids, tokens(1, 33));
    let [KvEvent::BlockStored(image)] = &batch("image_0").events[..] else { panic!() };
    assert_eq!((image.token_ids.len(), image.block_hashes.len(), image.block_size), (0, 6, 16));
    assert_eq!(image.parent_block_hash.as_ref(), text.block_hashes.first());
    assert_eq!(
        image.block_hashes[0],
        event::ExternalHash::U64((-6297807654127280768_i64).cast_unsigned())
    );
}

#[test]
fn text_or_salted_blocks_match_predicted_hashes() {
    let index = index_with(&["text_0", "salted_0"]);
    let tokens = tokens(1, 40);
    let overlap_with =
        |salt| overlap(&index, &PromptBlocks { tokens: &tokens, salt, ..PromptBlocks::default() });
    assert_eq!(overlap_with(None), 2);
    assert_eq!(overlap_with(Some("s")), 2);
    assert_eq!(overlap_with(Some("t")), 0);
    assert_eq!(index.stats(WORKER).unwrap().blocks, 4);
}

#[test]
fn image_matches_only_by_identity_plus_offset() {
    let index = index_with(&["text_0", "image_0"]);
    let image = vec![TokenId(398); 80];
    let tokens =
        [tokens(1, 20), vec![TokenId(395)], image, vec![TokenId(396)], tokens(40, 60)].concat();
    let hash = "00112233445566778899aabbccddeeff0123456789abcdef0011223344556677".parse().unwrap();
    let span = MediaSpan { hash, offset: 20, length: 80 };
    let overlap_with = |media: &[MediaSpan]| {
        overlap(&index, &PromptBlocks { tokens: &tokens, media, ..PromptBlocks::default() })
    };
    assert_eq!(overlap_with(&[span]), 7);
    // Only the first block, which has no tokens of the image, still matches.
    let other = "00112233445566778899aabbccddeeff0123456789abcdef0011223344556678".parse().unwrap();
    assert_eq!(overlap_with(&[MediaSpan { hash: other, ..span }]), 1);
    assert_eq!(overlap_with(&[MediaSpan { offset: 21, ..span }]), 1);
    assert_eq!(overlap_with(&[]), 1);
}

#[test]
fn cleared_or_evicted_blocks_are_removed() {
    let cleared = index_with(&["text_0", "image_0", "cleared_0"]);
    assert_eq!(cleared.stats(WORKER).unwrap().blocks, 0);
    let events = batch("removed_0").events;
    let removed = events.iter().find_map(|event| match event {
        KvEvent::BlockRemoved(removed) => Some(removed.block_hashes.clone()),
        _ => None,
    });
    let removed = removed.unwrap();
    let index = index_with(&[]);
    let stored =
        event::BlockStored { block_hashes: removed.clone(), block_size: 16, ..Default::default() };
    let events_stored = vec![KvEvent::BlockStored(stored)];
    let batch_stored =
        KvEventBatch { timestamp: 0.0, events: events_stored, data_parallel_rank: None };
    index.apply(WORKER, &batch_stored);
    assert_eq!(index.stats(WORKER).unwrap().blocks, removed.len());
    index.apply(WORKER, &batch("removed_0"));
    let stored = events.iter().map(|event| {
        if let KvEvent::BlockStored(stored) = event { stored.block_hashes.len() } else { 0 }
    });
    assert_eq!(index.stats(WORKER).unwrap().blocks, stored.sum::<usize>());
}
