use proptest::prelude::*;

use super::*;

const SIZE: usize = 4;

/// A prompt whose blocks have hashes by its text: two texts have no block in common.
struct Prompt {
    text: u32,
    length: usize,
    table: BlockTable,
}

struct Fixture {
    cache: PagedCache<u32>,
    hits: Vec<BlockId>,
    /// The stored hashes, the evicted ones as negative numbers, and 0 for each reset.
    events: Vec<i64>,
}

fn hash(text: u32, block: usize) -> u32 {
    text * 100 + block as u32 + 1
}

impl Fixture {
    fn new(blocks: u32) -> Self {
        Self { cache: PagedCache::new(blocks, SIZE), hits: Vec::new(), events: Vec::new() }
    }

    fn find(&mut self, text: u32, length: usize) -> usize {
        self.cache.find(
            (0..length / SIZE).map(|block| hash(text, block)),
            length - 1,
            &mut self.hits,
        );
        self.hits.len()
    }

    /// Computes a whole prompt, starting with its cached blocks. Returns it with the number of
    /// those; `None` if it does not fit.
    fn hold(&mut self, text: u32, length: usize) -> Option<(Prompt, usize)> {
        let hits = self.find(text, length);
        let mut table = BlockTable::default();
        let missing = self.cache.missing(&table, length) - hits;
        if missing + self.cache.count_free(&self.hits) > self.cache.free() {
            return None;
        }
        self.cache.take(&mut table, &self.hits);
        let mut prompt = Prompt { text, length, table };
        self.grow(&mut prompt, length);
        Some((prompt, hits))
    }

    /// Makes a prompt longer and returns `true`, if there is room.
    fn grow(&mut self, prompt: &mut Prompt, length: usize) -> bool {
        if self.cache.missing(&prompt.table, length) > self.cache.free() {
            return false;
        }
        let Self { cache, events, .. } = self;
        cache.grow(&mut prompt.table, length, |hash| events.push(-i64::from(hash)));
        let stored = cache.store(&mut prompt.table, length, |block| hash(prompt.text, block));
        events.extend(stored.map(|block| i64::from(hash(prompt.text, block))));
        prompt.length = length;
        true
    }

    /// Computes a prompt, releases it and returns the number of its cached blocks.
    fn compute(&mut self, text: u32, length: usize) -> usize {
        let (mut prompt, hits) = self.hold(text, length).unwrap();
        self.cache.release(&mut prompt.table);
        hits
    }

    fn count_evicted(&self) -> usize {
        self.events.iter().filter(|&&event| event < 0).count()
    }
}

#[test]
fn last_token_is_always_computed_again() {
    let mut fixture = Fixture::new(10);
    assert_eq!(fixture.compute(1, 12), 0);
    assert_eq!(fixture.compute(1, 12), 2);
    assert_eq!(fixture.compute(1, 13), 3);
}

#[test]
fn least_recently_used_chain_is_evicted_from_its_end() {
    let mut fixture = Fixture::new(6);
    fixture.compute(1, 13);
    fixture.compute(2, 9);
    // Blocks without a hash are allocated first: text 1 has three blocks, text 2 two, one is empty.
    fixture.events.clear();
    assert_eq!(fixture.compute(3, 8), 0);
    assert_eq!(fixture.events[..1], [-i64::from(hash(1, 2))]);
    assert_eq!(fixture.count_evicted(), 1);
    assert_eq!((fixture.find(1, 13), fixture.find(2, 9)), (2, 2));
}

#[test]
fn allocation_order_is_unhashed_then_oldest_tail_first() {
    let mut fixture = Fixture::new(7);
    let (mut old, _) = fixture.hold(1, 10).unwrap();
    let (mut new, _) = fixture.hold(2, 12).unwrap();
    let partial = old.table.blocks[2];
    fixture.cache.release(&mut old.table);
    fixture.cache.release(&mut new.table);
    assert_eq!(fixture.cache.free.order()[0], partial);
    fixture.events.clear();
    // First 2 blocks without a hash (the partial one and one never used), then 2 of `old`, then 3
    // of `new`, each from the end.
    fixture.compute(3, 20);
    let evicted = [hash(1, 1), hash(1, 0), hash(2, 2)].map(|hash| -i64::from(hash));
    assert_eq!(fixture.events[..3], evicted);
}

#[test]
fn reset_requires_that_no_request_holds_blocks() {
    let mut fixture = Fixture::new(8);
    let (mut held, _) = fixture.hold(1, 12).unwrap();
    assert!(!fixture.cache.reset());
    fixture.cache.release(&mut held.table);
    assert!(fixture.cache.reset());
    fixture.events.clear();
    assert_eq!(fixture.compute(1, 12), 0);
    fixture.compute(2, 32);
    assert_eq!(fixture.count_evicted(), 3, "blocks removed by the reset are not evicted again");
}

#[test]
fn hit_block_is_not_evicted_while_it_is_held() {
    let mut fixture = Fixture::new(4);
    fixture.compute(1, 9);
    let (mut held, hits) = fixture.hold(1, 9).unwrap();
    assert_eq!(hits, 2);
    fixture.compute(2, 4);
    assert_eq!(fixture.compute(1, 8), 1);
    fixture.cache.release(&mut held.table);
    assert_eq!((fixture.cache.free(), fixture.cache.usage()), (4, 0.0));
}

#[test]
fn copies_are_stored_evicted_one_by_one() {
    let mut fixture = Fixture::new(4);
    // A prompt of exactly two blocks hits one and computes the other again.
    let (mut first, _) = fixture.hold(1, 8).unwrap();
    let (mut second, _) = fixture.hold(1, 8).unwrap();
    fixture.cache.release(&mut first.table);
    fixture.cache.release(&mut second.table);
    assert_eq!(fixture.cache.distinct_hashes(), 2);
    fixture.events.clear();
    // One block is unused; allocating two more evicts both copies of the second block.
    fixture.compute(2, 12);
    let evicted = -i64::from(hash(1, 1));
    let stored = [0, 1, 2].map(|block| i64::from(hash(2, block)));
    assert_eq!(fixture.events, [[evicted, evicted].as_slice(), &stored].concat());
    assert_eq!(fixture.cache.distinct_hashes(), 4);
}

#[derive(Clone, Debug)]
enum Operation {
    Start { text: u32, length: usize },
    Grow { which: prop::sample::Index, more: usize },
    Finish { which: prop::sample::Index },
    Reset,
}

fn operation() -> impl Strategy<Value = Operation> {
    let which = any::<prop::sample::Index>();
    prop_oneof![
        4 => (0u32..3, 1usize..40).prop_map(|(text, length)| Operation::Start { text, length }),
        3 => (which.clone(), 1usize..6).prop_map(|(which, more)| Operation::Grow { which, more }),
        3 => which.prop_map(|which| Operation::Finish { which }),
        1 => Just(Operation::Reset),
    ]
}

proptest! {
    #[test]
    fn references_free_blocks_hashes_events_stay_consistent(
        operations in prop::collection::vec(operation(), 1..120)
    ) {
        let mut fixture = Fixture::new(23);
        let mut live: Vec<Prompt> = Vec::new();
        // The number of copies by hash, according to the events.
        let mut copies: HashMap<u32, i32> = HashMap::new();
        for operation in operations {
            match operation {
                Operation::Start { text, length } => {
                    let before = fixture.cache.free.order();
                    match fixture.hold(text, length) {
                        Some((prompt, hits)) => {
                            prop_assert!(hits * SIZE < length);
                            live.push(prompt);
                        }
                        None => {
                            let after = fixture.cache.free.order();
                            prop_assert_eq!(before, after, "a refusal changes nothing");
                        }
                    }
                }
                Operation::Grow { which, more } if !live.is_empty() => {
                    let at = which.index(live.len());
                    let length = live[at].length + more;
                    if !fixture.grow(&mut live[at], length) {
                        fixture.cache.release(&mut live.swap_remove(at).table);
                    }
                }
                Operation::Finish { which } if !live.is_empty() => {
                    let at = which.index(live.len());
                    fixture.cache.release(&mut live.swap_remove(at).table);
                }
                Operation::Reset => {
                    let emptied = fixture.cache.reset();
                    prop_assert_eq!(emptied, live.is_empty());
                    fixture.events.extend(emptied.then_some(0));
                }
                _ => {}
            }

            for event in fixture.events.drain(..) {
                match event {
                    0 => copies.clear(),
                    1.. => *copies.entry(event as u32).or_default() += 1,
                    _ => {
                        let count = copies.get_mut(&(-event as u32));
                        *count.expect("only stored blocks are evicted") -= 1;
                    }
                }
            }
            copies.retain(|_, count| *count != 0);
            prop_assert!(copies.values().all(|count| *count > 0));
            let cache = &fixture.cache;
            let mut known: HashMap<u32, i32> = HashMap::new();
            for (&hash, &oldest) in &cache.oldest {
                let mut at = oldest;
                while at != 0 {
                    prop_assert_eq!(cache.blocks[at as usize].hash, Some(hash));
                    *known.entry(hash).or_default() += 1;
                    at = cache.blocks[at as usize].next_copy;
                }
            }
            prop_assert_eq!(&copies, &known, "the events describe the cache");

            let mut references = vec![0u32; cache.blocks.len()];
            for &block in live.iter().flat_map(|prompt| &prompt.table.blocks) {
                references[block as usize] += 1;
            }
            let counted: Vec<u32> = cache.blocks.iter().map(|block| block.references).collect();
            prop_assert_eq!(&references, &counted);
            let mut free = cache.free.order();
            prop_assert_eq!(cache.free(), free.len() + 24 - cache.blocks.len());
            free.sort_unstable();
            let unreferenced: Vec<u32> = (1..cache.blocks.len() as u32)
                .filter(|&block| references[block as usize] == 0)
                .collect();
            prop_assert_eq!(free, unreferenced, "a block is free exactly if no request holds it");
            for prompt in &live {
                prop_assert_eq!(prompt.table.len(), prompt.length.div_ceil(SIZE));
                prop_assert_eq!(prompt.table.stored(), prompt.length / SIZE);
                let stored = prompt.table.blocks.iter().take(prompt.table.stored());
                for (index, &block) in stored.enumerate() {
                    let expected = Some(hash(prompt.text, index));
                    prop_assert_eq!(cache.blocks[block as usize].hash, expected);
                }
            }
        }
    }
}
