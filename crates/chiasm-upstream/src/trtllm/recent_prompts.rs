//! The recent prompts with images of one server, which reported blocks are matched against.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use chiasm_backend::{ForwardResponse, PredictedPrompt};
use chiasm_kv::event::ExternalHash;
use chiasm_types::{BlockSize, MmHash, Placeholder, TokenId};
use futures_util::stream::StreamExt;

use super::block::{ItemKey, StoredBlock};

/// The maximum number of kept prompts. Beyond it, or beyond [`MAX_TOKENS`], the oldest prompt is
/// dropped, and blocks with its images wait until a later prompt has the same images.
const MAX_PROMPTS: usize = 512;
/// The maximum number of tokens of all kept prompts.
const MAX_TOKENS: usize = 4 << 20;
/// The time after the end of an answer in which the server may still report blocks of its prompt.
const EVENT_GRACE: Duration = Duration::from_secs(5);

/// The recent prompts with images that were sent to one server.
pub(crate) struct RecentPrompts {
    block_size: BlockSize,
    state: RandomState,
    prompts: Mutex<VecDeque<Arc<Prompt>>>,
}

/// Keeps a prompt until [`EVENT_GRACE`] after this guard is dropped.
pub(crate) struct InFlight(Arc<Prompt>);

/// A digest of the leading blocks of a prompt. It only compares with digests of the same
/// [`RecentPrompts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) blocks: usize,
    digest: u64,
}

impl Chain {
    /// The chain without blocks.
    pub(super) const START: Self = Self { blocks: 0, digest: 0 };
}

/// An item, and its position relative to a block: the item's first token minus the block's, as in
/// vLLM's events.
pub(super) type ItemOffset = (MmHash, i64);

/// A prompt as the server is expected to expand it.
pub(super) struct Prompt {
    tokens: Arc<Vec<TokenId>>,
    /// The items, in the order of the prompt.
    items: Vec<Item>,
    /// The chain before each block, as far as blocks are full.
    chains: OnceLock<Vec<Chain>>,
    ended: OnceLock<Instant>,
}

/// A media item of a prompt.
struct Item {
    hash: MmHash,
    placeholder: Placeholder,
}

/// A reported block, matched to a block of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct BlockMatch {
    pub(super) tokens: Vec<TokenId>,
    pub(super) items: Vec<ItemOffset>,
    /// The server's names of the items.
    pub(super) names: Vec<(String, MmHash)>,
}

impl RecentPrompts {
    pub(crate) fn new(block_size: BlockSize) -> Self {
        Self { block_size, state: RandomState::new(), prompts: Mutex::default() }
    }

    /// Records a prompt that is about to be sent to the server.
    pub(crate) fn begin(&self, prompt: PredictedPrompt) -> InFlight {
        let PredictedPrompt { tokens, items } = prompt;
        let items =
            items.into_iter().map(|(hash, placeholder)| Item { hash, placeholder }).collect();
        let prompt =
            Arc::new(Prompt { tokens, items, chains: OnceLock::new(), ended: OnceLock::new() });
        let mut prompts = self.prompts.lock().unwrap_or_else(PoisonError::into_inner);
        prompts.push_back(prompt.clone());
        let mut tokens: usize = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        while prompts.len() > MAX_PROMPTS || tokens > MAX_TOKENS {
            let Some(oldest) = prompts.pop_front() else { break };
            tokens -= oldest.tokens.len();
        }
        InFlight(prompt)
    }

    /// Drops old prompts and returns those whose blocks the server may report at `now`.
    pub(super) fn current(&self, now: Instant) -> Vec<Arc<Prompt>> {
        let mut prompts = self.prompts.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = |ended: &Instant| now.saturating_duration_since(*ended) > EVENT_GRACE;
        prompts.retain(|prompt| !prompt.ended.get().is_some_and(is_over));
        prompts.iter().cloned().collect()
    }

    pub(super) fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// Returns a short hash of the server's hash of a block, which may be long.
    pub(super) fn short_hash(&self, hash: &ExternalHash) -> u64 {
        self.state.hash_one(hash)
    }

    /// Returns `chain` extended by one block.
    pub(super) fn extend(&self, chain: Chain, tokens: &[TokenId], items: &[ItemOffset]) -> Chain {
        Chain {
            blocks: chain.blocks + 1,
            digest: self.state.hash_one((chain.digest, tokens, items)),
        }
    }
}

impl InFlight {
    /// Wraps an answer so that this guard is dropped with the answer's body.
    pub(crate) fn hold_for(self, answer: ForwardResponse) -> ForwardResponse {
        let body = answer.body.inspect(move |_| {
            let _in_flight = &self;
        });
        ForwardResponse { body: body.boxed(), ..answer }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        // A guard is dropped once, so the cell is empty.
        let _ = self.0.ended.set(Instant::now());
    }
}

impl Prompt {
    /// Returns `true` if the prompt begins with the blocks of `chain`.
    pub(super) fn begins_with(&self, chain: Chain, recent: &RecentPrompts) -> bool {
        let chains = self.chains.get_or_init(|| {
            let mut chains = vec![Chain::START];
            for (at, tokens) in self.tokens.chunks_exact(recent.block_size.get()).enumerate() {
                let begin = at * recent.block_size.get();
                let items = item_offsets(&self.items_in(begin, begin + tokens.len()), begin);
                chains.push(recent.extend(chains[at], tokens, &items));
            }
            chains
        });
        chains.get(chain.blocks) == Some(&chain)
    }

    /// Returns `true` if the prompt's block of this number has a part of an item.
    pub(super) fn has_item_in(&self, block: usize, size: BlockSize) -> bool {
        !self.items_in(block * size.get(), (block + 1) * size.get()).is_empty()
    }

    /// Matches a reported block with the prompt's block of this number; `None` if they differ.
    ///
    /// Tokens of text have to be equal. Reported tokens within an item are ignored, because they
    /// differ between models and versions.
    pub(super) fn match_block(
        &self,
        number: usize,
        block: &StoredBlock,
        size: BlockSize,
    ) -> Option<BlockMatch> {
        let begin = number * size.get();
        let end = begin + block.tokens.len();
        let items = self.items_in(begin, end);
        let token = |(at, reported): (usize, &Option<TokenId>)| match self.tokens.get(at).copied() {
            Some(own) if items.iter().any(|item| item.covers(at)) => Some(own),
            Some(own) => reported.filter(|reported| *reported == own),
            // A token of the model's answer.
            None => *reported,
        };
        let tokens = (begin..end).zip(&block.tokens).map(token).collect::<Option<_>>()?;
        let names = item_names(&items, &block.items(), begin, end)?;
        Some(BlockMatch { tokens, items: item_offsets(&items, begin), names })
    }

    fn items_in(&self, begin: usize, end: usize) -> Vec<&Item> {
        let touches = |item: &&Item| {
            item.placeholder.offset < end
                && item.placeholder.offset + item.placeholder.length > begin
        };
        self.items.iter().filter(touches).collect()
    }
}

fn item_offsets(items: &[&Item], begin: usize) -> Vec<ItemOffset> {
    items.iter().map(|item| (item.hash, item.placeholder.offset as i64 - begin as i64)).collect()
}

/// Returns the reported names of the items in a block; `None` if the reported items do not fit. A
/// server counts either all of a placeholder's tokens as the item's, or only those that embed.
fn item_names(
    items: &[&Item],
    reported: &[&ItemKey],
    begin: usize,
    end: usize,
) -> Option<Vec<(String, MmHash)>> {
    let embedded: Vec<&Item> = items
        .iter()
        .copied()
        .filter(|item| item.embeds_before(end) > item.embeds_before(begin))
        .collect();
    let named = [items, &embedded].into_iter().find(|items| items.len() == reported.len())?;
    let name = |(item, key): (&&Item, &&ItemKey)| {
        item.allows_offset(begin, key.offset).then(|| (key.name.clone(), item.hash))
    };
    named.iter().zip(reported).map(name).collect()
}

impl Item {
    fn covers(&self, at: usize) -> bool {
        (self.placeholder.offset..self.placeholder.offset + self.placeholder.length).contains(&at)
    }

    /// Returns the number of the item's tokens before position `at` that embed.
    fn embeds_before(&self, at: usize) -> usize {
        let before = at.saturating_sub(self.placeholder.offset).min(self.placeholder.length);
        match &self.placeholder.is_embed {
            Some(mask) => mask.iter().take(before).filter(|embeds| **embeds).count(),
            None => before,
        }
    }

    /// Returns `true` if the server may report `offset` as the number of the item's tokens before a
    /// block that begins at `begin`. Servers count from the start of the placeholder or from its
    /// first embedding token, with or without tokens that do not embed.
    fn allows_offset(&self, begin: usize, offset: u64) -> bool {
        let before = begin.saturating_sub(self.placeholder.offset);
        let leading = self
            .placeholder
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

    fn prompt(tokens: usize) -> PredictedPrompt {
        PredictedPrompt { tokens: Arc::new(vec![TokenId(1); tokens]), items: Vec::new() }
    }

    #[test]
    fn prompt_is_kept_for_a_while_after_its_answer() {
        let recent = RecentPrompts::new(SIZE);
        let now = Instant::now();
        let first = recent.begin(prompt(1));
        let second = recent.begin(prompt(1));
        drop(first);
        let current_count = |after: u64| recent.current(now + Duration::from_secs(after)).len();
        assert_eq!((current_count(1), current_count(3600)), (2, 1));
        drop(second);
        assert_eq!((current_count(1), current_count(3600)), (1, 0));
    }

    #[test]
    fn kept_prompts_are_bounded() {
        let recent = RecentPrompts::new(SIZE);
        let now = Instant::now();
        let small: Vec<_> = (0..=MAX_PROMPTS).map(|_| recent.begin(prompt(1))).collect();
        assert_eq!(recent.current(now).len(), MAX_PROMPTS);
        let _large = [recent.begin(prompt(MAX_TOKENS - 1)), recent.begin(prompt(2))];
        assert_eq!(recent.current(now).len(), 1, "the last one is kept");
        drop(small);
    }
}
