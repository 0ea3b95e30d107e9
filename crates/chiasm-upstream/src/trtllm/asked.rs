//! The prompts with images that a server was given lately, which the blocks that it tells of are
//! held against.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use chiasm_backend::{ForeseenPrompt, Forwarded};
use chiasm_kv::event::ExternalHash;
use chiasm_types::{BlockSize, MmHash, Placeholder, TokenId};
use futures_util::stream::StreamExt;

use super::block::{ItemKey, StoredBlock};

/// Prompts that are kept, and tokens of all of them. Where more are in flight the oldest are
/// forgotten: what is told of their images waits until these are asked about again.
const MOST_PROMPTS: usize = 512;
const MOST_TOKENS: usize = 4 << 20;
/// How long after the end of an answer blocks of its prompt may still be told of.
const AFTERWARDS: Duration = Duration::from_secs(5);

/// Prompts with images that one server was given.
pub(crate) struct Asked {
    block_size: BlockSize,
    state: RandomState,
    prompts: Mutex<VecDeque<Arc<Prompt>>>,
}

/// A prompt that is being answered, until this is dropped.
pub(crate) struct InFlight(Arc<Prompt>);

/// The blocks of a prompt as far as one of them, in a form that only compares with those of the
/// same [`Asked`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) blocks: usize,
    digest: u64,
}

impl Chain {
    /// No blocks.
    pub(super) const START: Self = Self { blocks: 0, digest: 0 };
}

/// Where an item is in relation to a block: the item's first token minus the block's, as in vLLM's
/// events.
pub(super) type Mark = (MmHash, i64);

/// A prompt as the server is expected to write it.
pub(super) struct Prompt {
    tokens: Arc<Vec<TokenId>>,
    /// They stand in the order of the prompt.
    items: Vec<Item>,
    /// The chains in front of each block, as far as blocks are full.
    chains: OnceLock<Vec<Chain>>,
    ended: OnceLock<Instant>,
}

struct Item {
    hash: MmHash,
    place: Placeholder,
}

/// What a block that was told of is, if it is one of a prompt's.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Reading {
    pub(super) tokens: Vec<TokenId>,
    pub(super) marks: Vec<Mark>,
    /// The names by which the server calls items.
    pub(super) names: Vec<(String, MmHash)>,
}

impl Asked {
    pub(crate) fn new(block_size: BlockSize) -> Self {
        Self { block_size, state: RandomState::new(), prompts: Mutex::default() }
    }

    /// Takes note of a prompt that the server is about to be given.
    pub(crate) fn begin(&self, prompt: ForeseenPrompt) -> InFlight {
        let ForeseenPrompt { tokens, items } = prompt;
        let items = items.into_iter().map(|(hash, place)| Item { hash, place }).collect();
        let prompt =
            Arc::new(Prompt { tokens, items, chains: OnceLock::new(), ended: OnceLock::new() });
        let mut prompts = self.prompts.lock().unwrap_or_else(PoisonError::into_inner);
        prompts.push_back(prompt.clone());
        let mut tokens: usize = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        while prompts.len() > MOST_PROMPTS || tokens > MOST_TOKENS {
            let Some(oldest) = prompts.pop_front() else { break };
            tokens -= oldest.tokens.len();
        }
        InFlight(prompt)
    }

    /// The prompts whose blocks may be told of now.
    pub(super) fn lately(&self, now: Instant) -> Vec<Arc<Prompt>> {
        let mut prompts = self.prompts.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = |ended: &Instant| now.saturating_duration_since(*ended) > AFTERWARDS;
        prompts.retain(|prompt| !prompt.ended.get().is_some_and(is_over));
        prompts.iter().cloned().collect()
    }

    pub(super) fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// A short name for what the server calls a block, which may be long.
    pub(super) fn short(&self, hash: &ExternalHash) -> u64 {
        self.state.hash_one(hash)
    }

    /// The chain that goes on with a block.
    pub(super) fn after(&self, chain: Chain, tokens: &[TokenId], marks: &[Mark]) -> Chain {
        Chain {
            blocks: chain.blocks + 1,
            digest: self.state.hash_one((chain.digest, tokens, marks)),
        }
    }
}

impl InFlight {
    /// The same answer, with whose end this ends.
    pub(crate) fn until_the_end_of(self, answer: Forwarded) -> Forwarded {
        let body = answer.body.inspect(move |_| {
            let _in_flight = &self;
        });
        Forwarded { body: body.boxed(), ..answer }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        // It ends once.
        let _ = self.0.ended.set(Instant::now());
    }
}

impl Prompt {
    /// Whether it begins with these blocks.
    pub(super) fn begins_with(&self, chain: Chain, asked: &Asked) -> bool {
        let chains = self.chains.get_or_init(|| {
            let mut chains = vec![Chain::START];
            for (at, tokens) in self.tokens.chunks_exact(asked.block_size.get()).enumerate() {
                let begin = at * asked.block_size.get();
                let marks = marks(&self.items_in(begin, begin + tokens.len()), begin);
                chains.push(asked.after(chains[at], tokens, &marks));
            }
            chains
        });
        chains.get(chain.blocks) == Some(&chain)
    }

    /// Whether there is a part of an item in its block of this number.
    pub(super) fn has_item_in(&self, block: usize, size: BlockSize) -> bool {
        !self.items_in(block * size.get(), (block + 1) * size.get()).is_empty()
    }

    /// What a block is as the one of this number; `None` if it is another one. Tokens of text are
    /// to be equal, those in the place of an item say nothing: they differ by models and versions.
    pub(super) fn read(
        &self,
        number: usize,
        block: &StoredBlock,
        size: BlockSize,
    ) -> Option<Reading> {
        let begin = number * size.get();
        let end = begin + block.tokens.len();
        let items = self.items_in(begin, end);
        let token = |(at, told): (usize, &Option<TokenId>)| match self.tokens.get(at).copied() {
            Some(own) if items.iter().any(|item| item.covers(at)) => Some(own),
            Some(own) => told.filter(|told| *told == own),
            // What the model has answered.
            None => *told,
        };
        let tokens = (begin..end).zip(&block.tokens).map(token).collect::<Option<_>>()?;
        let names = names(&items, &block.items(), begin, end)?;
        Some(Reading { tokens, marks: marks(&items, begin), names })
    }

    fn items_in(&self, begin: usize, end: usize) -> Vec<&Item> {
        let touches =
            |item: &&Item| item.place.offset < end && item.place.offset + item.place.length > begin;
        self.items.iter().filter(touches).collect()
    }
}

fn marks(items: &[&Item], begin: usize) -> Vec<Mark> {
    items.iter().map(|item| (item.hash, item.place.offset as i64 - begin as i64)).collect()
}

/// The names of the items in a block. A server counts either all of a placeholder's tokens among an
/// item's, or those alone that embed.
fn names(
    items: &[&Item],
    told: &[&ItemKey],
    begin: usize,
    end: usize,
) -> Option<Vec<(String, MmHash)>> {
    let embedded: Vec<&Item> = items
        .iter()
        .copied()
        .filter(|item| item.embeds_before(end) > item.embeds_before(begin))
        .collect();
    let named = [items, &embedded].into_iter().find(|items| items.len() == told.len())?;
    let name = |(item, key): (&&Item, &&ItemKey)| {
        item.may_be_told_at(begin, key.offset).then(|| (key.name.clone(), item.hash))
    };
    named.iter().zip(told).map(name).collect()
}

impl Item {
    fn covers(&self, at: usize) -> bool {
        (self.place.offset..self.place.offset + self.place.length).contains(&at)
    }

    /// How many of its tokens in front of this place embed.
    fn embeds_before(&self, at: usize) -> usize {
        let before = at.saturating_sub(self.place.offset).min(self.place.length);
        match &self.place.is_embed {
            Some(mask) => mask.iter().take(before).filter(|embeds| **embeds).count(),
            None => before,
        }
    }

    /// Whether so many of its tokens may be said to be in front of a block that begins here. They
    /// count from the start of the placeholder or from the first one that embeds on, with or
    /// without those that do not.
    fn may_be_told_at(&self, begin: usize, offset: u64) -> bool {
        let before = begin.saturating_sub(self.place.offset);
        let leading = self
            .place
            .is_embed
            .as_ref()
            .and_then(|mask| mask.iter().position(|embeds| *embeds))
            .unwrap_or(0);
        [before, before.saturating_sub(leading), self.embeds_before(begin)]
            .iter()
            .any(|count| *count as u64 == offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: BlockSize = BlockSize::new(4).unwrap();

    fn prompt(tokens: usize) -> ForeseenPrompt {
        ForeseenPrompt { tokens: Arc::new(vec![TokenId(1); tokens]), items: Vec::new() }
    }

    #[test]
    fn a_prompt_is_kept_until_its_blocks_are_told_of() {
        let (asked, now) = (Asked::new(SIZE), Instant::now());
        let (first, second) = (asked.begin(prompt(1)), asked.begin(prompt(1)));
        drop(first);
        let kept = |after: u64| asked.lately(now + Duration::from_secs(after)).len();
        assert_eq!((kept(1), kept(3600)), (2, 1));
        drop(second);
        assert_eq!((kept(1), kept(3600)), (1, 0));
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let (asked, now) = (Asked::new(SIZE), Instant::now());
        let small: Vec<_> = (0..=MOST_PROMPTS).map(|_| asked.begin(prompt(1))).collect();
        assert_eq!(asked.lately(now).len(), MOST_PROMPTS);
        let _large = [asked.begin(prompt(MOST_TOKENS - 1)), asked.begin(prompt(2))];
        assert_eq!(asked.lately(now).len(), 1, "the last one is kept");
        drop(small);
    }
}
