//! One request inside the engine.

use std::sync::Arc;

use chiasm_engine::wire::output::EngineCoreEvent;
use chiasm_engine::wire::{
    EngineCoreRequest, FinishReason, LoraRequest, PrefillStats, SamplingParams, StopReason,
};
use chiasm_types::{Placeholder, TokenId};

use crate::block_chain::{BlockChain, MediaRange};
use crate::computed::Computed;
use crate::config::SimConfig;
use crate::image::{self, ItemError, SeenItem};
use crate::item::Item;
use crate::reply::{self, Answer};

/// A request that waits or runs.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: String,
    /// Index of the frontend's output socket that its outputs go to.
    pub(crate) client: u32,
    pub(crate) params: SamplingParams,
    /// Prompt, then what was generated.
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) prompt: usize,
    pub(crate) media: Vec<Media>,
    pub(crate) chain: BlockChain,
    pub(crate) lora: Option<Arc<LoraRequest>>,
    /// The number under which its blocks are kept when it has ended, if its prompt is left for
    /// another engine.
    pub(crate) left_as: Option<u64>,
    /// Leading tokens whose keys and values came from another engine.
    pub(crate) given: usize,
    /// What the engine saw, once the request has been looked at.
    seen: Option<Vec<SeenItem>>,
    answer: Option<Answer>,
    /// Statistics for the first output; `None` once it is sent.
    prefill: Option<PrefillStats>,
    events: Vec<EngineCoreEvent>,
}

/// One media item of a request.
#[derive(Debug)]
pub(crate) struct Media {
    pub(crate) identifier: String,
    pub(crate) placeholder: Placeholder,
    /// `None` when it was sent without data to an engine without a receiver cache. Kept until the
    /// request has ended, as `Request.mm_features` in vLLM, although nobody needs it once it is
    /// encoded.
    pub(crate) item: Option<Item>,
}

/// Kinds of `EngineCoreEventType` in `vllm/v1/engine/__init__.py`.
#[derive(Clone, Copy)]
pub(crate) enum Moment {
    Queued = 1,
    Scheduled = 2,
    Preempted = 3,
}

/// A request that a worker dies of.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LookError {
    #[error("request {0} has an empty prompt")]
    EmptyPrompt(String),
    #[error("request {id} has {tokens} prompt tokens, max_model_len is {most}")]
    TooLong { id: String, tokens: usize, most: usize },
    #[error("request {id}: {item} has no data")]
    NoData { id: String, item: String },
    #[error("request {id}: {problem}")]
    Item { id: String, problem: ItemError },
}

/// What one sampled token means.
pub(crate) struct Sampled {
    pub(crate) token: TokenId,
    pub(crate) finish: Option<FinishReason>,
    pub(crate) stop_reason: Option<StopReason>,
}

impl Sequence {
    /// `items` are those of the request's features, as the receiver cache completed them.
    pub(crate) fn new(
        request: EngineCoreRequest,
        items: Vec<Option<Item>>,
        block_size: usize,
    ) -> Self {
        let ranges = request.mm_features.iter().map(|feature| MediaRange {
            identifier: feature.identifier.clone(),
            offset: feature.position.offset,
            length: feature.position.length,
        });
        let lora = request.lora_request.as_ref().map(|lora| lora.name.clone());
        let mut chain = BlockChain::new(block_size, ranges.collect(), lora, request.cache_salt);
        chain.extend(&request.prompt_token_ids);
        let media = request.mm_features.into_iter().zip(items);
        let media = media.map(|(feature, item)| Media {
            identifier: feature.identifier,
            placeholder: feature.position,
            item,
        });
        Self {
            id: request.request_id,
            client: request.client_index,
            params: request.sampling_params,
            prompt: request.prompt_token_ids.len(),
            tokens: Arc::unwrap_or_clone(request.prompt_token_ids),
            media: media.collect(),
            chain,
            lora: request.lora_request,
            left_as: None,
            given: 0,
            seen: None,
            answer: None,
            prefill: Some(PrefillStats::default()),
            events: Vec::new(),
        }
    }

    /// The first token after all items.
    pub(crate) fn items_end(&self) -> usize {
        self.media
            .iter()
            .map(|media| media.placeholder.offset.saturating_add(media.placeholder.length))
            .max()
            .unwrap_or(0)
    }

    /// What stands for its prompt's keys and values.
    pub(crate) fn computed(&self) -> Computed {
        let blocks = self.prompt / self.chain.block_size();
        let rest: Vec<u32> = self.tokens[blocks * self.chain.block_size()..self.prompt]
            .iter()
            .map(|id| id.0)
            .collect();
        Computed::of(&self.chain.hashes()[..blocks], &rest)
    }

    /// Tokens generated so far.
    fn generated(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// Prompt log probabilities need every prompt token computed, so such requests do not read the
    /// prefix cache.
    pub(crate) fn reads_prefix_cache(&self) -> bool {
        !self.params.skip_reading_prefix_cache.unwrap_or(self.params.prompt_logprobs.is_some())
    }

    pub(crate) fn record(&mut self, moment: Moment, now: f64) {
        self.events.push(EngineCoreEvent { kind: moment as u32, timestamp: now });
    }

    pub(crate) fn take_events(&mut self) -> Vec<EngineCoreEvent> {
        std::mem::take(&mut self.events)
    }

    /// Looks at the request as a worker does when it gets it.
    ///
    /// # Errors
    /// The worker would die of it.
    pub(crate) fn look(&mut self, config: &SimConfig) -> Result<(), LookError> {
        let id = || self.id.clone();
        if self.seen.is_some() {
            return Ok(());
        }
        if self.prompt == 0 {
            return Err(LookError::EmptyPrompt(id()));
        }
        if self.prompt > config.max_model_len {
            return Err(LookError::TooLong {
                id: id(),
                tokens: self.prompt,
                most: config.max_model_len,
            });
        }
        let mut seen = Vec::with_capacity(self.media.len());
        for media in &self.media {
            let no_data = || LookError::NoData { id: id(), item: media.identifier.clone() };
            let item = media.item.as_ref().ok_or_else(no_data)?;
            let image = image::inspect(item.outline(), &media.placeholder, &config.images);
            seen.push(image.map_err(|problem| LookError::Item { id: id(), problem })?);
        }
        self.seen = Some(seen);
        Ok(())
    }

    /// Notes how much of the prompt was found in the cache when it was first scheduled.
    pub(crate) fn note_prefill(&mut self, cached: usize) {
        if let Some(stats) = &mut self.prefill {
            *stats = PrefillStats {
                num_prompt_tokens: self.prompt as u64,
                num_computed_tokens: (self.prompt - cached) as u64,
                num_cached_tokens: cached as u64,
                num_local_cached_tokens: cached.saturating_sub(self.given) as u64,
                num_external_cached_tokens: self.given.min(cached) as u64,
                ..PrefillStats::default()
            };
        }
    }

    /// Takes the statistics that go with the first output; `None` afterwards. So many of its tokens
    /// can be found by others.
    pub(crate) fn take_prefill(&mut self, stored: usize) -> Option<PrefillStats> {
        let mut stats = self.prefill.take()?;
        let stored = stored.min(self.prompt) as u64;
        stats.num_cache_creation_tokens = stored.saturating_sub(stats.num_cached_tokens);
        Some(stats)
    }

    /// Generates one token and finds out whether it is the last, checking in the order of vLLM's
    /// `check_stop`.
    pub(crate) fn sample(&mut self, config: &SimConfig) -> Sampled {
        let too_early = self.generated() < self.params.min_tokens as usize;
        let cached = self.prefill.as_ref().map_or(0, |stats| stats.num_cached_tokens as usize);
        let answer = self.answer.get_or_insert_with(|| {
            let lora =
                self.lora.as_ref().filter(|_| config.lora.is_some()).map(|lora| lora.name.as_str());
            let text =
                reply::text(self.seen.as_deref().unwrap_or_default(), cached, self.prompt, lora);
            Answer::new((config.reply)(&text), config.eos.or(self.params.eos_token_id))
        });
        let token =
            answer.next(|token| too_early && self.params.all_stop_token_ids.contains(&token));
        self.tokens.push(token);
        self.chain.extend(&self.tokens);

        let (finish, stop_reason) = if self.params.eos_token_id == Some(token) {
            (Some(FinishReason::Stop), None)
        } else if self.params.stop_token_ids.contains(&token) {
            (Some(FinishReason::Stop), Some(StopReason::Token(token)))
        } else if self.tokens.len() >= config.max_model_len
            || self.generated() >= self.params.max_tokens as usize
        {
            (Some(FinishReason::Length), None)
        } else {
            (None, None)
        };
        Sampled { token, finish, stop_reason }
    }
}
