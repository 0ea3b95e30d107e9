use super::cache_with_events::CacheWithEvents;
use super::*;
use std::collections::HashMap;

use crate::block_chain::MediaRange;
use chiasm_engine_model::BlockTable;
use proptest::prelude::*;

const BLOCK: usize = 4;

fn tokens(from: u32, count: usize) -> Vec<TokenId> {
    (from..).take(count).map(TokenId).collect()
}

/// A request that goes through the cache as in the scheduler.
struct Prompt {
    tokens: Vec<TokenId>,
    chain: BlockChain,
    table: BlockTable,
}

impl Prompt {
    fn new(tokens: Vec<TokenId>) -> Self {
        let mut chain = BlockChain::new(BLOCK, Vec::<MediaRange>::new(), None, None);
        chain.extend(&tokens);
        Self { tokens, chain, table: BlockTable::default() }
    }

    /// Returns the number of tokens found in the cache; `None` if the request does not fit.
    fn compute(&mut self, cache: &mut CacheWithEvents) -> Option<usize> {
        let hits = cache.find(self.chain.hashes(), self.tokens.len() - 1);
        let end = self.tokens.len();
        cache.grow(&mut self.table, &hits, end).then(|| {
            cache.store(&mut self.table, &self.chain, &self.tokens, end);
            hits.len() * BLOCK
        })
    }
}

/// Formats events: `+hash` for each stored block, `-hash` for each removed one, `!` for all.
fn summary(events: &[KvEvent]) -> Vec<String> {
    let name = |sign: &str, hash: &ExternalHash| match hash {
        ExternalHash::U64(hash) => format!("{sign}{hash:x}"),
        ExternalHash::Bytes(_) => panic!("the simulator publishes integers"),
    };
    let mut summary = Vec::new();
    for event in events {
        match event {
            KvEvent::BlockStored(stored) => {
                summary.extend(stored.block_hashes.iter().map(|hash| name("+", hash)))
            }
            KvEvent::BlockRemoved(removed) => {
                summary.extend(removed.block_hashes.iter().map(|hash| name("-", hash)))
            }
            KvEvent::AllBlocksCleared => summary.push("!".into()),
            other => panic!("unexpected {other:?}"),
        }
    }
    summary
}

fn names(sign: &str, hashes: &[BlockHash]) -> Vec<String> {
    hashes.iter().map(|hash| format!("{sign}{:x}", hash.external())).collect()
}

#[test]
fn null_block_counts_but_is_never_used() {
    let mut cache = CacheWithEvents::new(4, BLOCK);
    assert_eq!(cache.usage(), 0.0);
    let mut prompt = Prompt::new(tokens(0, 12));
    assert_eq!(prompt.compute(&mut cache), Some(0));
    assert_eq!(cache.usage(), 1.0);
    assert_eq!(Prompt::new(tokens(50, 1)).compute(&mut cache), None);
}

#[test]
fn repeated_prompt_hits_all_but_the_last_token() {
    let mut cache = CacheWithEvents::new(20, BLOCK);
    for (length, expected) in [(9, 8), (8, 4), (4, 0), (3, 0)] {
        Prompt::new(tokens(length, length as usize)).compute(&mut cache);
        assert_eq!(
            Prompt::new(tokens(length, length as usize)).compute(&mut cache),
            Some(expected),
            "{length}"
        );
    }
}

#[test]
fn stored_event_has_parent_tokens_kind() {
    let mut cache = CacheWithEvents::new(20, BLOCK);
    let mut first = Prompt::new(tokens(0, 6));
    first.compute(&mut cache);
    cache.take_events();
    let mut second = Prompt::new(tokens(0, 14));
    assert_eq!(second.compute(&mut cache), Some(4));
    let events = cache.take_events();
    let [KvEvent::BlockStored(stored)] = &events[..] else { panic!("{events:?}") };
    assert_eq!(
        stored.block_hashes,
        second.chain.hashes()[1..3].iter().copied().map(external).collect::<Vec<_>>()
    );
    assert_eq!(stored.parent_block_hash, Some(external(second.chain.hashes()[0])));
    assert_eq!(stored.token_ids, tokens(4, 8));
    assert_eq!(stored.block_size, 4);
    assert_eq!(stored.extra_keys, Some(vec![None, None]));
    assert_eq!((stored.medium.as_deref(), stored.group_idx), (Some("GPU"), Some(0)));
    assert_eq!(stored.kv_cache_spec_kind.as_deref(), Some("full_attention"));
}

#[test]
fn equal_blocks_have_one_event_per_copy() {
    // Captured from vLLM 0.32 (chiasm-kv/tests/fixtures/kv_events, topic_dup_*): the second of two
    // equal prompts recomputes its last block.
    let mut cache = CacheWithEvents::new(5, BLOCK);
    let mut one = Prompt::new(tokens(0, 8));
    let mut two = Prompt::new(tokens(0, 8));
    assert_eq!(one.compute(&mut cache), Some(0));
    assert_eq!(two.compute(&mut cache), Some(4));
    let hashes = one.chain.hashes().to_vec();
    let expected = [names("+", &hashes), names("+", &hashes[1..])].concat();
    assert_eq!(summary(&cache.take_events()), expected);

    cache.release(&mut one.table);
    cache.release(&mut two.table);
    // Four blocks, one never used. The tail of the first request is the oldest, then the second's
    // tail, then the shared head.
    let mut three = Prompt::new(tokens(100, 15));
    assert_eq!(three.compute(&mut cache), Some(0));
    let events = summary(&cache.take_events());
    let removed =
        [names("-", &hashes[1..]), names("-", &hashes[1..]), names("-", &hashes[..1])].concat();
    assert_eq!(events[..3], removed);
    assert_eq!(events.len(), 3 + 3);
}

#[test]
fn unhashed_blocks_are_reused_before_oldest_tails() {
    let mut cache = CacheWithEvents::new(8, BLOCK);
    let mut old = Prompt::new(tokens(0, 10));
    let mut new = Prompt::new(tokens(50, 12));
    old.compute(&mut cache);
    new.compute(&mut cache);
    cache.release(&mut old.table);
    cache.release(&mut new.table);
    cache.take_events();
    // 7 usable blocks: 2 without a hash (the partial block and one never used), then 2 of `old`,
    // then 3 of `new`, tails first.
    let mut third = Prompt::new(tokens(200, 20));
    third.compute(&mut cache);
    let expected: Vec<_> =
        [old.chain.hashes()[1], old.chain.hashes()[0], new.chain.hashes()[2]].to_vec();
    assert_eq!(summary(&cache.take_events())[..3], names("-", &expected));
}

#[test]
fn hit_on_a_free_block_consumes_it() {
    let mut cache = CacheWithEvents::new(4, BLOCK);
    let mut first = Prompt::new(tokens(0, 12));
    first.compute(&mut cache);
    cache.release(&mut first.table);
    // The two hits leave one free block, and a fourth block would be needed.
    let mut longer = Prompt::new(tokens(0, 13));
    assert_eq!(longer.compute(&mut cache), None);
    assert_eq!(longer.table.len(), 0);
    assert_eq!(Prompt::new(tokens(0, 12)).compute(&mut cache), Some(8));
}

#[test]
fn reset_fails_while_blocks_are_in_use() {
    let mut cache = CacheWithEvents::new(9, BLOCK);
    let mut prompt = Prompt::new(tokens(0, 12));
    prompt.compute(&mut cache);
    assert!(!cache.reset());
    cache.release(&mut prompt.table);
    cache.take_events();
    assert!(cache.reset());
    assert_eq!(summary(&cache.take_events()), ["!"]);
    assert_eq!(Prompt::new(tokens(0, 12)).compute(&mut cache), Some(0));
    assert_eq!(
        summary(&cache.take_events()).len(),
        3,
        "blocks that were cleared are not removed again"
    );
}

#[derive(Clone, Debug)]
enum Operation {
    Start { family: u32, length: usize },
    Grow { which: prop::sample::Index, more: usize },
    Finish { which: prop::sample::Index },
    Reset,
}

fn operation() -> impl Strategy<Value = Operation> {
    let which = any::<prop::sample::Index>();
    prop_oneof![
        4 => (0u32..3, 1usize..40).prop_map(|(family, length)| Operation::Start { family, length }),
        3 => (which.clone(), 1usize..6).prop_map(|(which, more)| Operation::Grow { which, more }),
        3 => which.prop_map(|which| Operation::Finish { which }),
        1 => Just(Operation::Reset),
    ]
}

proptest! {
    /// `chiasm-engine-model` tests the cache itself; this test is about the events.
    #[test]
    fn events_describe_the_findable_blocks(
        operations in prop::collection::vec(operation(), 1..120),
    ) {
        let mut cache = CacheWithEvents::new(24, BLOCK);
        let mut live: Vec<Prompt> = Vec::new();
        let mut chains: Vec<BlockChain> = Vec::new();
        // The state of a listener: copies by hash.
        let mut copies: HashMap<String, i32> = HashMap::new();
        for operation in operations {
            match operation {
                Operation::Start { family, length } => {
                    let mut prompt = Prompt::new(tokens(family * 1000, length));
                    let before = cache.usage();
                    match prompt.compute(&mut cache) {
                        Some(cached) => {
                            prop_assert!(cached < length && cached % BLOCK == 0);
                            live.push(prompt);
                        }
                        None => prop_assert_eq!(before, cache.usage(), "a refusal changes nothing"),
                    }
                }
                Operation::Grow { which, more } if !live.is_empty() => {
                    let at = which.index(live.len());
                    let prompt = &mut live[at];
                    let next = prompt.tokens.last().unwrap().0 + 1;
                    prompt.tokens.extend(tokens(next, more));
                    prompt.chain.extend(&prompt.tokens);
                    chains.push(prompt.chain.clone());
                    let end = prompt.tokens.len();
                    if cache.grow(&mut prompt.table, &[], end) {
                        cache.store(&mut prompt.table, &prompt.chain, &prompt.tokens, end);
                    } else {
                        cache.release(&mut live.swap_remove(at).table);
                    }
                }
                Operation::Finish { which } if !live.is_empty() => {
                    let mut ended = live.swap_remove(which.index(live.len()));
                    cache.release(&mut ended.table);
                    chains.push(ended.chain);
                }
                Operation::Reset => prop_assert_eq!(cache.reset(), live.is_empty()),
                _ => {}
            }

            for change in summary(&cache.take_events()) {
                match change.split_at(1) {
                    ("+", hash) => *copies.entry(hash.to_owned()).or_default() += 1,
                    ("-", hash) => {
                        *copies.get_mut(hash).expect("only stored blocks are removed") -= 1;
                    }
                    _ => copies.clear(),
                }
            }
            copies.retain(|_, count| *count != 0);
            prop_assert!(copies.values().all(|count| *count > 0));
            for chain in live.iter().map(|prompt| &prompt.chain).chain(&chains) {
                let known =
                    |hash: &BlockHash| copies.contains_key(&format!("{:x}", hash.external()));
                for (at, hash) in chain.hashes().iter().enumerate() {
                    let found = cache.find(&chain.hashes()[at..=at], BLOCK).len() == 1;
                    prop_assert_eq!(found, known(hash));
                }
            }
        }
    }
}
