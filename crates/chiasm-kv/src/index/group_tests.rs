//! Several KV-cache groups and tiers, against a model that replays the whole history for each
//! lookup.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use chiasm_types::TokenId;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

use super::release_tests::Chores;
use super::*;
use crate::event::{BlockRemoved, BlockStored, ExternalHash};
use crate::{PromptBlocks, block_keys};

const BLOCK: BlockSize = BlockSize::new(2).unwrap();
const WORKER: WorkerId = WorkerId(3);
const GPU: &str = "GPU";

/// The tokens of a block and of all blocks before it.
type Prefix = Vec<TokenId>;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Full,
    Unknown,
    Chunked,
    Mamba,
    /// A sliding window of the given number of tokens.
    Window(u32),
}

impl Kind {
    /// Returns the kind and the window as events contain them.
    fn to_wire(self) -> (Option<String>, Option<u32>) {
        match self {
            Self::Full => (Some("full_attention".into()), None),
            Self::Unknown => (None, None),
            Self::Chunked => (Some("chunked_local_attention".into()), None),
            Self::Mamba => (Some("mamba".into()), None),
            Self::Window(window) => (Some("sliding_window".into()), Some(window)),
        }
    }

    /// Returns the blocks that the group must hold of the first `length` blocks.
    fn needed(self, length: usize) -> std::ops::Range<usize> {
        let last = match self {
            Self::Full | Self::Unknown | Self::Chunked => length,
            Self::Mamba => 1,
            // The blocks of all tokens to which the next token attends.
            Self::Window(window) => {
                (1..window as usize).map(|back| back.div_ceil(BLOCK.get())).max().unwrap_or(1)
            }
        };
        length.saturating_sub(last)..length
    }

    /// Returns `true` if the group needs all leading blocks.
    fn needs_all(self) -> bool {
        matches!(self, Self::Full | Self::Unknown | Self::Chunked)
    }
}

#[derive(Clone, Debug)]
enum Step {
    Store {
        medium: &'static str,
        group: Index,
        prompt: usize,
        from: usize,
        to: usize,
        /// The blocks that the group keeps; all if there is no mask.
        mask: Option<Vec<bool>>,
    },
    Remove {
        medium: &'static str,
        group: Index,
        hashes: Vec<u64>,
    },
    Truncate {
        medium: &'static str,
        group: Index,
        prompt: usize,
        to: usize,
    },
    Cleared,
    Reset,
    Replace,
    /// Continues in another index, from a snapshot of this one.
    HandOver,
}

fn step() -> impl Strategy<Value = Step> {
    let medium = || prop_oneof![6 => Just(GPU), 1 => Just("CPU"), 1 => Just("STORAGE")];
    let group = || any::<Index>();
    let store = (
        medium(),
        group(),
        0..4usize,
        0..3usize,
        0..8usize,
        proptest::option::weighted(0.2, vec(any::<bool>(), 8)),
    );
    prop_oneof![
        16 => store.prop_map(|(medium, group, prompt, from, to, mask)| Step::Store {
            medium,
            group,
            prompt,
            from: from * 2,
            to,
            mask,
        }),
        6 => (medium(), group(), vec(0..20u64, 1..3))
            .prop_map(|(medium, group, hashes)| Step::Remove { medium, group, hashes }),
        3 => (medium(), group(), 0..4usize, 0..8usize)
            .prop_map(|(medium, group, prompt, to)| Step::Truncate { medium, group, prompt, to }),
        1 => prop_oneof![Just(Step::Cleared), Just(Step::Reset), Just(Step::Replace)],
        2 => Just(Step::HandOver),
    ]
}

/// A past step in terms of the engine's hashes.
#[derive(Clone)]
enum Record {
    Stored {
        medium: &'static str,
        group: u32,
        parent: Option<u64>,
        blocks: Vec<(u64, [TokenId; 2])>,
        by_name: bool,
    },
    Removed {
        medium: &'static str,
        group: u32,
        hashes: Vec<u64>,
    },
    Emptied,
    Replaced,
}

/// A copy of a block.
struct BlockCopy {
    medium: &'static str,
    group: u32,
    name: u64,
    /// The block's content, if events have revealed it.
    prefix: Option<Prefix>,
}

/// A reference model that replays the history.
#[derive(Default)]
struct Model {
    groups: BTreeMap<u32, Kind>,
    /// The groups that events of any tier have named.
    seen: BTreeSet<u32>,
    copies: Vec<BlockCopy>,
}

impl Model {
    fn replay(history: &[Record], kinds: &[Kind]) -> Self {
        let mut model = Self::default();
        for record in history {
            match record {
                Record::Stored { medium, group, parent, blocks, by_name } => {
                    model.seen.insert(*group);
                    if *medium == GPU {
                        model.groups.insert(*group, kinds[*group as usize]);
                    }
                    let mut prefix = match parent {
                        _ if *by_name => None,
                        None => Some(Prefix::new()),
                        Some(parent) => model.prefix(*parent),
                    };
                    for (name, tokens) in blocks {
                        if let Some(prefix) = &mut prefix {
                            prefix.extend(tokens);
                            let same = model.copies.iter_mut().filter(|copy| copy.name == *name);
                            same.for_each(|copy| copy.prefix = Some(prefix.clone()));
                        }
                        let prefix = prefix.clone().or_else(|| model.prefix(*name));
                        model.copies.push(BlockCopy { medium, group: *group, name: *name, prefix });
                    }
                }
                Record::Removed { medium, group, hashes } => {
                    for hash in hashes {
                        let is_removed = |copy: &BlockCopy| {
                            (copy.medium, copy.group, copy.name) == (*medium, *group, *hash)
                        };
                        if let Some(at) = model.copies.iter().position(is_removed) {
                            model.copies.remove(at);
                        }
                    }
                }
                Record::Emptied => model.copies.clear(),
                Record::Replaced => model = Self::default(),
            }
        }
        model
    }

    fn prefix(&self, name: u64) -> Option<Prefix> {
        let mut copies = self.copies.iter().filter(|copy| copy.name == name);
        copies.find_map(|copy| copy.prefix.clone())
    }

    /// Returns `true` if a cache with a medium and group that `matches` holds a block of a prompt.
    fn holds(&self, tokens: &[TokenId], block: usize, matches: impl Fn(&str, u32) -> bool) -> bool {
        let prefix = &tokens[..(block + 1) * BLOCK.get()];
        let mut copies = self.copies.iter().filter(|copy| matches(copy.medium, copy.group));
        copies.any(|copy| copy.prefix.as_deref() == Some(prefix))
    }

    fn overlap(&self, tokens: &[TokenId]) -> usize {
        let satisfies_all = |length: &usize| {
            self.groups.iter().all(|(group, kind)| {
                let mut needed = kind.needed(*length);
                needed.all(|block| self.holds(tokens, block, |m, g| (m, g) == (GPU, *group)))
            })
        };
        let longest = if self.groups.is_empty() { 0 } else { tokens.len() / BLOCK.get() };
        (0..=longest).rev().find(satisfies_all).unwrap_or(0)
    }

    fn with_lower_tiers(&self, tokens: &[TokenId]) -> usize {
        let overlap = self.overlap(tokens);
        if self.seen.len() > 1 || !self.groups.values().all(|kind| kind.needs_all()) {
            return overlap;
        }
        let lower = |block: &usize| self.holds(tokens, *block, |medium, _| medium != GPU);
        overlap + (overlap..tokens.len() / BLOCK.get()).take_while(lower).count()
    }

    /// Returns the blocks of a prompt that are held by all groups that need all leading blocks.
    fn leading<'a>(&self, tokens: &'a [TokenId]) -> BTreeSet<&'a [TokenId]> {
        let groups = || self.groups.iter().filter(|(_, kind)| kind.needs_all());
        let is_held = |block: &usize| {
            groups().count() > 0
                && groups()
                    .all(|(group, _)| self.holds(tokens, *block, |m, g| (m, g) == (GPU, *group)))
        };
        (0..tokens.len() / BLOCK.get())
            .filter(is_held)
            .map(|block| &tokens[..(block + 1) * BLOCK.get()])
            .collect()
    }
}

fn external(name: u64) -> ExternalHash {
    ExternalHash::U64(name)
}

fn event(record: &Record, kinds: &[Kind], all_tokens: &[TokenId]) -> KvEvent {
    match record {
        Record::Stored { medium, group, parent, blocks, by_name } => {
            let (kind, window) = kinds[*group as usize].to_wire();
            KvEvent::BlockStored(BlockStored {
                block_hashes: blocks.iter().map(|(name, _)| external(*name)).collect(),
                parent_block_hash: parent.map(external),
                // Includes the tokens of blocks that the group skips.
                token_ids: if *by_name {
                    all_tokens.to_vec()
                } else {
                    blocks.iter().flat_map(|(_, tokens)| *tokens).collect()
                },
                block_size: if *medium == GPU { 2 } else { 0 },
                medium: Some((*medium).into()),
                group_idx: Some(*group),
                kv_cache_spec_kind: kind,
                kv_cache_spec_sliding_window: window,
                ..Default::default()
            })
        }
        Record::Removed { medium, group, hashes } => KvEvent::BlockRemoved(BlockRemoved {
            block_hashes: hashes.iter().copied().map(external).collect(),
            medium: Some((*medium).into()),
            group_idx: Some(*group),
            ..Default::default()
        }),
        Record::Emptied | Record::Replaced => KvEvent::AllBlocksCleared,
    }
}

fn kinds() -> impl Strategy<Value = Vec<Kind>> {
    let kind = prop_oneof![
        4 => Just(Kind::Full),
        1 => Just(Kind::Unknown),
        1 => Just(Kind::Chunked),
        1 => Just(Kind::Mamba),
        4 => (1..8u32).prop_map(Kind::Window),
    ];
    vec(kind, 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn lookups_equal_replayed_history(
        kinds in kinds(),
        prompts in vec(vec((0..2u32).prop_map(TokenId), 2..16), 4),
        steps in vec(step(), 0..40),
        delay_chores in any::<bool>(),
    ) {
        let chores = Chores::default();
        // The other worker has holders that must not be confused with those of WORKER.
        let index_with_other_worker = || {
            let index =
                if delay_chores { chores.attach(PrefixIndex::new()) } else { PrefixIndex::new() };
            index.add_worker(WorkerId(9), BLOCK);
            index
        };
        let mut index = index_with_other_worker();
        index.add_worker(WORKER, BLOCK);
        let chains: Vec<_> = prompts
            .iter()
            .map(|tokens| block_keys(&PromptBlocks { tokens, ..Default::default() }, BLOCK))
            .collect();
        let mut names = HashMap::<Prefix, u64>::new();
        let mut name = |prefix: &[TokenId]| {
            let next = names.len() as u64;
            *names.entry(prefix.to_vec()).or_insert(next)
        };
        let mut history = Vec::new();
        let mut overlaps = Overlaps::default();
        for step in steps {
            let group = |group: Index| group.index(kinds.len()) as u32;
            let mut all_tokens = Vec::new();
            let record = match step {
                Step::Store { medium, group: choice, prompt, from, to, mask } => {
                    let tokens = &prompts[prompt];
                    let to = to.min(tokens.len() / 2);
                    let from = from.min(to);
                    let mask = mask.unwrap_or_else(|| vec![true; 8]);
                    all_tokens.extend(&tokens[2 * from..2 * to]);
                    let blocks: Vec<_> = (from..to)
                        .filter(|block| mask[*block])
                        .map(|block| {
                            let own = [tokens[2 * block], tokens[2 * block + 1]];
                            (name(&tokens[..2 * block + 2]), own)
                        })
                        .collect();
                    Record::Stored {
                        medium,
                        group: group(choice),
                        parent: (from > 0).then(|| name(&tokens[..2 * from])),
                        by_name: medium != GPU || blocks.len() < to - from,
                        blocks,
                    }
                }
                Step::Remove { medium, group: choice, hashes } => {
                    Record::Removed { medium, group: group(choice), hashes }
                }
                Step::Truncate { medium, group: choice, prompt, to } => {
                    let tokens = &prompts[prompt];
                    let hashes = (to..tokens.len() / 2)
                        .rev()
                        .map(|block| name(&tokens[..2 * block + 2]))
                        .collect();
                    Record::Removed { medium, group: group(choice), hashes }
                }
                Step::Cleared | Step::Reset => Record::Emptied,
                Step::Replace => Record::Replaced,
                Step::HandOver => {
                    let next = index_with_other_worker();
                    next.restore(WORKER, &index.snapshot(WORKER).unwrap().bytes).unwrap();
                    index = next;
                    continue;
                }
            };
            let model_before = Model::replay(&history, &kinds);
            history.push(record.clone());
            let model = Model::replay(&history, &kinds);
            let mut added = Vec::new();
            match (&record, history.len() % 2) {
                (Record::Replaced, _) => index.add_worker(WORKER, BLOCK),
                (Record::Emptied, 0) => index.clear(WORKER),
                _ => {
                    let events = vec![event(&record, &kinds, &all_tokens)];
                    let batch = KvEventBatch { timestamp: 0.0, events, data_parallel_rank: None };
                    added = index.apply(WORKER, &batch);
                }
            }
            if chores.waiting() > 2 {
                chores.run_one();
            }
            let added: BTreeSet<_> = added.into_iter().collect();
            for (tokens, keys) in prompts.iter().zip(&chains) {
                let expected = (model.overlap(tokens), model.with_lower_tiers(tokens));
                index.lookup(keys, &mut overlaps);
                let overlap = |list: &[(WorkerId, usize)]| {
                    list.iter().find(|(id, _)| *id == WORKER).map_or(0, |(_, overlap)| *overlap)
                };
                let found = (overlap(overlaps.found()), overlap(overlaps.with_lower_tiers()));
                prop_assert_eq!(found, expected);
                prop_assert_eq!(index.overlaps(keys), [(WORKER, expected.0), (WorkerId(9), 0)]);
                let now = model.leading(tokens);
                let before = model_before.leading(tokens);
                for (block, key) in keys.iter().enumerate() {
                    let prefix = &tokens[..2 * block + 2];
                    if model.groups.values().any(|kind| kind.needs_all()) {
                        let is_new = now.contains(prefix) && !before.contains(prefix);
                        prop_assert!(now.contains(prefix) || !added.contains(key));
                        prop_assert!(!is_new || added.contains(key));
                    }
                }
            }
        }
        index.clear(WORKER);
        chores.run_all();
        let totals = index.totals();
        prop_assert_eq!((totals.blocks, totals.entries, totals.nodes), (0, 0, 0));
        index.remove_worker(WORKER);
        prop_assert_eq!(index.overlaps(&chains[0]), [(WorkerId(9), 0)]);
    }
}
