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

fn hashes(hashes: std::ops::Range<u64>) -> Vec<ExternalHash> {
    hashes.map(ExternalHash::U64).collect()
}

/// The first `blocks` blocks of the prompt 0, 1, 2, …, with hashes 0, 1, ….
fn stored(blocks: u32) -> BlockStored {
    BlockStored {
        block_hashes: hashes(0..blocks.into()),
        token_ids: tokens(2 * blocks),
        block_size: 2,
        ..Default::default()
    }
}

fn removed(which: std::ops::Range<u64>) -> KvEvent {
    KvEvent::BlockRemoved(BlockRemoved { block_hashes: hashes(which), ..Default::default() })
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
fn new_blocks_are_told_once() {
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
fn blocks_elsewhere_don_t_count_whether_stored_or_removed() {
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
        let gone = BlockRemoved {
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
        // Fragments of blocks have no mark in removals; their hashes are others in practice.
        if gone != (BlockRemoved { block_hashes: hashes(0..4), ..Default::default() }) {
            apply(&index, KvEvent::BlockRemoved(gone));
            assert_eq!(overlap(&index, &plain), 4, "case {case}");
        }
    }
}

#[test]
fn the_gpu_s_first_group_counts_named_or_not() {
    let index = index();
    store(&index, BlockStored { medium: Some("GPU".into()), group_idx: Some(0), ..stored(4) });
    assert_eq!(overlap(&index, &keys(None, None, &[])), 4);
}

#[test]
fn blocks_without_their_parent_match_nothing_until_it_is_known() {
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
    // The second copy tells what the first was, and both count.
    assert_eq!(store(&index, tail), plain[1..]);
    apply(&index, removed(1..4));
    assert_eq!(overlap(&index, &plain), 4);
    apply(&index, removed(1..4));
    assert_eq!(overlap(&index, &plain), 1);
    assert_eq!(index.stats(WORKER).unwrap().unkeyed_blocks, 0);
}

#[test]
fn lora_name_and_salt_are_told_apart_by_their_place() {
    let cases: [(Option<&str>, Option<&str>, Vec<ExtraKey>); 6] = [
        (None, None, vec![]),
        (None, Some("s"), vec![text("s")]),
        (Some("a"), None, vec![text("a")]),
        (Some("a"), Some("s"), vec![text("a"), text("s")]),
        (Some("a"), Some("a"), vec![text("a"), text("a")]),
        // An engine that leaves the name out of the marks.
        (Some("a"), Some("s"), vec![text("s")]),
    ];
    for (lora, salt, first) in cases {
        let index = index();
        let later = if first.first() == Some(&text("a")) && lora.is_some() {
            vec![text("a")]
        } else {
            vec![]
        };
        let marks = |marks: &Vec<ExtraKey>| (!marks.is_empty()).then(|| marks.clone());
        store(
            &index,
            BlockStored {
                lora_name: lora.map(str::to_owned),
                extra_keys: Some(vec![marks(&first), marks(&later)]),
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
fn all_marks_of_one_block_together() {
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
fn marks_that_can_t_be_read_match_nothing_and_neither_do_the_children() {
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
    for marks in unreadable {
        let index = index();
        store(
            &index,
            BlockStored { extra_keys: Some(vec![None, Some(marks.clone()), None]), ..stored(3) },
        );
        assert_eq!(overlap(&index, &plain), 1, "{marks:?}");
        let stats = index.stats(WORKER).unwrap();
        assert_eq!(
            (stats.unkeyed_blocks, stats.unreadable_extra_keys, stats.unknown_parents),
            (2, 1, 1),
            "{marks:?}"
        );
        apply(&index, removed(0..3));
        assert_eq!(index.stats(WORKER).unwrap().unkeyed_blocks, 0);
    }
}

#[test]
fn a_salt_in_a_later_block_can_t_be_read() {
    let index = index();
    store(&index, BlockStored { extra_keys: Some(vec![None, Some(vec![text("s")])]), ..stored(2) });
    assert_eq!(overlap(&index, &keys(None, None, &[])), 1);
}

#[test]
fn events_whose_numbers_don_t_fit_together_match_nothing() {
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
fn one_hash_for_two_contents_matches_neither_until_it_was_removed_as_often() {
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
fn two_hashes_for_one_key_are_held_until_both_are_gone() {
    // As for two adapters of one name, which the engine tells apart by path.
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
fn unknown_events_removals_and_workers_are_counted_or_ignored() {
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
fn workers_are_listed_in_order_and_forgotten_when_removed() {
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
fn presumed_blocks_count_once_and_until_they_are_forgotten() {
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
fn presumed_blocks_that_share_a_name_with_an_event_s_claim_nothing_that_neither_says() {
    let plain = keys(None, None, &[]);
    let named = |block: usize| ExternalHash::U64(cache::unmixed(plain[block].as_engine_hash()));
    // The name of the third block is the engine's for another one, keyed or not.
    for parent in [None, Some(ExternalHash::U64(77))] {
        let index = index();
        let other = BlockStored {
            block_hashes: vec![named(2)],
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
        apply(
            &index,
            KvEvent::BlockRemoved(BlockRemoved {
                block_hashes: vec![named(2)],
                ..Default::default()
            }),
        );
        assert_eq!(index.totals().entries, 0);
    }
}

#[test]
fn presumed_blocks_are_shed_below_a_cap() {
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
fn a_worker_holds_no_more_blocks_than_it_may() {
    // `worker` has this bound in tests alone.
    const MOST: u64 = 1 << 15;
    let index = index();
    let blocks = |of: std::ops::Range<u64>| {
        let token_ids = tokens(2 * (of.end - of.start) as u32);
        store(
            &index,
            BlockStored {
                token_ids,
                block_hashes: hashes(of),
                block_size: 2,
                ..Default::default()
            },
        );
    };
    blocks(0..MOST - 1);
    blocks(MOST..MOST + 2);
    let stats = index.stats(WORKER).unwrap();
    assert_eq!((stats.blocks as u64, stats.ignored_events), (MOST - 1, 1));
    apply(&index, removed(0..1));
    blocks(MOST..MOST + 2);
    assert_eq!(index.stats(WORKER).unwrap().ignored_events, 1, "there is room again");
}
