//! One request inside the engine.

use std::sync::Arc;

use chiasm_engine::wire::output::EngineCoreEvent;
use chiasm_engine::wire::{
    EngineCoreRequest, FinishReason, LoraRequest, PrefillStats, SamplingParams, StopReason,
};
use chiasm_types::{Placeholder, TokenId};

use crate::block_chain::{BlockChain, MediaRange};
use crate::config::SimConfig;
use crate::image::{self, ItemError, ObservedItem};
use crate::item::Item;
use crate::prompt_digest::PromptDigest;
use crate::reply::{self, Answer};

/// A waiting or running request.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: String,
    /// The index of the frontend's output socket for its outputs.
    pub(crate) client: u32,
    /// The wave of the engine's group in which the request was sent.
    pub(crate) wave: i64,
    pub(crate) params: SamplingParams,
    /// The prompt, then the generated tokens.
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) prompt: usize,
    pub(crate) media: Vec<Media>,
    pub(crate) chain: BlockChain,
    pub(crate) lora: Option<Arc<LoraRequest>>,
    /// The id under which its blocks are retained after its end, if its prompt is kept for another
    /// engine.
    pub(crate) retention_id: Option<u64>,
    /// The number of leading tokens whose keys and values came from another engine.
    pub(crate) transferred_tokens: usize,
    /// The items as the engine observed them, once the request was inspected.
    observed: Option<Vec<ObservedItem>>,
    answer: Option<Answer>,
    /// The statistics for the first output; `None` once it is sent.
    prefill: Option<PrefillStats>,
    events: Vec<EngineCoreEvent>,
}

/// A media item of a request.
#[derive(Debug)]
pub(crate) struct Media {
    pub(crate) identifier: String,
    pub(crate) placeholder: Placeholder,
    /// `None` if the item was sent without data to an engine without a receiver cache. Kept until
    /// the request ends, as `Request.mm_features` in vLLM, although it is not needed after
    /// encoding.
    pub(crate) item: Option<Item>,
}

/// The kinds of `EngineCoreEventType` in `vllm/v1/engine/__init__.py`.
#[derive(Clone, Copy)]
pub(crate) enum EventKind {
    Queued = 1,
    Scheduled = 2,
    Preempted = 3,
}

/// An error of a request that kills a worker.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InspectError {
    #[error("request {0} has an empty prompt")]
    EmptyPrompt(String),
    #[error("request {id} has {tokens} prompt tokens, max_model_len is {max_model_len}")]
    TooLong { id: String, tokens: usize, max_model_len: usize },
    #[error("request {id}: {item} has no data")]
    NoData { id: String, item: String },
    #[error("request {id}: {problem}")]
    Item { id: String, problem: ItemError },
}

/// A sampled token, and what follows from it.
pub(crate) struct Sampled {
    pub(crate) token: TokenId,
    pub(crate) finish: Option<FinishReason>,
    pub(crate) stop_reason: Option<StopReason>,
}

impl Sequence {
    /// Creates a request. `items` are the items of its features, as completed by the receiver
    /// cache.
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
            wave: request.current_wave,
            params: request.sampling_params,
            prompt: request.prompt_token_ids.len(),
            tokens: Arc::unwrap_or_clone(request.prompt_token_ids),
            media: media.collect(),
            chain,
            lora: request.lora_request,
            retention_id: None,
            transferred_tokens: 0,
            observed: None,
            answer: None,
            prefill: Some(PrefillStats::default()),
            events: Vec::new(),
        }
    }

    /// Returns the position of the first token after all items.
    pub(crate) fn items_end(&self) -> usize {
        self.media
            .iter()
            .map(|media| media.placeholder.offset.saturating_add(media.placeholder.length))
            .max()
            .unwrap_or(0)
    }

    /// Returns the digest that stands for the prompt's keys and values.
    pub(crate) fn prompt_digest(&self) -> PromptDigest {
        let blocks = self.prompt / self.chain.block_size();
        let rest: Vec<u32> = self.tokens[blocks * self.chain.block_size()..self.prompt]
            .iter()
            .map(|id| id.0)
            .collect();
        PromptDigest::new(&self.chain.hashes()[..blocks], &rest)
    }

    /// Returns the number of generated tokens.
    fn generated(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// Returns `true` if the request reads the prefix cache. Prompt log probabilities need every
    /// prompt token computed, so such requests do not.
    pub(crate) fn reads_prefix_cache(&self) -> bool {
        !self.params.skip_reading_prefix_cache.unwrap_or(self.params.prompt_logprobs.is_some())
    }

    /// Records an event.
    pub(crate) fn record(&mut self, kind: EventKind, now: f64) {
        self.events.push(EngineCoreEvent { kind: kind as u32, timestamp: now });
    }

    pub(crate) fn take_events(&mut self) -> Vec<EngineCoreEvent> {
        std::mem::take(&mut self.events)
    }

    /// Inspects the request as a worker does when it receives one.
    ///
    /// # Errors
    /// Returns [`InspectError`] if the request kills the worker.
    pub(crate) fn inspect(&mut self, config: &SimConfig) -> Result<(), InspectError> {
        let id = || self.id.clone();
        if self.observed.is_some() {
            return Ok(());
        }
        if self.prompt == 0 {
            return Err(InspectError::EmptyPrompt(id()));
        }
        if self.prompt > config.max_model_len {
            return Err(InspectError::TooLong {
                id: id(),
                tokens: self.prompt,
                max_model_len: config.max_model_len,
            });
        }
        let mut observed = Vec::with_capacity(self.media.len());
        for media in &self.media {
            let no_data = || InspectError::NoData { id: id(), item: media.identifier.clone() };
            let item = media.item.as_ref().ok_or_else(no_data)?;
            let image = image::inspect(item.facts(), &media.placeholder, &config.images);
            observed.push(image.map_err(|problem| InspectError::Item { id: id(), problem })?);
        }
        self.observed = Some(observed);
        Ok(())
    }

    /// Records the number of cached prompt tokens when the request is first scheduled.
    pub(crate) fn note_prefill(&mut self, cached: usize) {
        if let Some(stats) = &mut self.prefill {
            *stats = PrefillStats {
                num_prompt_tokens: self.prompt as u64,
                num_computed_tokens: (self.prompt - cached) as u64,
                num_cached_tokens: cached as u64,
                num_local_cached_tokens: cached.saturating_sub(self.transferred_tokens) as u64,
                num_external_cached_tokens: self.transferred_tokens.min(cached) as u64,
                ..PrefillStats::default()
            };
        }
    }

    /// Takes the statistics for the first output; `None` afterwards. `stored` is the number of its
    /// tokens that other requests can find in the cache.
    pub(crate) fn take_prefill(&mut self, stored: usize) -> Option<PrefillStats> {
        let mut stats = self.prefill.take()?;
        let stored = stored.min(self.prompt) as u64;
        stats.num_cache_creation_tokens = stored.saturating_sub(stats.num_cached_tokens);
        Some(stats)
    }

    /// Generates one token and determines whether it is the last, in the order of vLLM's
    /// `check_stop`.
    pub(crate) fn sample(&mut self, config: &SimConfig) -> Sampled {
        let too_early = self.generated() < self.params.min_tokens as usize;
        let cached = self.prefill.as_ref().map_or(0, |stats| stats.num_cached_tokens as usize);
        let answer = self.answer.get_or_insert_with(|| {
            let lora =
                self.lora.as_ref().filter(|_| config.lora.is_some()).map(|lora| lora.name.as_str());
            let text = reply::text(
                self.observed.as_deref().unwrap_or_default(),
                cached,
                self.prompt,
                lora,
            );
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
