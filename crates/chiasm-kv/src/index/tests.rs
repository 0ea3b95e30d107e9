use chiasm_types::TokenId;

use super::*;
use crate::event::{BlockRemoved, BlockStored, ExternalHash, ExtraKey};
use crate::{MediaSpan, PromptBlocks, block_keys};

const BLOCK: BlockSize = BlockSize::new(2).unwrap();
const WORKER: WorkerId = WorkerId(0);

fn index() -> PrefixIndex {
    let index = PrefixIndex::new();
    index.add_worker(WORKER, BLOCK);
    index
}

fn tokens(count: u32) -> Vec<TokenId> {
    (0..count).map(TokenId).collect()
}

fn hashes(range: std::ops::Range<u64>) -> Vec<ExternalHash> {
    range.map(ExternalHash::U64).collect()
}

/// Returns the event of the first `blocks` blocks of the prompt 0, 1, 2, …, with hashes 0, 1, ….
fn stored(blocks: u32) -> BlockStored {
    BlockStored {
        block_hashes: hashes(0..blocks.into()),
        token_ids: tokens(2 * blocks),
        block_size: 2,
        ..Default::default()
    }
}

fn removed(range: std::ops::Range<u64>) -> KvEvent {
    KvEvent::BlockRemoved(BlockRemoved { block_hashes: hashes(range), ..Default::default() })
}

fn apply(index: &PrefixIndex, event: KvEvent) -> Vec<BlockKey> {
    index.apply(
        WORKER,
        &KvEventBatch { timestamp: 0.0, events: vec![event], data_parallel_rank: None },
    )
}

fn store(index: &PrefixIndex, stored: BlockStored) -> Vec<BlockKey> {
    apply(index, KvEvent::BlockStored(stored))
}

fn keys(lora: Option<&str>, salt: Option<&str>, media: &[MediaSpan]) -> Vec<BlockKey> {
    block_keys(&PromptBlocks { tokens: &tokens(8), media, lora, salt }, BLOCK)
}

fn overlap(index: &PrefixIndex, keys: &[BlockKey]) -> usize {
    index.overlaps(keys)[0].1
}

fn text(text: &str) -> ExtraKey {
    ExtraKey::Text(text.into())
}

fn media(identifier: &str, offset: i64) -> ExtraKey {
    ExtraKey::Media { identifier: identifier.into(), offset }
}

#[test]
fn new_blocks_are_returned_once() {
    let index = index();
    let plain = keys(None, None, &[]);
    assert_eq!(store(&index, stored(2)), plain[..2]);
    assert_eq!(store(&index, stored(3)), plain[2..3]);
    apply(&index, removed(0..1));
    assert_eq!(overlap(&index, &plain), 3, "one copy of two is left");
    apply(&index, removed(0..1));
    assert_eq!(overlap(&index, &plain), 0);
    assert_eq!(store(&index, stored(1)), plain[..1]);
    assert_eq!(overlap(&index, &plain), 3);
}

#[test]
fn events_of_other_locations_are_ignored() {
    let elsewhere: [fn(&mut BlockStored); 4] = [
        |stored| stored.medium = Some("TAPE".into()),
        |stored| {
            stored.medium = Some("CPU".into());
            stored.locality = Some("REMOTE".into());
        },
        |stored| stored.locality = Some("REMOTE".into()),
        |stored| {
            stored.block_size = 1;
            stored.block_hashes = hashes(0..8);
        },
    ];
    let plain = keys(None, None, &[]);
    for (case, change) in elsewhere.into_iter().enumerate() {
        let index = index();
        let mut other = stored(4);
        change(&mut other);
        let removed = BlockRemoved {
            block_hashes: hashes(0..4),
            medium: other.medium.clone(),
            group_idx: other.group_idx,
            locality: other.locality.clone(),
            ..Default::default()
        };
        store(&index, other);
        let stats = index.stats(WORKER).unwrap();
        assert_eq!(
            (stats.blocks, stats.unkeyed_blocks, stats.ignored_events),
            (0, 0, 1),
            "case {case}"
        );
        store(&index, stored(4));
        // Removals don't mark fragments of blocks; in practice fragments have other hashes.
        if removed != (BlockRemoved { block_hashes: hashes(0..4), ..Default::default() }) {
            apply(&index, KvEvent::BlockRemoved(removed));
            assert_eq!(overlap(&index, &plain), 4, "case {case}");
        }
    }
}

#[test]
fn explicit_gpu_group_zero_counts() {
    let index = index();
    store(&index, BlockStored { medium: Some("GPU".into()), group_idx: Some(0), ..stored(4) });
    assert_eq!(overlap(&index, &keys(None, None, &[])), 4);
}

#[test]
fn blocks_match_once_parent_is_known() {
    let index = index();
    let plain = keys(None, None, &[]);
    let tail = BlockStored {
        block_hashes: hashes(1..4),
        parent_block_hash: Some(ExternalHash::U64(0)),
        token_ids: tokens(8)[2..].to_vec(),
        ..stored(0)
    };
    assert_eq!(store(&index, tail.clone()), []);
    let stats = index.stats(WORKER).unwrap();
    assert_eq!((stats.blocks, stats.unkeyed_blocks, stats.unknown_parents), (0, 3, 3));
    assert_eq!(store(&index, stored(1)), plain[..1]);
    assert_eq!(overlap(&index, &plain), 1);
    // The second copy reveals the keys, and both copies count.
    assert_eq!(store(&index, tail), plain[1..]);
    apply(&index, removed(1..4));
    assert_eq!(overlap(&index, &plain), 4);
    apply(&index, removed(1..4));
    assert_eq!(overlap(&index, &plain), 1);
    assert_eq!(index.stats(WORKER).unwrap().unkeyed_blocks, 0);
}

#[test]
fn lora_name_is_distinguished_from_salt_by_order() {
    let cases: [(Option<&str>, Option<&str>, Vec<ExtraKey>); 6] = [
        (None, None, vec![]),
        (None, Some("s"), vec![text("s")]),
        (Some("a"), None, vec![text("a")]),
        (Some("a"), Some("s"), vec![text("a"), text("s")]),
        (Some("a"), Some("a"), vec![text("a"), text("a")]),
        // An engine that leaves the name out of the extra keys.
        (Some("a"), Some("s"), vec![text("s")]),
    ];
    for (lora, salt, first) in cases {
        let index = index();
        let later = if first.first() == Some(&text("a")) && lora.is_some() {
            vec![text("a")]
        } else {
            vec![]
        };
        let optional = |keys: &Vec<ExtraKey>| (!keys.is_empty()).then(|| keys.clone());
        store(
            &index,
            BlockStored {
                lora_name: lora.map(str::to_owned),
                extra_keys: Some(vec![optional(&first), optional(&later)]),
                ..stored(2)
            },
        );
        for (other_lora, other_salt) in [
            (None, None),
            (None, Some("s")),
            (Some("a"), None),
            (Some("a"), Some("s")),
            (Some("a"), Some("a")),
        ] {
            let expected = if (other_lora, other_salt) == (lora, salt) { 2 } else { 0 };
            let found = overlap(&index, &keys(other_lora, other_salt, &[]));
            assert_eq!(
                found, expected,
                "{lora:?} {salt:?} {first:?} as {other_lora:?} {other_salt:?}"
            );
        }
    }
}

#[test]
fn block_with_all_kinds_of_extra_keys_matches() {
    let index = index();
    let ours = "ab".repeat(32);
    store(
        &index,
        BlockStored {
            lora_name: Some("a".into()),
            extra_keys: Some(vec![
                Some(vec![text("a"), media(&ours, 0), media(&ours, 1), text("s")]),
                Some(vec![text("a"), media(&ours, -1)]),
            ]),
            ..stored(2)
        },
    );
    let hash = ours.parse().unwrap();
    let spans =
        [MediaSpan { hash, offset: 0, length: 1 }, MediaSpan { hash, offset: 1, length: 2 }];
    assert_eq!(overlap(&index, &keys(Some("a"), Some("s"), &spans)), 2);
    assert_eq!(overlap(&index, &keys(Some("a"), Some("s"), &spans[..1])), 0);
}

#[test]
fn unreadable_extra_keys_end_the_overlap() {
    let unreadable: [Vec<ExtraKey>; 5] = [
        // A digest of prompt embeddings.
        vec![ExtraKey::Other(vec![0xc4, 1, 7])],
        vec![media("x", 0), ExtraKey::Other(vec![0xc4, 1, 7])],
        // Two texts without a LoRA name.
        vec![text("s"), text("t")],
        // Text before media, without a LoRA name.
        vec![text("s"), media("x", 0)],
        vec![text("s"), ExtraKey::Other(vec![0xc0])],
    ];
    let plain = keys(None, None, &[]);
    for extra_keys in unreadable {
        let index = index();
        let blocks = vec![None, Some(extra_keys.clone()), None];
        store(&index, BlockStored { extra_keys: Some(blocks), ..stored(3) });
        assert_eq!(overlap(&index, &plain), 1, "{extra_keys:?}");
        let stats = index.stats(WORKER).unwrap();
        assert_eq!(
            (stats.unkeyed_blocks, stats.unreadable_extra_keys, stats.unknown_parents),
            (2, 1, 1),
            "{extra_keys:?}"
        );
        apply(&index, removed(0..3));
        assert_eq!(index.stats(WORKER).unwrap().unkeyed_blocks, 0);
    }
}

#[test]
fn salt_in_later_block_is_unreadable() {
    let index = index();
    store(&index, BlockStored { extra_keys: Some(vec![None, Some(vec![text("s")])]), ..stored(2) });
    assert_eq!(overlap(&index, &keys(None, None, &[])), 1);
}

#[test]
fn events_with_inconsistent_lengths_match_nothing() {
    let plain = keys(None, None, &[]);
    for broken in [
        BlockStored { token_ids: tokens(7), ..stored(4) },
        BlockStored { token_ids: tokens(8), ..stored(3) },
        BlockStored { extra_keys: Some(vec![None; 3]), ..stored(4) },
    ] {
        let index = index();
        store(&index, broken);
        assert_eq!(overlap(&index, &plain), 0);
        apply(&index, removed(0..4));
        assert_eq!(index.stats(WORKER).unwrap().unkeyed_blocks, 0);
    }
}

#[test]
fn hash_of_two_contents_matches_nothing() {
    let index = index();
    store(&index, stored(1));
    let other = BlockStored { token_ids: vec![TokenId(7), TokenId(7)], ..stored(1) };
    store(&index, other);
    for left in [1, 1, 0] {
        assert_eq!((index.totals().blocks, index.totals().entries), (0, left));
        assert_eq!(overlap(&index, &keys(None, None, &[])), 0);
        apply(&index, removed(0..1));
    }
    let stats = index.stats(WORKER).unwrap();
    assert_eq!((stats.blocks, stats.unkeyed_blocks, stats.unknown_removals), (0, 0, 1));
}

#[test]
fn key_with_two_hashes_is_held_until_both_are_removed() {
    // This happens for two adapters with one name, which the engine distinguishes by path.
    let index = index();
    let plain = keys(None, None, &[]);
    store(&index, stored(1));
    let other = BlockStored { block_hashes: vec![ExternalHash::Bytes(vec![1; 32])], ..stored(1) };
    assert_eq!(store(&index, other), [], "the block is not new");
    apply(&index, removed(0..1));
    assert_eq!(overlap(&index, &plain), 1);
    let other =
        BlockRemoved { block_hashes: vec![ExternalHash::Bytes(vec![1; 32])], ..Default::default() };
    apply(&index, KvEvent::BlockRemoved(other));
    assert_eq!(overlap(&index, &plain), 0);
}

#[test]
fn unknown_events_or_workers_change_nothing() {
    let index = index();
    apply(&index, KvEvent::Unknown("BlockDreamt".into()));
    apply(&index, removed(5..7));
    let stats = index.stats(WORKER).unwrap();
    assert_eq!((stats.events, stats.ignored_events, stats.unknown_removals), (2, 1, 2));
    let events = vec![KvEvent::BlockStored(stored(1))];
    assert_eq!(
        index
            .apply(WorkerId(9), &KvEventBatch { timestamp: 0.0, events, data_parallel_rank: None }),
        []
    );
    assert_eq!(index.stats(WorkerId(9)), None);
}

#[test]
fn overlaps_are_in_order_of_worker_ids() {
    let index = PrefixIndex::new();
    [3, 1, 2].iter().for_each(|id| index.add_worker(WorkerId(*id), BLOCK));
    let batch = KvEventBatch {
        timestamp: 0.0,
        events: vec![KvEvent::BlockStored(stored(4))],
        data_parallel_rank: None,
    };
    index.apply(WorkerId(2), &batch);
    index.apply(WorkerId(3), &batch);
    index.remove_worker(WorkerId(3));
    let plain = keys(None, None, &[]);
    assert_eq!(index.overlaps(&plain), [(WorkerId(1), 0), (WorkerId(2), 4)]);
    index.add_worker(WorkerId(2), BLOCK);
    assert_eq!(index.overlaps(&plain), [(WorkerId(1), 0), (WorkerId(2), 0)]);
}

#[test]
fn presumed_blocks_count_until_forgotten() {
    let index = index();
    let plain = keys(None, None, &[]);
    index.presume(WORKER, &plain[..3]);
    index.presume(WORKER, &plain[..2]);
    assert_eq!((overlap(&index, &plain), index.stats(WORKER).unwrap().blocks), (3, 3));
    index.forget(WORKER, &[plain[2], plain[1]]);
    assert_eq!(overlap(&index, &plain), 1);
    index.forget(WORKER, &plain[1..2]);
    assert_eq!(index.stats(WORKER).unwrap().unknown_removals, 1);
    index.presume(WORKER, &plain);
    index.forget(WORKER, &plain[..1]);
    assert_eq!((overlap(&index, &plain), index.totals().blocks), (0, 3));
    index.presume(WORKER, &plain[..1]);
    assert_eq!((overlap(&index, &plain), index.totals().blocks), (4, 4));
    index.presume(WorkerId(9), &plain);
    assert_eq!(index.overlaps(&plain), [(WORKER, 4)]);
}

#[test]
fn presumed_blocks_with_hash_of_other_block_are_ignored() {
    let plain = keys(None, None, &[]);
    let presumed_hash =
        |block: usize| ExternalHash::U64(cache::unmixed(plain[block].as_engine_hash()));
    // The engine uses the presumed hash of the third block for another block, keyed or not.
    for parent in [None, Some(ExternalHash::U64(77))] {
        let index = index();
        let other = BlockStored {
            block_hashes: vec![presumed_hash(2)],
            parent_block_hash: parent,
            token_ids: tokens(2),
            ..stored(0)
        };
        store(&index, other);
        index.presume(WORKER, &plain);
        assert_eq!(overlap(&index, &plain), 2);
        index.forget(WORKER, &[plain[3], plain[2]]);
        assert_eq!(overlap(&index, &plain), 2);
        index.forget(WORKER, &[plain[1], plain[0]]);
        let removed = BlockRemoved { block_hashes: vec![presumed_hash(2)], ..Default::default() };
        apply(&index, KvEvent::BlockRemoved(removed));
        assert_eq!(index.totals().entries, 0);
    }
}

#[test]
fn presumed_blocks_are_shed_to_keep_cap() {
    const CAP: usize = 200_000;
    let index = PrefixIndex::with_max_bytes(CAP);
    index.add_worker(WORKER, BLOCK);
    for start in 0..2000 {
        let tokens: Vec<_> = (start..start + 16).map(TokenId).collect();
        let chain = block_keys(&PromptBlocks { tokens: &tokens, ..Default::default() }, BLOCK);
        index.presume(WORKER, &chain);
        assert_eq!(overlap(&index, &chain), 8);
        assert!(index.totals().bytes <= CAP);
    }
    let totals = index.totals();
    assert_eq!(totals.entries + totals.shed as usize, 16_000);
    assert!(totals.shed > 0);
}

#[test]
fn blocks_over_worker_limit_are_ignored() {
    // The limit of `worker` in tests.
    const MAX_BLOCKS: u64 = 1 << 15;
    let index = index();
    let store_blocks = |range: std::ops::Range<u64>| {
        let token_ids = tokens(2 * (range.end - range.start) as u32);
        store(
            &index,
            BlockStored {
                token_ids,
                block_hashes: hashes(range),
                block_size: 2,
                ..Default::default()
            },
        );
    };
    store_blocks(0..MAX_BLOCKS - 1);
    store_blocks(MAX_BLOCKS..MAX_BLOCKS + 2);
    let stats = index.stats(WORKER).unwrap();
    assert_eq!((stats.blocks as u64, stats.ignored_events), (MAX_BLOCKS - 1, 1));
    apply(&index, removed(0..1));
    store_blocks(MAX_BLOCKS..MAX_BLOCKS + 2);
    assert_eq!(index.stats(WORKER).unwrap().ignored_events, 1, "there is room again");
}
