//! Continuous batching: which tokens of which requests each step computes.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use chiasm_engine::wire::stats::PrefixCacheStats;
use chiasm_engine::wire::{EngineCoreOutput, FinishReason, SchedulerStats};
use chiasm_engine_caches::{Encoded, EncoderCache};
use chiasm_kv::event::KvEvent;

use crate::config::SimConfig;
use crate::item::Item;
use crate::lent_slot::CheckedSlots;
use crate::logprobs;
use crate::pace::StepWork;
use crate::paged_cache::PagedCache;
use crate::sequence::{Media, Moment, Sequence};
use crate::step_outputs::{ClientOutputs, StepOutputs};

/// Something killed the engine; what, in words.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fatal(pub(crate) String);

/// First come, first served, as vLLM 0.32's `Scheduler` with one group of full-attention layers.
///
/// A step is [`Scheduler::schedule`], then time passes, then [`Scheduler::update`]. Running requests come first, one
/// token each or the next chunk of their prompt; if blocks run out, the request that came last is preempted. Then
/// waiting requests are admitted while there are tokens, seats and enough free blocks for their whole prompt.
pub(crate) struct Scheduler {
    config: Arc<SimConfig>,
    cache: PagedCache,
    encoder: EncoderCache<String>,
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    ids: HashSet<String>,
    /// Requests ended since the last step: the engine takes one more step for them, even with nothing to compute.
    ended: bool,
    /// Items of requests that ended since the last step. The worker has them, too, and hears of the end with the next step
    /// (`finished_req_ids`).
    leaving: Vec<Media>,
    /// Requests whose item contradicts the encoder's cache.
    contradicting: Vec<String>,
    lookups: PrefixCacheStats,
}

impl Scheduler {
    pub(crate) fn new(config: Arc<SimConfig>) -> Self {
        Self {
            cache: PagedCache::new(config.num_blocks, config.block_size.get()),
            encoder: EncoderCache::new(config.encoder_cache_tokens as u64),
            config,
            running: Vec::new(),
            waiting: VecDeque::new(),
            ids: HashSet::new(),
            ended: false,
            leaving: Vec::new(),
            contradicting: Vec::new(),
            lookups: PrefixCacheStats::default(),
        }
    }

    pub(crate) fn has_unfinished(&self) -> bool {
        !self.ids.is_empty()
    }

    pub(crate) fn has_work(&self) -> bool {
        self.has_unfinished() || self.ended
    }

    /// # Errors
    /// The id is already in use.
    pub(crate) fn add(&mut self, mut sequence: Sequence, now: f64) -> Result<(), Fatal> {
        if !self.ids.insert(sequence.id.clone()) {
            return Err(Fatal(format!("duplicate request id {}", sequence.id)));
        }
        sequence.record(Moment::Queued, now);
        self.waiting.push_back(sequence);
        Ok(())
    }

    /// Forgets these requests without a word. Unknown ids are ignored.
    pub(crate) fn abort(&mut self, ids: &[String]) {
        for id in ids {
            if let Some(sequence) = self.take(id) {
                self.end(sequence);
            }
        }
    }

    fn take(&mut self, id: &str) -> Option<Sequence> {
        if let Some(at) = self.running.iter().position(|sequence| sequence.id == id) {
            return Some(self.running.remove(at));
        }
        let at = self.waiting.iter().position(|sequence| sequence.id == id)?;
        self.waiting.remove(at)
    }

    /// Ends every request, as SIGTERM does; their ids by client.
    pub(crate) fn abort_all(&mut self) -> Vec<(u32, Vec<String>)> {
        let mut ended: Vec<(u32, Vec<String>)> = Vec::new();
        let all: Vec<Sequence> = self.running.drain(..).chain(self.waiting.drain(..)).collect();
        for sequence in all {
            match ended.iter_mut().find(|(client, _)| *client == sequence.client) {
                Some((_, ids)) => ids.push(sequence.id.clone()),
                None => ended.push((sequence.client, vec![sequence.id.clone()])),
            }
            self.end(sequence);
        }
        ended
    }

    fn end(&mut self, mut sequence: Sequence) {
        self.cache.release(&mut sequence.table);
        self.ids.remove(&sequence.id);
        self.leaving.append(&mut sequence.media);
        self.ended = true;
    }

    /// Chooses the tokens of the next step.
    ///
    /// # Errors
    /// A request that the worker dies of, or an image in a slot that was written to.
    pub(crate) fn schedule(&mut self, now: f64) -> Result<StepWork, Fatal> {
        self.ended = false;
        self.leaving.clear();
        let mut step = Step {
            budget: self.config.max_num_batched_tokens,
            work: StepWork::default(),
            checked: CheckedSlots::default(),
        };
        let preempted = self.schedule_running(&mut step, now)?;
        if !preempted {
            self.admit_waiting(&mut step, now)?;
        }
        Ok(step.work)
    }

    /// True if a request was preempted.
    fn schedule_running(&mut self, step: &mut Step, now: f64) -> Result<bool, Fatal> {
        let mut preempted = false;
        let mut at = 0;
        while at < self.running.len() && step.budget > 0 {
            let sequence = &mut self.running[at];
            // One position is kept for the token that is sampled. A prompt of max_model_len tokens that did not
            // fit one step therefore never ends, in vLLM too.
            let positions = (self.config.max_model_len - 1).saturating_sub(sequence.computed);
            let wanted = (sequence.tokens.len() - sequence.computed).min(step.budget).min(positions);
            let Some(tokens) = encode(&mut self.encoder, sequence, sequence.computed, wanted, step)? else {
                self.contradicting.push(sequence.id.clone());
                at += 1;
                continue;
            };
            if tokens == 0 {
                at += 1;
                continue;
            }
            let end = sequence.computed + tokens;
            while at < self.running.len() {
                let sequence = &mut self.running[at];
                if self.cache.grow(&mut sequence.table, &[], end) {
                    self.cache.store(&mut sequence.table, &sequence.chain, &sequence.tokens, end);
                    step.take(sequence, tokens);
                    break;
                }
                preempted = true;
                self.preempt_last(now);
            }
            at += 1;
        }
        Ok(preempted)
    }

    fn preempt_last(&mut self, now: f64) {
        if let Some(mut sequence) = self.running.pop() {
            self.cache.release(&mut sequence.table);
            sequence.computed = 0;
            sequence.scheduled = 0;
            sequence.preempted = true;
            sequence.record(Moment::Preempted, now);
            self.waiting.push_front(sequence);
        }
    }

    fn admit_waiting(&mut self, step: &mut Step, now: f64) -> Result<(), Fatal> {
        while step.budget > 0 && self.running.len() < self.config.max_num_seqs {
            let Some(sequence) = self.waiting.front_mut() else {
                break;
            };
            sequence.look(&self.config).map_err(Fatal)?;
            // The last token is computed even when its block is cached: its logits are needed.
            let hits = match sequence.reads_prefix_cache() {
                true => self.cache.find(sequence.chain.hashes(), sequence.tokens.len() - 1),
                false => Vec::new(),
            };
            let cached = hits.len() * self.config.block_size.get();
            let wanted = (sequence.tokens.len() - cached).min(step.budget);
            if !self.cache.fits(&sequence.table, &hits, sequence.tokens.len()) {
                break;
            }
            // Whether or not they are encoded in this step: what the receiver cache gave must be what it was sent.
            sequence.media.iter().try_for_each(|media| step.check(media.item.as_ref()))?;
            let Some(tokens) = encode(&mut self.encoder, sequence, cached, wanted, step)? else {
                self.contradicting.push(sequence.id.clone());
                break;
            };
            if !self.cache.grow(&mut sequence.table, &hits, cached + tokens) {
                break;
            }
            let Some(mut sequence) = self.waiting.pop_front() else {
                break;
            };
            self.cache.store(&mut sequence.table, &sequence.chain, &sequence.tokens, cached + tokens);
            sequence.note_prefill(cached);
            sequence.record(Moment::Scheduled, now);
            sequence.computed = cached;
            self.note_lookup(&sequence, cached);
            step.take(&mut sequence, tokens);
            self.running.push(sequence);
        }
        Ok(())
    }

    fn note_lookup(&mut self, sequence: &Sequence, hits: usize) {
        if !sequence.reads_prefix_cache() {
            return;
        }
        let stats = &mut self.lookups;
        let (requests, queries, found) = match sequence.preempted {
            true => (&mut stats.preempted_requests, &mut stats.preempted_queries, &mut stats.preempted_hits),
            false => (&mut stats.requests, &mut stats.queries, &mut stats.hits),
        };
        *requests += 1;
        *queries += sequence.tokens.len() as u64;
        *found += hits as u64;
    }

    /// Ends the step: each request whose tokens are all computed gets a new one.
    pub(crate) fn update(&mut self, now: f64) -> Vec<ClientOutputs> {
        let mut outputs = StepOutputs::new(u32::from(self.config.rank), now);
        let mut still_running = Vec::with_capacity(self.running.len());
        for mut sequence in std::mem::take(&mut self.running) {
            sequence.computed += std::mem::take(&mut sequence.scheduled);
            let mut ended = false;
            if sequence.computed == sequence.tokens.len() {
                let output = self.sample(&mut sequence);
                ended = output.finish_reason.is_some();
                outputs.push(sequence.client, output);
            }
            if ended {
                self.end(sequence);
            } else {
                still_running.push(sequence);
            }
        }
        self.running = still_running;
        self.fail_contradicting(&mut outputs);
        outputs.finish(self.take_stats())
    }

    fn sample(&self, sequence: &mut Sequence) -> EngineCoreOutput {
        let config = &self.config;
        let sampled = sequence.sample(config);
        let prefill_stats = sequence.take_prefill(config.block_size.get());
        // vLLM gives no part of a prompt's log probabilities before the first token.
        let asked = sequence.params.prompt_logprobs.filter(|_| prefill_stats.is_some());
        EngineCoreOutput {
            request_id: sequence.id.clone(),
            new_token_ids: vec![sampled.token],
            new_logprobs: sequence.params.logprobs.map(|top| logprobs::of(&[sampled.token], top, config.vocab_size)),
            prompt_logprobs: asked
                .map(|top| logprobs::of(&sequence.tokens[1..sequence.prompt], top, config.vocab_size)),
            finish_reason: sampled.finish,
            stop_reason: sampled.stop_reason,
            events: sequence.take_events(),
            prefill_stats,
            ..EngineCoreOutput::default()
        }
    }

    fn fail_contradicting(&mut self, outputs: &mut StepOutputs) {
        for id in std::mem::take(&mut self.contradicting) {
            let Some(sequence) = self.take(&id) else {
                continue;
            };
            let client = sequence.client;
            self.end(sequence);
            let output = EngineCoreOutput {
                request_id: id,
                finish_reason: Some(FinishReason::Error),
                ..EngineCoreOutput::default()
            };
            outputs.push(client, output);
        }
    }

    fn take_stats(&mut self) -> SchedulerStats {
        let stages = ["waiting_to_start", "in_progress", "completed_waiting"];
        SchedulerStats {
            num_running_reqs: self.running.len() as u64,
            num_waiting_reqs: self.waiting.len() as u64,
            num_kv_fetch_reqs_by_stage: stages.map(|stage| (stage.to_owned(), 0)).into(),
            kv_cache_usage: self.cache.usage(),
            prefix_cache_stats: std::mem::take(&mut self.lookups),
            ..SchedulerStats::default()
        }
    }

    /// What happened in the KV cache since the last call.
    pub(crate) fn take_kv_events(&mut self) -> Vec<KvEvent> {
        self.cache.take_events()
    }

    /// Empties the prefix cache; with `preempt`, running requests start over. False while requests hold blocks.
    pub(crate) fn reset_prefix_cache(&mut self, preempt: bool, now: f64) -> bool {
        while preempt && !self.running.is_empty() {
            self.preempt_last(now);
        }
        let emptied = self.cache.reset();
        self.lookups.reset |= emptied;
        emptied
    }

    pub(crate) fn reset_encoder_cache(&mut self) {
        self.encoder.clear();
    }
}

/// What is left and what was taken of the step that is being scheduled.
struct Step {
    budget: usize,
    work: StepWork,
    checked: CheckedSlots,
}

impl Step {
    /// Looks whether an item is still what it was lent as.
    fn check(&mut self, item: Option<&Item>) -> Result<(), Fatal> {
        let slots = item.into_iter().flat_map(Item::slots);
        self.checked.check(slots).map_err(|overwritten| Fatal(overwritten.to_string()))
    }

    fn take(&mut self, sequence: &mut Sequence, tokens: usize) {
        sequence.scheduled = tokens;
        self.budget -= tokens;
        match sequence.generated() > 0 && tokens == 1 {
            true => self.work.decodes += 1,
            false => self.work.prefill_tokens += tokens,
        }
    }
}

/// Encodes the images among the `tokens` tokens from `start` that are not encoded yet. Returns the tokens, or `None`
/// if an image contradicts the one that its identifier stood for before.
///
/// # Errors
/// The image's slot was written to.
fn encode(
    cache: &mut EncoderCache<String>,
    sequence: &Sequence,
    start: usize,
    tokens: usize,
    step: &mut Step,
) -> Result<Option<usize>, Fatal> {
    for media in &sequence.media {
        let position = &media.placeholder;
        if position.offset < start + tokens && start < position.offset + position.length {
            match cache.encode(media.identifier.as_str(), crate::image::embedding_tokens(position) as u64) {
                Encoded::Before => {}
                Encoded::Now => {
                    step.check(media.item.as_ref())?;
                    step.work.images += 1;
                }
                Encoded::Mismatch => return Ok(None),
            }
        }
    }
    Ok(Some(tokens))
}

#[cfg(test)]
mod tests;
