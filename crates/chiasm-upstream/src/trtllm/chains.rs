//! The blocks that a server holds, under our own identities of the images in them.
//!
//! A server has its own names of images: hashes of their pixels, by a recipe that differs between
//! versions. The names are learned. If a chain of reported blocks equals a recent prompt, in all
//! text tokens and in the positions of its images, it has the images of that prompt. If it equals
//! several prompts with different images, its blocks wait until a later block decides, or until
//! all but one of the prompts contradict a learned name.
//!
//! A wrongly learned name only makes a prediction wrong: names are never sent to a server.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::mem::take;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chiasm_kv::event::{BlockStored, ExternalHash, ExtraKey, KvEvent};
use chiasm_types::TokenId;

use super::block::{StoredBlock, medium};
use super::names::Names;
use super::recent_prompts::{BlockMatch, Chain, ItemOffset, Prompt, RecentPrompts};

/// The maximum number of blocks with a known chain, which is larger than the KV cache of a server.
/// The server reports removed blocks. Beyond the limit only text blocks are translated, and their
/// chains are unknown.
const MAX_KNOWN_BLOCKS: usize = 1 << 18;
/// The maximum number of waiting blocks. An image of 1,000 tokens takes 32.
const MAX_WAITING_BLOCKS: usize = 2048;
/// The time after which a waiting block is dropped.
const MAX_WAIT: Duration = Duration::from_secs(600);
/// The maximum number of comparisons between blocks and prompts for the events of one answer.
/// Blocks beyond that wait until the next event that may decide.
const MAX_COMPARISONS: usize = 1 << 16;
/// The maximum number of passes over the waiting blocks: names learned from some blocks may
/// identify others.
const MAX_PASSES: usize = 4;

/// The blocks of a server, as chains from the starts of prompts.
pub(super) struct Chains {
    recent: Arc<RecentPrompts>,
    /// The prompts whose blocks the server may report now.
    prompts: Vec<Arc<Prompt>>,
    /// The chains that end with a block, by the short hash of the block.
    known: HashMap<u64, Chain>,
    /// The blocks with an unknown chain, by arrival number.
    waiting: BTreeMap<u64, WaitingBlock>,
    /// The arrival numbers of the waiting blocks, by short hash.
    numbers: HashMap<u64, u64>,
    next: u64,
    /// `true` if a new block may identify waiting blocks.
    has_news: bool,
    names: Names,
    has_unlearned_names: bool,
}

struct WaitingBlock {
    block: StoredBlock,
    parent: Option<ExternalHash>,
    /// The short hash of the block.
    short: u64,
    /// The short hash of the parent.
    short_parent: Option<u64>,
    since: Instant,
}

/// A matched block, and the chain that ends with it.
type ChainedMatch = (BlockMatch, Chain);

impl Chains {
    pub(super) fn new(recent: Arc<RecentPrompts>) -> Self {
        Self {
            recent,
            prompts: Vec::new(),
            known: HashMap::new(),
            waiting: BTreeMap::new(),
            numbers: HashMap::new(),
            next: 0,
            has_news: false,
            names: Names::default(),
            has_unlearned_names: false,
        }
    }

    /// Updates the list of prompts. Called before the events of an answer are processed.
    pub(super) fn begin(&mut self, now: Instant) {
        self.prompts = self.recent.current(now);
    }

    /// Drops all blocks, but not the names of images.
    pub(super) fn forget(&mut self) {
        self.known.clear();
        self.waiting.clear();
        self.numbers.clear();
    }

    /// Processes a stored block. Appends it to `translated` if it is text and its parent does not
    /// wait.
    pub(super) fn stored(
        &mut self,
        parent: Option<&ExternalHash>,
        block: StoredBlock,
        now: Instant,
        translated: &mut Vec<KvEvent>,
    ) {
        let short = self.recent.short_hash(&block.hash);
        let short_parent = parent.map(|parent| self.recent.short_hash(parent));
        let before = match short_parent {
            None => Some(Chain::START),
            Some(parent) => self.known.get(&parent).copied(),
        };
        let parent_waits = short_parent.is_some_and(|parent| self.numbers.contains_key(&parent));
        if !parent_waits && let Some(text) = self.as_text(before, &block) {
            if block.tokens.len() == self.recent.block_size().get() {
                if let Some(before) = before {
                    self.insert_known(short, self.recent.extend(before, &text, &[]));
                }
                push_stored(translated, parent, &block, &text, &[]);
            }
        } else if (before.is_some() || parent_waits)
            && !self.known.contains_key(&short)
            && !self.numbers.contains_key(&short)
        {
            self.insert_waiting(WaitingBlock {
                block,
                parent: parent.cloned(),
                short,
                short_parent,
                since: now,
            });
        }
    }

    /// Returns the tokens of a block that is text. Returns `None` if the block may be part of an
    /// image that the server does not report.
    fn as_text(&self, before: Option<Chain>, block: &StoredBlock) -> Option<Vec<TokenId>> {
        let text = block.text()?;
        let has_item = |before: Chain| {
            let mut prompts =
                self.prompts.iter().filter(|prompt| prompt.begins_with(before, &self.recent));
            prompts.any(|prompt| prompt.has_item_in(before.blocks, self.recent.block_size()))
        };
        (!before.is_some_and(has_item)).then_some(text)
    }

    fn insert_known(&mut self, short: u64, chain: Chain) {
        if self.known.len() < MAX_KNOWN_BLOCKS || self.known.contains_key(&short) {
            self.known.insert(short, chain);
        }
    }

    fn insert_waiting(&mut self, waiting: WaitingBlock) {
        if self.waiting.len() >= MAX_WAITING_BLOCKS
            && let Some((_, oldest)) = self.waiting.pop_first()
        {
            self.numbers.remove(&oldest.short);
        }
        self.numbers.insert(waiting.short, self.next);
        self.waiting.insert(self.next, waiting);
        self.next += 1;
        self.has_news = true;
    }

    /// Processes a removed block. Returns `true` if it was waiting, and so was never translated.
    pub(super) fn removed(&mut self, hash: &ExternalHash) -> bool {
        let short = self.recent.short_hash(hash);
        self.known.remove(&short);
        let number = self.numbers.remove(&short);
        number.is_some_and(|number| self.waiting.remove(&number).is_some())
    }

    /// Processes a block's move to another level. Returns `true` if the block is waiting.
    pub(super) fn moved(&mut self, hash: &ExternalHash, level: usize) -> bool {
        let number = self.numbers.get(&self.recent.short_hash(hash));
        let waiting = number.and_then(|number| self.waiting.get_mut(number));
        waiting.map(|waiting| waiting.block.level = level).is_some()
    }

    /// Returns `true` if blocks were dropped after waiting, and no name of an image was known.
    pub(super) fn has_unlearned_names(&self) -> bool {
        self.has_unlearned_names
    }

    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Translates the waiting blocks that have been identified.
    pub(super) fn resolve(&mut self, now: Instant, translated: &mut Vec<KvEvent>) {
        while let Some(first) = self.waiting.first_entry()
            && now.saturating_duration_since(first.get().since) > MAX_WAIT
        {
            self.numbers.remove(&first.remove().short);
            self.has_unlearned_names |= self.names.is_empty();
        }
        if !take(&mut self.has_news) {
            return;
        }
        let mut comparisons_left = MAX_COMPARISONS;
        for _ in 0..MAX_PASSES {
            let inner: HashSet<u64> =
                self.waiting.values().filter_map(|waiting| waiting.short_parent).collect();
            // The latest blocks decide most, so they come first.
            let ends =
                self.waiting.iter().rev().filter(|(_, waiting)| !inner.contains(&waiting.short));
            let ends: Vec<u64> = ends.map(|(number, _)| *number).collect();
            let mut has_resolved = false;
            for end in ends {
                has_resolved |= self.resolve_path(end, now, &mut comparisons_left, translated);
            }
            if !has_resolved {
                return;
            }
        }
    }

    /// Translates a waiting block and the waiting blocks before it. Returns `true` if any block was
    /// translated or dropped.
    fn resolve_path(
        &mut self,
        end: u64,
        now: Instant,
        comparisons_left: &mut usize,
        translated: &mut Vec<KvEvent>,
    ) -> bool {
        let Some((before, path)) = self.path_to(end) else { return false };
        let agreed = match self.agreed_prefix(before, &path, now, comparisons_left) {
            Some(agreed) => agreed,
            // After translated blocks there may be text whose prompt is no longer known.
            None => self.leading_text(before, &path),
        };
        for ((matched, chain), number) in agreed.iter().zip(&path) {
            let Some(waiting) = self.waiting.remove(number) else { break };
            self.numbers.remove(&waiting.short);
            for (name, item) in &matched.names {
                self.names.learn(name, *item, now);
            }
            if waiting.block.tokens.len() == self.recent.block_size().get() {
                self.insert_known(waiting.short, *chain);
                push_stored(
                    translated,
                    waiting.parent.as_ref(),
                    &waiting.block,
                    &matched.tokens,
                    &matched.items,
                );
            }
        }
        !agreed.is_empty()
    }

    /// Returns the path of waiting blocks that ends with `end`, and the chain before the path.
    fn path_to(&self, end: u64) -> Option<(Chain, Vec<u64>)> {
        let mut number = end;
        let mut path = vec![end];
        let before = loop {
            let Some(parent) = self.waiting.get(&number)?.short_parent else { break Chain::START };
            if let Some(chain) = self.known.get(&parent) {
                break *chain;
            }
            // A correct server reports a parent first, so the parent has a smaller number.
            number = self.numbers.get(&parent).copied().filter(|parent| *parent < number)?;
            path.push(number);
        };
        path.reverse();
        Some((before, path))
    }

    /// Matches the leading blocks of a path, as far as all possible prompts agree about them.
    /// Returns `None` if no prompt matches the whole path.
    fn agreed_prefix(
        &mut self,
        before: Chain,
        path: &[u64],
        now: Instant,
        comparisons_left: &mut usize,
    ) -> Option<Vec<ChainedMatch>> {
        let candidates = self.candidates(before, path, comparisons_left)?;
        let contradicts = |matches: &Vec<ChainedMatch>| {
            let mut names = matches.iter().flat_map(|(matched, _)| &matched.names);
            names.any(|(name, item)| self.names.contradicts(name, item, now))
        };
        let (odd, fit): (Vec<_>, Vec<_>) = candidates.into_iter().partition(contradicts);
        let Some((first, others)) = fit.split_first() else {
            // Either a learned name is wrong or the blocks belong to another client's prompt. The
            // next blocks will decide.
            if let [odd] = &odd[..] {
                odd.iter()
                    .flat_map(|(matched, _)| &matched.names)
                    .for_each(|(name, item)| self.names.forget(name, item));
            }
            return None;
        };
        let agree = |at: &usize| others.iter().all(|other| other[*at].1 == first[*at].1);
        let agreed = (0..path.len()).take_while(agree).count();
        Some(first[..agreed].to_vec())
    }

    /// Matches the whole path with each prompt that it may belong to. Returns `None` once
    /// `comparisons_left` is used up.
    fn candidates(
        &self,
        before: Chain,
        path: &[u64],
        comparisons_left: &mut usize,
    ) -> Option<Vec<Vec<ChainedMatch>>> {
        let size = self.recent.block_size();
        let prompts = self.prompts.iter().filter(|prompt| prompt.begins_with(before, &self.recent));
        let mut candidates: Vec<(&Prompt, Vec<ChainedMatch>)> =
            prompts.map(|prompt| (&**prompt, Vec::new())).collect();
        for waiting in path.iter().filter_map(|number| self.waiting.get(number)) {
            *comparisons_left = comparisons_left.checked_sub(candidates.len())?;
            candidates.retain_mut(|(prompt, matches)| {
                let last = matches.last().map_or(before, |(_, chain)| *chain);
                let Some(matched) = prompt.match_block(last.blocks, &waiting.block, size) else {
                    return false;
                };
                let chain = self.recent.extend(last, &matched.tokens, &matched.items);
                matches.push((matched, chain));
                true
            });
        }
        Some(candidates.into_iter().map(|(_, matches)| matches).collect())
    }

    /// Returns the leading blocks of a path, as far as they are text.
    fn leading_text(&self, before: Chain, path: &[u64]) -> Vec<ChainedMatch> {
        let next_text = |before: &mut Chain, number: &u64| {
            let tokens = self.as_text(Some(*before), &self.waiting.get(number)?.block)?;
            *before = self.recent.extend(*before, &tokens, &[]);
            Some((BlockMatch { tokens, items: Vec::new(), names: Vec::new() }, *before))
        };
        path.iter().scan(before, next_text).collect()
    }
}

/// Appends a stored block, to the last event if the block continues it.
fn push_stored(
    translated: &mut Vec<KvEvent>,
    parent: Option<&ExternalHash>,
    block: &StoredBlock,
    tokens: &[TokenId],
    items: &[ItemOffset],
) {
    let medium = medium(block.level);
    let continues_last = match translated.last() {
        Some(KvEvent::BlockStored(last)) => {
            parent.is_some()
                && last.block_hashes.last() == parent
                && last.medium == medium
                && !last.token_ids.is_empty()
        }
        _ => false,
    };
    if !continues_last {
        let block_size = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let parent_block_hash = parent.cloned();
        translated.push(KvEvent::BlockStored(BlockStored {
            parent_block_hash,
            block_size,
            medium,
            ..BlockStored::default()
        }));
    }
    let Some(KvEvent::BlockStored(stored)) = translated.last_mut() else { return };
    if !items.is_empty() || stored.extra_keys.is_some() {
        let media = |(item, offset): &ItemOffset| ExtraKey::Media {
            identifier: item.to_string(),
            offset: *offset,
        };
        let earlier = stored.block_hashes.len();
        let keys = stored.extra_keys.get_or_insert_with(|| vec![None; earlier]);
        keys.push((!items.is_empty()).then(|| items.iter().map(media).collect()));
    }
    stored.block_hashes.push(block.hash.clone());
    stored.token_ids.extend_from_slice(tokens);
}
