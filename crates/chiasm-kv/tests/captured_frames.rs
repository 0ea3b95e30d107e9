//! Frames captured from vLLM 0.32: everything in them is read, and written again byte for byte.

use std::path::PathBuf;

use chiasm_kv::event::{self, BlockStored, Decoder, ExtraKey, KvEvent, KvEventBatch};
use chiasm_kv::{MediaSpan, PrefixIndex, PromptBlocks, block_keys};
use chiasm_types::{BlockSize, WorkerId};
use serde_json::{Value, json};

/// A message of a capture: its frames and what the index says about it.
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

/// An event in the notation of the capture's index.
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
            "parent_block_hash": stored.parent_block_hash.clone().map(|parent| hashes(&[parent])[0].clone()),
            "token_ids": format!("{} ids", stored.token_ids.len()),
            "block_size": stored.block_size,
            "lora_id": stored.lora_id,
            "medium": stored.medium,
            "lora_name": stored.lora_name,
            "extra_keys": stored.extra_keys.as_ref().map(|blocks| {
                blocks.iter().map(|block| { assert!(block.is_none()); Value::Null }).collect::<Value>()
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
fn every_published_message_is_what_the_capture_says() {
    let (mut with_facts, mut with_tags) = (0, 0);
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
fn every_replayed_message_is_read_and_each_replay_ends_with_the_marker() {
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
fn marks_of_images_and_salts_are_told_apart() {
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

/// The overlap of one prompt after a whole capture was applied in order.
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
fn the_engine_s_image_blocks_are_the_blocks_of_the_same_prompt() {
    // 80 placeholder tokens from 41 on: 9 in block 1, −23 in block 2, −55 in block 3.
    let (first, second) = (stored("kv_replay", "full_0"), stored("kv_replay", "full_1"));
    let tokens = [first.token_ids, second.token_ids].concat();
    let image = MediaSpan { hash: "ab".repeat(32).parse().unwrap(), offset: 41, length: 80 };
    let names = ["full_0", "full_1"];
    let of = |media: &[MediaSpan], salt| {
        overlap("kv_replay", &names, &PromptBlocks { tokens: &tokens, media, lora: None, salt })
    };
    assert_eq!(of(&[image], None), 4);
    assert_eq!(of(&[MediaSpan { hash: "cd".repeat(32).parse().unwrap(), ..image }], None), 1);
    assert_eq!(of(&[MediaSpan { offset: 40, ..image }], None), 1);
    assert_eq!(of(&[], None), 1);
    assert_eq!(of(&[image], Some("salty")), 0);
}

#[test]
fn the_engine_s_salted_blocks_are_found_with_the_salt_only() {
    let tokens = stored("kv_events", "stored_salt_2").token_ids;
    let of = |salt| {
        let prompt = PromptBlocks { tokens: &tokens, media: &[], lora: None, salt };
        overlap("kv_events", &["stored_salt_2"], &prompt)
    };
    assert_eq!(of(Some("salty")), 2);
    assert_eq!(of(Some("other")), 0);
    assert_eq!(of(None), 0);
}

#[test]
fn a_continuation_chains_to_its_parent() {
    let (head, tail) =
        (stored("kv_events", "stored_text_1"), stored("kv_events", "stored_parent_3"));
    let tokens = [head.token_ids, tail.token_ids].concat();
    let prompt = PromptBlocks { tokens: &tokens, ..Default::default() };
    assert_eq!(overlap("kv_events", &["stored_text_1", "stored_parent_3"], &prompt), 4);
    assert_eq!(overlap("kv_events", &["stored_parent_3"], &prompt), 0);
}

#[test]
fn a_whole_session_of_clears_evictions_and_duplicates_leaves_what_the_engine_holds() {
    let [index, from_payloads] = [PrefixIndex::new(), PrefixIndex::new()];
    [&index, &from_payloads].into_iter().for_each(|index| index.add_worker(WORKER, BLOCK));
    // Copies per hash, as the engine counts them.
    let mut copies = std::collections::HashMap::<_, i32>::new();
    for message in captured("kv_replay") {
        if !message.name.starts_with("full_") || message.frames[3].is_empty() {
            continue;
        }
        let batch = decode(&message.frames[3], &message.name);
        let (payload, before) = (&message.frames[3], index.stats(WORKER));
        let cut = from_payloads.apply_payload(
            WORKER,
            &payload[..payload.len() - 1],
            &mut Vec::new(),
            |_| panic!(),
        );
        assert!(cut.is_err());
        let (added, mut also_added) = (index.apply(WORKER, &batch), Vec::new());
        let look =
            |seen: &KvEventBatch| assert_eq!((seen, from_payloads.stats(WORKER)), (&batch, before));
        from_payloads.apply_payload(WORKER, payload, &mut also_added, look).unwrap();
        assert_eq!(
            (also_added, from_payloads.stats(WORKER)),
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
