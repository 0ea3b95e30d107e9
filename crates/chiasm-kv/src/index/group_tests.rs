//! Several KV-cache groups and tiers against a model that goes through the whole history for each
//! answer.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use chiasm_types::TokenId;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

use super::leaving_tests::Chores;
use super::*;
use crate::event::{BlockRemoved, BlockStored, ExternalHash};
use crate::{PromptBlocks, block_keys};

const BLOCK: BlockSize = BlockSize::new(2).unwrap();
const WORKER: WorkerId = WorkerId(3);
const GPU: &str = "GPU";

/// A block with all tokens before it.
type Past = Vec<TokenId>;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Full,
    Unknown,
    Chunked,
    Mamba,
    /// A window of so many tokens.
    Window(u32),
}

impl Kind {
    fn on_the_wire(self) -> (Option<String>, Option<u32>) {
        match self {
            Self::Full => (Some("full_attention".into()), None),
            Self::Unknown => (None, None),
            Self::Chunked => (Some("chunked_local_attention".into()), None),
            Self::Mamba => (Some("mamba".into()), None),
            Self::Window(window) => (Some("sliding_window".into()), Some(window)),
        }
    }

    /// Blocks that must be there, of the first `length`.
    fn needs(self, length: usize) -> std::ops::Range<usize> {
        let last = match self {
            Self::Full | Self::Unknown | Self::Chunked => length,
            Self::Mamba => 1,
            // Blocks that have one of the tokens before the next one that it attends to.
            Self::Window(window) => {
                (1..window as usize).map(|back| back.div_ceil(BLOCK.get())).max().unwrap_or(1)
            }
        };
        length.saturating_sub(last)..length
    }

    fn all(self) -> bool {
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
        /// Says which of these blocks the group keeps; all when there is none.
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
    /// Another index goes on, from a snapshot of this one.
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

/// What happened, in the engine's words.
#[derive(Clone)]
enum Happened {
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

/// Goes through all that happened.
#[derive(Default)]
struct Model {
    groups: BTreeMap<u32, Kind>,
    /// Groups that any tier has named.
    seen: BTreeSet<u32>,
    copies: Vec<(&'static str, u32, u64, Option<Past>)>,
}

impl Model {
    fn of(history: &[Happened], kinds: &[Kind]) -> Self {
        let mut model = Self::default();
        for happened in history {
            match happened {
                Happened::Stored { medium, group, parent, blocks, by_name } => {
                    model.seen.insert(*group);
                    if *medium == GPU {
                        model.groups.insert(*group, kinds[*group as usize]);
                    }
                    let mut past = match parent {
                        _ if *by_name => None,
                        None => Some(Past::new()),
                        Some(parent) => model.past(*parent),
                    };
                    for (name, tokens) in blocks {
                        if let Some(past) = &mut past {
                            past.extend(tokens);
                            let same =
                                model.copies.iter_mut().filter(|(_, _, other, _)| other == name);
                            same.for_each(|(_, _, _, known)| *known = Some(past.clone()));
                        }
                        let known = past.clone().or_else(|| model.past(*name));
                        model.copies.push((medium, *group, *name, known));
                    }
                }
                Happened::Removed { medium, group, hashes } => {
                    for hash in hashes {
                        let copy =
                            |(m, g, name, _): &_| (*m, *g, *name) == (*medium, *group, *hash);
                        if let Some(at) = model.copies.iter().position(copy) {
                            model.copies.remove(at);
                        }
                    }
                }
                Happened::Emptied => model.copies.clear(),
                Happened::Replaced => model = Self::default(),
            }
        }
        model
    }

    fn past(&self, name: u64) -> Option<Past> {
        let mut copies = self.copies.iter().filter(|(_, _, other, _)| *other == name);
        copies.find_map(|(_, _, _, known)| known.clone())
    }

    fn holds(&self, tokens: &[TokenId], block: usize, of: impl Fn(&str, u32) -> bool) -> bool {
        let past = &tokens[..(block + 1) * BLOCK.get()];
        let mut copies = self.copies.iter().filter(|(medium, group, _, _)| of(medium, *group));
        copies.any(|(_, _, _, known)| known.as_deref() == Some(past))
    }

    fn overlap(&self, tokens: &[TokenId]) -> usize {
        let suits = |length: &usize| {
            self.groups.iter().all(|(group, kind)| {
                let mut needs = kind.needs(*length);
                needs.all(|block| self.holds(tokens, block, |m, g| (m, g) == (GPU, *group)))
            })
        };
        let longest = if self.groups.is_empty() { 0 } else { tokens.len() / BLOCK.get() };
        (0..=longest).rev().find(suits).unwrap_or(0)
    }

    fn with_lower_tiers(&self, tokens: &[TokenId]) -> usize {
        let overlap = self.overlap(tokens);
        if self.seen.len() > 1 || !self.groups.values().all(|kind| kind.all()) {
            return overlap;
        }
        let lower = |block: &usize| self.holds(tokens, *block, |medium, _| medium != GPU);
        overlap + (overlap..tokens.len() / BLOCK.get()).take_while(lower).count()
    }

    /// Blocks of a prompt that all groups hold that need them.
    fn leading<'a>(&self, tokens: &'a [TokenId]) -> BTreeSet<&'a [TokenId]> {
        let groups = || self.groups.iter().filter(|(_, kind)| kind.all());
        let held = |block: &usize| {
            groups().count() > 0
                && groups()
                    .all(|(group, _)| self.holds(tokens, *block, |m, g| (m, g) == (GPU, *group)))
        };
        (0..tokens.len() / BLOCK.get())
            .filter(held)
            .map(|block| &tokens[..(block + 1) * BLOCK.get()])
            .collect()
    }
}

fn external(name: u64) -> ExternalHash {
    ExternalHash::U64(name)
}

fn event(happened: &Happened, kinds: &[Kind], all_tokens: &[TokenId]) -> KvEvent {
    match happened {
        Happened::Stored { medium, group, parent, blocks, by_name } => {
            let (kind, window) = kinds[*group as usize].on_the_wire();
            KvEvent::BlockStored(BlockStored {
                block_hashes: blocks.iter().map(|(name, _)| external(*name)).collect(),
                parent_block_hash: parent.map(external),
                // Of blocks that the group skips too.
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
        Happened::Removed { medium, group, hashes } => KvEvent::BlockRemoved(BlockRemoved {
            block_hashes: hashes.iter().copied().map(external).collect(),
            medium: Some((*medium).into()),
            group_idx: Some(*group),
            ..Default::default()
        }),
        Happened::Emptied | Happened::Replaced => KvEvent::AllBlocksCleared,
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
    fn answers_are_those_of_the_history(
        kinds in kinds(),
        prompts in vec(vec((0..2u32).prop_map(TokenId), 2..16), 4),
        steps in vec(step(), 0..40),
        late in any::<bool>(),
    ) {
        let chores = Chores::default();
        // Beside one whose holders must not be mistaken for these.
        let beside = || {
            let index = if late { chores.of(PrefixIndex::new()) } else { PrefixIndex::new() };
            index.add_worker(WorkerId(9), BLOCK);
            index
        };
        let mut index = beside();
        index.add_worker(WORKER, BLOCK);
        let chains: Vec<_> = prompts
            .iter()
            .map(|tokens| block_keys(&PromptBlocks { tokens, ..Default::default() }, BLOCK))
            .collect();
        let mut names = HashMap::<Past, u64>::new();
        let mut name = |past: &[TokenId]| {
            let next = names.len() as u64;
            *names.entry(past.to_vec()).or_insert(next)
        };
        let (mut history, mut overlaps) = (Vec::new(), Overlaps::default());
        for step in steps {
            let group = |group: Index| group.index(kinds.len()) as u32;
            let mut all_tokens = Vec::new();
            let happened = match step {
                Step::Store { medium, group: of, prompt, from, to, mask } => {
                    let tokens = &prompts[prompt];
                    let to = to.min(tokens.len() / 2);
                    let from = from.min(to);
                    let mask = mask.unwrap_or_else(|| vec![true; 8]);
                    all_tokens.extend(&tokens[2 * from..2 * to]);
                    let blocks: Vec<_> = (from..to)
                        .filter(|block| mask[*block])
                        .map(|block| (name(&tokens[..2 * block + 2]), [tokens[2 * block], tokens[2 * block + 1]]))
                        .collect();
                    Happened::Stored {
                        medium,
                        group: group(of),
                        parent: (from > 0).then(|| name(&tokens[..2 * from])),
                        by_name: medium != GPU || blocks.len() < to - from,
                        blocks,
                    }
                }
                Step::Remove { medium, group: of, hashes } => Happened::Removed { medium, group: group(of), hashes },
                Step::Truncate { medium, group: of, prompt, to } => {
                    let tokens = &prompts[prompt];
                    let hashes = (to..tokens.len() / 2).rev().map(|block| name(&tokens[..2 * block + 2])).collect();
                    Happened::Removed { medium, group: group(of), hashes }
                }
                Step::Cleared | Step::Reset => Happened::Emptied,
                Step::Replace => Happened::Replaced,
                Step::HandOver => {
                    let next = beside();
                    next.restore(WORKER, &index.snapshot(WORKER).unwrap().bytes).unwrap();
                    index = next;
                    continue;
                }
            };
            let before = Model::of(&history, &kinds);
            history.push(happened.clone());
            let model = Model::of(&history, &kinds);
            let mut added = Vec::new();
            match (&happened, history.len() % 2) {
                (Happened::Replaced, _) => index.add_worker(WORKER, BLOCK),
                (Happened::Emptied, 0) => index.clear(WORKER),
                _ => {
                    let events = vec![event(&happened, &kinds, &all_tokens)];
                    added = index.apply(WORKER, &KvEventBatch { timestamp: 0.0, events, data_parallel_rank: None });
                }
            }
            if chores.waiting() > 2 {
                chores.do_one();
            }
            let told: BTreeSet<_> = added.into_iter().collect();
            for (tokens, keys) in prompts.iter().zip(&chains) {
                let expected = (model.overlap(tokens), model.with_lower_tiers(tokens));
                index.lookup(keys, &mut overlaps);
                let of = |list: &[(WorkerId, usize)]| list.iter().find(|(id, _)| *id == WORKER).map_or(0, |(_, n)| *n);
                prop_assert_eq!((of(overlaps.found()), of(overlaps.with_lower_tiers())), expected);
                prop_assert_eq!(index.overlaps(keys), [(WORKER, expected.0), (WorkerId(9), 0)]);
                let (now, then) = (model.leading(tokens), before.leading(tokens));
                for (block, key) in keys.iter().enumerate() {
                    let past = &tokens[..2 * block + 2];
                    if model.groups.values().any(|kind| kind.all()) {
                        prop_assert!(now.contains(past) || !told.contains(key));
                        prop_assert!(!now.contains(past) || then.contains(past) || told.contains(key));
                    }
                }
            }
        }
        index.clear(WORKER);
        chores.do_all();
        let totals = index.totals();
        prop_assert_eq!((totals.blocks, totals.entries, totals.nodes), (0, 0, 0));
        index.remove_worker(WORKER);
        prop_assert_eq!(index.overlaps(&chains[0]), [(WorkerId(9), 0)]);
    }
}
