//! The prefix index against a model that keeps every copy of every block with its whole content.

use std::collections::{HashMap, HashSet};

use chiasm_kv::event::{
    self, BlockRemoved, BlockStored, ExternalHash, ExtraKey, KvEvent, KvEventBatch,
};
use chiasm_kv::{MediaSpan, PrefixIndex, PromptBlocks, block_keys};
use chiasm_types::{BlockSize, MmHash, TokenId, WorkerId};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

const BLOCK: BlockSize = BlockSize::new(2).unwrap();
const WORKERS: u32 = 2;

/// The contents of a block and of all blocks before it, which are the block's true identity.
type Prefix = Vec<Content>;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Content {
    tokens: Vec<TokenId>,
    /// The items with a token in the block, and their starts relative to it.
    media: Vec<(u8, i64)>,
    lora: Option<String>,
    salt: Option<String>,
}

#[derive(Clone, Debug)]
struct Prompt {
    tokens: Vec<TokenId>,
    /// The items, each with its offset and length.
    media: Vec<(u8, usize, usize)>,
    lora: Option<String>,
    salt: Option<String>,
}

impl Prompt {
    /// Returns the contents of all blocks. Works token by token, unlike the code under test.
    fn prefix(&self) -> Prefix {
        let size = BLOCK.get();
        (0..self.tokens.len() / size)
            .map(|block| {
                let positions = block * size..(block + 1) * size;
                Content {
                    tokens: self.tokens[positions.clone()].to_vec(),
                    media: self
                        .media
                        .iter()
                        .filter(|(_, offset, length)| {
                            positions.clone().any(|at| (*offset..offset + length).contains(&at))
                        })
                        .map(|(item, offset, _)| (*item, *offset as i64 - positions.start as i64))
                        .collect(),
                    lora: self.lora.clone(),
                    salt: self.salt.clone().filter(|salt| block == 0 && !salt.is_empty()),
                }
            })
            .collect()
    }

    fn keys(&self) -> Vec<chiasm_kv::BlockKey> {
        let media: Vec<_> = self
            .media
            .iter()
            .map(|(item, offset, length)| MediaSpan {
                hash: hash(*item),
                offset: *offset,
                length: *length,
            })
            .collect();
        let prompt = PromptBlocks {
            tokens: &self.tokens,
            media: &media,
            lora: self.lora.as_deref(),
            salt: self.salt.as_deref(),
        };
        block_keys(&prompt, BLOCK)
    }
}

fn hash(item: u8) -> MmHash {
    MmHash::new([item; 32])
}

prop_compose! {
    /// Prompts of few distinct tokens and items, which share prefixes and have small differences.
    fn prompt()(
        tokens in vec((0..2u32).prop_map(TokenId), 0..12),
        media in vec((0..2u8, 0..4usize, 1..6usize), 0..3),
        lora in option::weighted(0.2, "[ab]"),
        salt in option::weighted(0.2, "[ab]{0,1}"),
    ) -> Prompt {
        let mut end = 0;
        let media = media
            .into_iter()
            .map(|(item, gap, length)| {
                let offset = end + gap;
                end = offset + length;
                (item, offset, length)
            })
            .collect();
        Prompt { tokens, media, lora, salt }
    }
}

/// The location of a block in an event.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Here,
    /// Another engine.
    Remote,
    OtherMedium,
}

#[derive(Clone, Debug)]
enum Step {
    /// Stores a range of a prompt's blocks, with or without a known parent.
    Store {
        worker: u32,
        prompt: usize,
        from: usize,
        to: usize,
        place: Place,
    },
    /// Removes hashes by number, known and unknown ones in any order.
    Remove {
        worker: u32,
        hashes: Vec<u64>,
        place: Place,
    },
    Cleared {
        worker: u32,
    },
    /// Clears the worker, as after a reset of the subscriber.
    Forget {
        worker: u32,
    },
    /// Replaces the worker by another engine.
    Replace {
        worker: u32,
    },
    /// Continues in another index, from snapshots of this one.
    HandOver,
}

fn place() -> impl Strategy<Value = Place> {
    prop_oneof![8 => Just(Place::Here), 1 => Just(Place::Remote), 1 => Just(Place::OtherMedium)]
}

fn step() -> impl Strategy<Value = Step> {
    let worker = || 0..WORKERS;
    prop_oneof![
        12 => (worker(), 0..6usize, 0..3usize, 0..7usize, place()).prop_map(
            |(worker, prompt, from, to, place)| Step::Store { worker, prompt, from, to, place },
        ),
        10 => (worker(), vec(0..30u64, 1..4), place())
            .prop_map(|(worker, hashes, place)| Step::Remove { worker, hashes, place }),
        1 => worker().prop_map(|worker| Step::Cleared { worker }),
        1 => worker().prop_map(|worker| Step::Forget { worker }),
        1 => worker().prop_map(|worker| Step::Replace { worker }),
        2 => Just(Step::HandOver),
    ]
}

/// The engine's hashes: consecutive numbers, some of them as bytes.
#[derive(Default)]
struct Names(HashMap<Prefix, u64>);

impl Names {
    fn get(&mut self, prefix: &[Content]) -> u64 {
        let next = self.0.len() as u64;
        *self.0.entry(prefix.to_vec()).or_insert(next)
    }
}

fn external(name: u64) -> ExternalHash {
    if name.is_multiple_of(3) {
        ExternalHash::Bytes(name.to_be_bytes().to_vec())
    } else {
        ExternalHash::U64(u64::MAX - name)
    }
}

#[derive(Clone, Default)]
struct Model {
    /// Every copy, with its content if the events so far have revealed it.
    copies: Vec<(u64, Option<Prefix>)>,
}

impl Model {
    fn prefix_of(&self, name: u64) -> Option<&Prefix> {
        self.copies.iter().filter(|(copy, _)| *copy == name).find_map(|(_, prefix)| prefix.as_ref())
    }

    fn store(&mut self, parent: Option<u64>, blocks: &[(u64, Content)]) {
        let mut prefix = match parent {
            None => Some(Prefix::new()),
            Some(parent) => self.prefix_of(parent).cloned(),
        };
        for (name, content) in blocks {
            if let Some(prefix) = &mut prefix {
                prefix.push(content.clone());
                // All copies of a hash have the same content.
                self.copies
                    .iter_mut()
                    .filter(|(copy, _)| copy == name)
                    .for_each(|(_, known)| *known = Some(prefix.clone()));
            }
            let known = prefix.clone().or_else(|| self.prefix_of(*name).cloned());
            self.copies.push((*name, known));
        }
    }

    fn remove(&mut self, name: u64) {
        if let Some(at) = self.copies.iter().position(|(copy, _)| *copy == name) {
            self.copies.remove(at);
        }
    }

    fn overlap(&self, prefix: &[Content]) -> usize {
        (1..=prefix.len())
            .take_while(|length| {
                self.copies.iter().any(|(_, known)| known.as_deref() == Some(&prefix[..*length]))
            })
            .count()
    }

    /// Returns the overlap of the blocks that the engine holds, keyed or not.
    fn held(&self, names: &mut Names, prefix: &[Content]) -> usize {
        (1..=prefix.len())
            .take_while(|length| {
                let name = names.get(&prefix[..*length]);
                self.copies.iter().any(|(copy, _)| *copy == name)
            })
            .count()
    }
}

fn stored_event(parent: Option<u64>, blocks: &[(u64, Content)], place: Place) -> KvEvent {
    let extra_keys = blocks.iter().map(|(_, content)| {
        let lora = content.lora.iter().cloned().map(ExtraKey::Text);
        let media = content.media.iter().map(|(item, offset)| ExtraKey::Media {
            identifier: hash(*item).to_string(),
            offset: *offset,
        });
        let salt = content.salt.iter().cloned().map(ExtraKey::Text);
        let marks: Vec<_> = lora.chain(media).chain(salt).collect();
        (!marks.is_empty()).then_some(marks)
    });
    KvEvent::BlockStored(BlockStored {
        block_hashes: blocks.iter().map(|(name, _)| external(*name)).collect(),
        parent_block_hash: parent.map(external),
        token_ids: blocks.iter().flat_map(|(_, content)| content.tokens.clone()).collect(),
        block_size: BLOCK.get() as u32,
        lora_name: blocks.first().and_then(|(_, content)| content.lora.clone()),
        extra_keys: Some(extra_keys.collect()),
        medium: Some(if place == Place::OtherMedium { "TAPE" } else { "GPU" }.into()),
        locality: (place == Place::Remote).then(|| "REMOTE".into()),
        ..Default::default()
    })
}

/// Returns a batch that went through encoding and decoding.
fn batch(event: KvEvent) -> KvEventBatch {
    let batch = KvEventBatch { timestamp: 1.0, events: vec![event], data_parallel_rank: Some(0) };
    event::decode(&batch.encode()).unwrap()
}

/// Runs the steps on the index and on the model, and compares both after each step.
fn check(prompts: &[Prompt], steps: Vec<Step>) -> Result<(), TestCaseError> {
    let prefixes: Vec<Prefix> = prompts.iter().map(Prompt::prefix).collect();
    let mut names = Names::default();
    let mut models = vec![Model::default(); WORKERS as usize];
    let mut index = PrefixIndex::new();
    (0..WORKERS).for_each(|worker| index.add_worker(WorkerId(worker), BLOCK));

    for step in steps {
        match step {
            Step::Store { worker, prompt, from, to, place } => {
                let prefix = &prefixes[prompt % prefixes.len()];
                let to = to.min(prefix.len());
                let from = from.min(to);
                let parent = (from > 0).then(|| names.get(&prefix[..from]));
                let blocks: Vec<_> = (from..to)
                    .map(|block| (names.get(&prefix[..=block]), prefix[block].clone()))
                    .collect();
                index.apply(WorkerId(worker), &batch(stored_event(parent, &blocks, place)));
                if place == Place::Here {
                    models[worker as usize].store(parent, &blocks);
                }
            }
            Step::Remove { worker, hashes, place } => {
                let removed = BlockRemoved {
                    block_hashes: hashes.iter().copied().map(external).collect(),
                    medium: Some(if place == Place::OtherMedium { "TAPE" } else { "GPU" }.into()),
                    locality: (place == Place::Remote).then(|| "REMOTE".into()),
                    ..Default::default()
                };
                index.apply(WorkerId(worker), &batch(KvEvent::BlockRemoved(removed)));
                if place == Place::Here {
                    hashes.iter().for_each(|name| models[worker as usize].remove(*name));
                }
            }
            Step::Cleared { worker } => {
                index.apply(WorkerId(worker), &batch(KvEvent::AllBlocksCleared));
                models[worker as usize].copies.clear();
            }
            Step::Forget { worker } => {
                index.clear(WorkerId(worker));
                models[worker as usize].copies.clear();
            }
            Step::Replace { worker } => {
                index.add_worker(WorkerId(worker), BLOCK);
                models[worker as usize].copies.clear();
            }
            Step::HandOver => {
                let next = PrefixIndex::new();
                for worker in (0..WORKERS).map(WorkerId) {
                    let restored = next.restore(worker, &index.snapshot(worker).unwrap().bytes);
                    prop_assert_eq!(restored, Ok(index.stats(worker).unwrap().revision));
                }
                index = next;
            }
        }
        for (prompt, prefix) in prompts.iter().zip(&prefixes) {
            let expected: Vec<_> = models
                .iter()
                .zip(0..)
                .map(|(model, id)| (WorkerId(id), model.overlap(prefix)))
                .collect();
            prop_assert_eq!(index.overlaps(&prompt.keys()), expected, "{:?}", prompt);
            for model in &models {
                prop_assert!(
                    model.overlap(prefix) <= model.held(&mut names, prefix),
                    "more than the engine holds"
                );
            }
        }
        for (model, id) in models.iter().zip(0..) {
            let stats = index.stats(WorkerId(id)).unwrap();
            let distinct = |keyed: bool| {
                let copies = model.copies.iter().filter(|(_, prefix)| prefix.is_some() == keyed);
                copies.map(|(name, _)| name).collect::<HashSet<_>>().len()
            };
            prop_assert_eq!(
                (stats.blocks, stats.unkeyed_blocks),
                (distinct(true), distinct(false))
            );
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn random_events_equal_model(
        prompts in vec(prompt(), 1..6),
        steps in vec(step(), 0..40),
    ) {
        check(&prompts, steps)?;
    }

    /// The prompts have the same layout and differ only in items, offsets, LoRA name or salt.
    #[test]
    fn similar_prompts_equal_model(
        base in prompt(),
        items in vec((0..3u8, 0..2usize), 4),
        lora in option::of("[ab]"),
        salt in option::of("[ab]"),
        steps in vec(step(), 0..20),
    ) {
        let mut prompts = vec![
            base.clone(),
            Prompt { lora, ..base.clone() },
            Prompt { salt, ..base.clone() },
        ];
        prompts.extend(items.into_iter().map(|(item, shift)| {
            let spans = base.media.iter();
            let media = spans.map(|(_, offset, length)| (item, offset + shift, *length)).collect();
            Prompt { media, ..base.clone() }
        }));
        check(&prompts, steps)?;
    }
}

#[test]
fn long_prompts_are_split_then_fully_removed() {
    const BLOCKS: usize = 1000;
    let tokens: Vec<TokenId> = (0..2 * BLOCKS as u32).map(TokenId).collect();
    let mut other = tokens.clone();
    other[2 * 700] = TokenId(7);
    let keys =
        |tokens: &[TokenId]| block_keys(&PromptBlocks { tokens, ..Default::default() }, BLOCK);
    // The hashes of the first prompt start at 0, those of the other one at `first_name`.
    let stored = |tokens: &[TokenId], first_name: u64, blocks: std::ops::Range<usize>| {
        batch(KvEvent::BlockStored(BlockStored {
            block_hashes: blocks
                .clone()
                .map(|block| ExternalHash::U64(first_name + block as u64))
                .collect(),
            parent_block_hash: blocks
                .start
                .checked_sub(1)
                .map(|parent| ExternalHash::U64(parent as u64)),
            token_ids: tokens[2 * blocks.start..2 * blocks.end].to_vec(),
            block_size: 2,
            ..Default::default()
        }))
    };
    let removed = |names: &mut dyn Iterator<Item = usize>| {
        let block_hashes = names.map(|name| ExternalHash::U64(name as u64)).collect();
        batch(KvEvent::BlockRemoved(BlockRemoved { block_hashes, ..Default::default() }))
    };
    let index = PrefixIndex::new();
    (0..3).for_each(|worker| index.add_worker(WorkerId(worker), BLOCK));
    index.apply(WorkerId(0), &stored(&tokens, 0, 0..BLOCKS));
    // Stored in parts, whose ends are not the ends of nodes.
    for start in (0..BLOCKS).step_by(50) {
        index.apply(WorkerId(1), &stored(&tokens, 0, start..start + 50));
    }
    index.apply(WorkerId(2), &stored(&tokens, 0, 0..256));
    index.apply(WorkerId(2), &stored(&tokens, 0, 256..257));
    let overlaps =
        |tokens: &[TokenId]| index.overlaps(&keys(tokens)).into_iter().map(|(_, blocks)| blocks);
    assert_eq!(Vec::from_iter(overlaps(&tokens)), [BLOCKS, BLOCKS, 257]);
    index.apply(WorkerId(1), &stored(&other, 5000, 700..BLOCKS));
    assert_eq!(Vec::from_iter(overlaps(&other)), [700, BLOCKS, 257]);
    index.apply(WorkerId(0), &removed(&mut (300..BLOCKS).rev()));
    index.apply(WorkerId(2), &removed(&mut [255, 256].into_iter()));
    assert_eq!(Vec::from_iter(overlaps(&tokens)), [300, BLOCKS, 255]);
    index.apply(WorkerId(1), &removed(&mut (600..650)));
    assert_eq!(Vec::from_iter(overlaps(&tokens)), [300, 600, 255]);
    index.apply(WorkerId(1), &removed(&mut (0..600).chain(650..BLOCKS).chain(5700..5000 + BLOCKS)));
    index.apply(WorkerId(0), &removed(&mut (0..300).rev()));
    index.apply(WorkerId(2), &removed(&mut (0..255)));
    let totals = index.totals();
    assert_eq!((totals.blocks, totals.entries, totals.nodes), (0, 0, 0));
    assert!((0..3).all(|worker| index.stats(WorkerId(worker)).unwrap().unknown_removals == 0));
}
