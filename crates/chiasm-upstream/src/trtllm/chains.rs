//! Which blocks a server holds, by our own identities of the images in them.
//!
//! A server has its own names of images, hashes of their pixels by a recipe that differs by
//! versions. They are learned: a chain of blocks that equals a prompt that the server was given
//! lately, in all tokens of text and in the places of its images, has the images of that prompt.
//! Where it equals several prompts with different images, its blocks wait until more is known:
//! until a later block shows whose they are, or a name is learned that all but one of the prompts
//! contradict.
//!
//! What is learned wrongly makes a prediction wrong, and no more: no server is told a name.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::mem::take;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chiasm_kv::event::{BlockStored, ExternalHash, ExtraKey, KvEvent};
use chiasm_types::TokenId;

use super::asked::{Asked, Chain, Mark, Prompt, Reading};
use super::block::{StoredBlock, medium};
use super::names::Names;

/// Blocks whose chain is known: more than the KV cache of a server has, which tells when it lets go
/// of one. Of what comes beyond only text is known, and none of its chain.
const MOST_KNOWN: usize = 1 << 18;
/// Blocks that wait at most, and for how long. Those of an image of 1,000 tokens are 32.
const MOST_WAITING: usize = 2048;
const LONGEST_WAIT: Duration = Duration::from_secs(600);
/// How often blocks are held against prompts for the events of one answer. What waits beyond that
/// does so until something else is told.
const MOST_READINGS: usize = 1 << 16;
/// What is learned of some blocks may tell of others.
const PASSES: usize = 4;

/// The blocks that a server holds, as chains from the starts of prompts.
pub(super) struct Chains {
    asked: Arc<Asked>,
    /// The prompts whose blocks may be told of now.
    prompts: Vec<Arc<Prompt>>,
    /// What is in front of a block's end, by the block's short name.
    known: HashMap<u64, Chain>,
    /// Blocks of which that is not known yet, in the order in which they came.
    waiting: BTreeMap<u64, Waiting>,
    /// Their numbers, by their short names.
    numbers: HashMap<u64, u64>,
    next: u64,
    /// Something came that may tell whose waiting blocks are.
    has_news: bool,
    names: Names,
    is_at_a_loss: bool,
}

struct Waiting {
    block: StoredBlock,
    /// The block in front of it, and both short names.
    parent: Option<ExternalHash>,
    short: u64,
    short_parent: Option<u64>,
    since: Instant,
}

/// What a block is, and the chain that ends with it.
type Read = (Reading, Chain);

impl Chains {
    pub(super) fn new(asked: Arc<Asked>) -> Self {
        Self {
            asked,
            prompts: Vec::new(),
            known: HashMap::new(),
            waiting: BTreeMap::new(),
            numbers: HashMap::new(),
            next: 0,
            has_news: false,
            names: Names::default(),
            is_at_a_loss: false,
        }
    }

    /// Looks at what the server was given, before events are taken in.
    pub(super) fn begin(&mut self, now: Instant) {
        self.prompts = self.asked.lately(now);
    }

    /// Forgets all blocks, but not the names of images.
    pub(super) fn forget(&mut self) {
        self.known.clear();
        self.waiting.clear();
        self.numbers.clear();
    }

    /// A block came to hold tokens. It is told now if it is text and nothing in front of it waits.
    pub(super) fn stored(
        &mut self,
        parent: Option<&ExternalHash>,
        block: StoredBlock,
        now: Instant,
        told: &mut Vec<KvEvent>,
    ) {
        let (short, short_parent) =
            (self.asked.short(&block.hash), parent.map(|parent| self.asked.short(parent)));
        let before = match short_parent {
            None => Some(Chain::START),
            Some(parent) => self.known.get(&parent).copied(),
        };
        let waits = short_parent.is_some_and(|parent| self.numbers.contains_key(&parent));
        if !waits && let Some(text) = self.as_text(before, &block) {
            if block.tokens.len() == self.asked.block_size().get() {
                if let Some(before) = before {
                    self.know(short, self.asked.after(before, &text, &[]));
                }
                tell(told, parent, &block, &text, &[]);
            }
        } else if (before.is_some() || waits)
            && !self.known.contains_key(&short)
            && !self.numbers.contains_key(&short)
        {
            self.wait(Waiting { block, parent: parent.cloned(), short, short_parent, since: now });
        }
    }

    /// The tokens of a block that is text, and has no part of an image of which the server does not
    /// tell.
    fn as_text(&self, before: Option<Chain>, block: &StoredBlock) -> Option<Vec<TokenId>> {
        let text = block.text()?;
        let has_item = |before: Chain| {
            let mut prompts =
                self.prompts.iter().filter(|prompt| prompt.begins_with(before, &self.asked));
            prompts.any(|prompt| prompt.has_item_in(before.blocks, self.asked.block_size()))
        };
        (!before.is_some_and(has_item)).then_some(text)
    }

    fn know(&mut self, short: u64, chain: Chain) {
        if self.known.len() < MOST_KNOWN || self.known.contains_key(&short) {
            self.known.insert(short, chain);
        }
    }

    fn wait(&mut self, waiting: Waiting) {
        if self.waiting.len() >= MOST_WAITING
            && let Some((_, oldest)) = self.waiting.pop_first()
        {
            self.numbers.remove(&oldest.short);
        }
        self.numbers.insert(waiting.short, self.next);
        self.waiting.insert(self.next, waiting);
        self.next += 1;
        self.has_news = true;
    }

    /// A block is gone. Says whether it was one that waits, and was never told.
    pub(super) fn removed(&mut self, hash: &ExternalHash) -> bool {
        let short = self.asked.short(hash);
        self.known.remove(&short);
        let number = self.numbers.remove(&short);
        number.is_some_and(|number| self.waiting.remove(&number).is_some())
    }

    /// A block is at another level now. Says whether it is one that waits.
    pub(super) fn moved(&mut self, hash: &ExternalHash, level: usize) -> bool {
        let number = self.numbers.get(&self.asked.short(hash));
        let waiting = number.and_then(|number| self.waiting.get_mut(number));
        waiting.map(|waiting| waiting.block.level = level).is_some()
    }

    /// Whether blocks have waited in vain while no image was known at all.
    pub(super) fn is_at_a_loss(&self) -> bool {
        self.is_at_a_loss
    }

    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Tells the waiting blocks of which it is known by now whose they are.
    pub(super) fn settle(&mut self, now: Instant, told: &mut Vec<KvEvent>) {
        while let Some(first) = self.waiting.first_entry()
            && now.saturating_duration_since(first.get().since) > LONGEST_WAIT
        {
            self.numbers.remove(&first.remove().short);
            self.is_at_a_loss |= self.names.is_empty();
        }
        if !take(&mut self.has_news) {
            return;
        }
        let mut readings_left = MOST_READINGS;
        for _ in 0..PASSES {
            let inner: HashSet<u64> =
                self.waiting.values().filter_map(|waiting| waiting.short_parent).collect();
            // The last that came tell the most.
            let ends =
                self.waiting.iter().rev().filter(|(_, waiting)| !inner.contains(&waiting.short));
            let ends: Vec<u64> = ends.map(|(number, _)| *number).collect();
            let mut has_told = false;
            for end in ends {
                has_told |= self.settle_as_far_as(end, now, &mut readings_left, told);
            }
            if !has_told {
                return;
            }
        }
    }

    /// Tells what waits in front of a block, and it. Says whether anything was told.
    fn settle_as_far_as(
        &mut self,
        end: u64,
        now: Instant,
        readings_left: &mut usize,
        told: &mut Vec<KvEvent>,
    ) -> bool {
        let Some((before, path)) = self.path_to(end) else { return false };
        let agreed = match self.agreed(before, &path, now, readings_left) {
            Some(agreed) => agreed,
            // Behind what was told by now there may be text of which no prompt is known any more.
            None => self.leading_text(before, &path),
        };
        for ((reading, chain), number) in agreed.iter().zip(&path) {
            let Some(waiting) = self.waiting.remove(number) else { break };
            self.numbers.remove(&waiting.short);
            for (name, item) in &reading.names {
                self.names.learn(name, *item, now);
            }
            if waiting.block.tokens.len() == self.asked.block_size().get() {
                self.know(waiting.short, *chain);
                tell(
                    told,
                    waiting.parent.as_ref(),
                    &waiting.block,
                    &reading.tokens,
                    &reading.marks,
                );
            }
        }
        !agreed.is_empty()
    }

    /// The waiting blocks as far as one of them, and what is in front of all.
    fn path_to(&self, end: u64) -> Option<(Chain, Vec<u64>)> {
        let (mut number, mut path) = (end, vec![end]);
        let before = loop {
            let Some(parent) = self.waiting.get(&number)?.short_parent else { break Chain::START };
            if let Some(chain) = self.known.get(&parent) {
                break *chain;
            }
            // What was told in front of it, as a server that is right does, has a smaller number.
            number = self.numbers.get(&parent).copied().filter(|parent| *parent < number)?;
            path.push(number);
        };
        path.reverse();
        Some((before, path))
    }

    /// What the first of these blocks are, as far as all prompts agree that all of them may be of.
    /// `None` where none is known.
    fn agreed(
        &mut self,
        before: Chain,
        path: &[u64],
        now: Instant,
        readings_left: &mut usize,
    ) -> Option<Vec<Read>> {
        let candidates = self.candidates(before, path, readings_left)?;
        let contradicted = |reads: &Vec<Read>| {
            let mut names = reads.iter().flat_map(|(reading, _)| &reading.names);
            names.any(|(name, item)| self.names.contradict(name, item, now))
        };
        let (odd, fit): (Vec<_>, Vec<_>) = candidates.into_iter().partition(contradicted);
        let Some((first, others)) = fit.split_first() else {
            // Either what was learned is wrong or this is the prompt of somebody else. The next
            // time tells.
            if let [odd] = &odd[..] {
                odd.iter()
                    .flat_map(|(reading, _)| &reading.names)
                    .for_each(|(name, item)| self.names.forget(name, item));
            }
            return None;
        };
        let agree = |at: &usize| others.iter().all(|other| other[*at].1 == first[*at].1);
        let agreed = (0..path.len()).take_while(agree).count();
        Some(first[..agreed].to_vec())
    }

    /// What these blocks are, for each prompt that they may be of. `None` if there was no time to
    /// find all of these.
    fn candidates(
        &self,
        before: Chain,
        path: &[u64],
        readings_left: &mut usize,
    ) -> Option<Vec<Vec<Read>>> {
        let size = self.asked.block_size();
        let begins = self.prompts.iter().filter(|prompt| prompt.begins_with(before, &self.asked));
        let mut candidates: Vec<(&Prompt, Vec<Read>)> =
            begins.map(|prompt| (&**prompt, Vec::new())).collect();
        for waiting in path.iter().filter_map(|number| self.waiting.get(number)) {
            *readings_left = readings_left.checked_sub(candidates.len())?;
            candidates.retain_mut(|(prompt, reads)| {
                let last = reads.last().map_or(before, |(_, chain)| *chain);
                let Some(reading) = prompt.read(last.blocks, &waiting.block, size) else {
                    return false;
                };
                let chain = self.asked.after(last, &reading.tokens, &reading.marks);
                reads.push((reading, chain));
                true
            });
        }
        Some(candidates.into_iter().map(|(_, reads)| reads).collect())
    }

    /// The first of these blocks, as far as they are text.
    fn leading_text(&self, before: Chain, path: &[u64]) -> Vec<Read> {
        let read = |before: &mut Chain, number: &u64| {
            let tokens = self.as_text(Some(*before), &self.waiting.get(number)?.block)?;
            *before = self.asked.after(*before, &tokens, &[]);
            Some((Reading { tokens, marks: Vec::new(), names: Vec::new() }, *before))
        };
        path.iter().scan(before, read).collect()
    }
}

/// Adds a block to what is told, to the last event if it goes on there.
fn tell(
    told: &mut Vec<KvEvent>,
    parent: Option<&ExternalHash>,
    block: &StoredBlock,
    tokens: &[TokenId],
    marks: &[Mark],
) {
    let medium = medium(block.level);
    let goes_on = match told.last() {
        Some(KvEvent::BlockStored(last)) => {
            parent.is_some()
                && last.block_hashes.last() == parent
                && last.medium == medium
                && !last.token_ids.is_empty()
        }
        _ => false,
    };
    if !goes_on {
        let block_size = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let parent_block_hash = parent.cloned();
        told.push(KvEvent::BlockStored(BlockStored {
            parent_block_hash,
            block_size,
            medium,
            ..BlockStored::default()
        }));
    }
    let Some(KvEvent::BlockStored(stored)) = told.last_mut() else { return };
    if !marks.is_empty() || stored.extra_keys.is_some() {
        let media = |(item, offset): &Mark| ExtraKey::Media {
            identifier: item.to_string(),
            offset: *offset,
        };
        let earlier = stored.block_hashes.len();
        let keys = stored.extra_keys.get_or_insert_with(|| vec![None; earlier]);
        keys.push((!marks.is_empty()).then(|| marks.iter().map(media).collect()));
    }
    stored.block_hashes.push(block.hash.clone());
    stored.token_ids.extend_from_slice(tokens);
}
