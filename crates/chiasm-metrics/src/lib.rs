//! Metrics of requests in the pipeline, for Prometheus.
//!
//! | module | is |
//! |---|---|
//! | `latency` | histograms of times that also give quantiles |
//! | `buckets` | the bounds of histograms' buckets |
//! | `cache_stats` | sums of cached tokens and latencies |
//! | `media` | media items by source, and the memory of caches |
//! | `objectives` | service-level objectives |
//! | `roles` | requests whose stages are computed by several workers |
//! | `workers` | sums over the requests of each worker |
//! | `kinds` | values of labels |
#![forbid(unsafe_code)]

mod buckets;
mod cache_stats;
mod kinds;
mod latency;
mod media;
mod objectives;
mod roles;
mod workers;

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use chiasm_backend::{Finish, MediaDelivery};
use chiasm_fleet::WorkerLabel;
use chiasm_request::{PrefillOutcome, RouteOutcome};
use chiasm_router::{Knowledge, Reservation, WorkerSnapshot};
use chiasm_types::WorkerId;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

pub use self::cache_stats::{CacheStats, PromptTokens};
pub use self::kinds::{Retry, Stage};
pub use self::latency::{LatencyCounts, LatencyHistogram};
use self::media::MediaMetrics;
pub use self::media::{MediaState, by_source};
use self::objectives::ObjectiveMetrics;
pub use self::objectives::Objectives;
use self::roles::RoleMetrics;
use self::workers::WorkerSums;
use chiasm_cpu::CpuMetrics;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OverlapErrorLabels {
    /// The direction of the prediction's error: `high` or `low`.
    too: &'static str,
    state: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CauseLabel {
    cause: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StageLabel {
    stage: &'static str,
}

/// The label of a family that also exists under vLLM's name.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct FinishedLabel {
    /// vLLM's name of the reason.
    pub finished_reason: &'static str,
}

/// The metrics of one pipeline.
pub struct PipelineMetrics {
    routed: Family<WorkerLabel, Counter>,
    prompt_blocks: Counter,
    overlap_blocks: Counter,
    overlap_error: Family<OverlapErrorLabels, Counter>,
    finished_choices: Family<FinishedLabel, Counter>,
    /// The media items that were decoded and processed.
    pub media_decoded: Counter,
    /// The media items whose tensors had been made for another request or engine.
    pub media_reused: Counter,
    retries: Family<CauseLabel, Counter>,
    /// The times from requests' arrivals to their first tokens.
    pub time_to_first_token: LatencyHistogram,
    /// The times between two tokens of an answer.
    pub inter_token_latency: LatencyHistogram,
    stages: Family<StageLabel, Histogram, fn() -> Histogram>,
    /// The objectives, which are set once, before the first request.
    objectives: OnceLock<ObjectiveMetrics>,
    no_objectives: ObjectiveMetrics,
    cache_stats: Mutex<CacheStats>,
    worker_sums: WorkerSums,
    media: MediaMetrics,
    roles: RoleMetrics,
    /// The times that work waits for the CPU pool.
    pub cpu: CpuMetrics,
}

impl Default for PipelineMetrics {
    fn default() -> Self {
        let metrics = Self {
            routed: Family::default(),
            prompt_blocks: Counter::default(),
            overlap_blocks: Counter::default(),
            overlap_error: Family::default(),
            finished_choices: Family::default(),
            media_decoded: Counter::default(),
            media_reused: Counter::default(),
            retries: Family::default(),
            time_to_first_token: LatencyHistogram::new(&buckets::FIRST_TOKEN),
            inter_token_latency: LatencyHistogram::new(&buckets::BETWEEN_TOKENS),
            // 0.1 ms to 3 min
            stages: Family::new_with_constructor(|| {
                Histogram::new(exponential_buckets(0.0001, 2.0, 21))
            }),
            objectives: OnceLock::new(),
            no_objectives: ObjectiveMetrics::default(),
            cache_stats: Mutex::default(),
            worker_sums: WorkerSums::default(),
            media: MediaMetrics::default(),
            roles: RoleMetrics::default(),
            cpu: CpuMetrics::default(),
        };
        metrics.create_series();
        metrics
    }
}

impl PipelineMetrics {
    /// Registers all metrics.
    pub fn register(&self, r: &mut Registry) {
        r.register("routed_requests", "Requests sent to each worker", self.routed.clone());
        r.register("prompt_blocks", "Full blocks of routed prompts", self.prompt_blocks.clone());
        r.register(
            "overlap_blocks",
            "Blocks that the chosen worker already held",
            self.overlap_blocks.clone(),
        );
        r.register(
            "overlap_error_blocks",
            "Blocks by which the overlap was predicted too high or too low, \
             against what the engine found in its cache; \
             requests that run side by side can make it too low",
            self.overlap_error.clone(),
        );
        r.register(
            "finished_choices",
            "Continuations that ran to their end: \
             stop (an end token, a stop string, calls), length, or repetition",
            self.finished_choices.clone(),
        );
        r.register(
            "media_decoded",
            "Media items decoded and processed",
            self.media_decoded.clone(),
        );
        r.register(
            "media_reused",
            "Media items sent to an engine \
             whose tensors had been made for another request or engine",
            self.media_reused.clone(),
        );
        r.register(
            "retries",
            "Requests that lost their workers before the first token: \
             tried again because the worker never had them (not_taken) or \
             died or hung with them (lost), \
             also begun on another worker because theirs is silent (suspect), \
             or failed because too many workers died with the prompt (quarantined) \
             or too many requests move (over_budget)",
            self.retries.clone(),
        );
        r.register_with_unit(
            "time_to_first_token",
            "From a request's arrival to its first token",
            Unit::Seconds,
            self.time_to_first_token.clone(),
        );
        r.register_with_unit(
            "inter_token_latency",
            "Time between two tokens of an answer",
            Unit::Seconds,
            self.inter_token_latency.clone(),
        );
        r.register_with_unit(
            "request_stage",
            "Parts of a request: fetch (media bytes), \
             plan (template, tokens, media plans, block keys), \
             process (an item's tensors, waiting for a thread included), \
             hand_off (until the engine has the request), queue (in the engine), \
             prefill (from routing to the first token)",
            Unit::Seconds,
            self.stages.clone(),
        );
        self.no_objectives.register(r);
        self.worker_sums.register(r);
        self.media.register(r);
        self.roles.register(r);
        self.cpu.register(r);
    }

    /// Creates all series whose labels are known. Prometheus sees no increase in a series that
    /// appears with its first event, so an alert would miss the first failure.
    fn create_series(&self) {
        for retry in Retry::ALL {
            drop(self.retries.get_or_create(&CauseLabel { cause: retry.name() }));
        }
        self.media.create_series();
        for stage in Stage::ALL {
            drop(self.stages.get_or_create(&StageLabel { stage: stage.name() }));
        }
        for finish in [Finish::Eos, Finish::Length, Finish::Repetition] {
            drop(self.finished_choices.get_or_create(&finished_label(&finish)));
        }
    }

    /// Updates the gauges. `workers` is the router's snapshot, and `present` has the workers that
    /// can take requests.
    pub fn refresh(&self, media: &MediaState, workers: &[WorkerSnapshot], present: &[WorkerId]) {
        self.media.refresh(media);
        self.worker_sums.refresh(workers, &self.cache_stats(workers));
        for worker in present {
            // Creates the counter together with its worker.
            drop(self.routed.get_or_create(&(*worker).into()));
        }
    }

    /// Removes the series of a worker that was removed for good.
    pub fn forget(&self, worker: WorkerId) {
        self.routed.remove(&worker.into());
        self.roles.forget(worker);
    }

    /// Counts a request that was sent to a worker.
    pub fn count_routed(&self, route: &RouteOutcome) {
        self.routed.get_or_create(&route.worker.into()).inc();
        self.prompt_blocks.inc_by(route.total_blocks as u64);
        self.overlap_blocks.inc_by(route.overlap_blocks as u64);
    }

    /// Counts an encode stage: of `requested` items, the worker stored the embeddings of `stored`.
    pub fn count_encoded(&self, worker: WorkerId, requested: usize, stored: usize, took: Duration) {
        self.roles.count_encoded(worker, requested, stored, took);
    }

    /// Counts a prompt that a worker has computed for another worker.
    pub fn count_prefilled(&self, outcome: &PrefillOutcome) {
        self.roles.count_prefilled(outcome);
    }

    /// Counts a prompt that the answering worker computed again.
    pub fn count_recomputed(&self) {
        self.roles.count_recomputed();
    }

    /// Counts the error of a predicted overlap in blocks, given the tokens that the engine found in
    /// its cache.
    pub fn count_prompt_overlap_error(
        &self,
        reservation: &Reservation,
        predicted: usize,
        prompt_tokens: usize,
        cached_tokens: usize,
    ) {
        let block_size = reservation.block_size.get();
        // An engine always computes the last token of a prompt.
        let max_blocks = prompt_tokens.saturating_sub(1) / block_size;
        let predicted = predicted.min(max_blocks);
        self.count_overlap_error(predicted, cached_tokens / block_size, reservation.knowledge);
    }

    /// Counts the error of a predicted overlap, in blocks. `found` is the overlap that the engine
    /// had.
    pub fn count_overlap_error(&self, predicted: usize, found: usize, knowledge: Knowledge) {
        let state = knowledge.name();
        let label = |too| OverlapErrorLabels { too, state };
        // Creates both series with the first request.
        self.overlap_error
            .get_or_create(&label("high"))
            .inc_by(predicted.saturating_sub(found) as u64);
        self.overlap_error
            .get_or_create(&label("low"))
            .inc_by(found.saturating_sub(predicted) as u64);
    }

    /// Counts the first token of a request. `prefill` is the time since the request was routed.
    pub fn count_first_token(&self, route: &RouteOutcome, prefill: Duration) {
        let RouteOutcome { stage_times, hand_off, first_token, prefill: stats, delivered, .. } =
            route;
        if let Some(after) = first_token {
            self.time_to_first_token.observe(*after);
            self.objectives().count_first_token(*after);
        }
        if *delivered != MediaDelivery::default() {
            self.observe_stage(Stage::Fetch, stage_times.fetch);
        }
        self.lock_cache_stats().add(route);
        self.observe_stage(Stage::Plan, stage_times.plan);
        self.observe_stage(Stage::HandOff, *hand_off);
        self.observe_stage(Stage::Prefill, prefill);
        if let Some(queued) = stats.queued {
            self.observe_stage(Stage::Queue, queued);
        }
    }

    /// Counts the time of one stage of a request.
    pub fn observe_stage(&self, stage: Stage, took: Duration) {
        self.stages.get_or_create(&StageLabel { stage: stage.name() }).observe(took.as_secs_f64());
    }

    /// Returns the counts of finished continuations, by vLLM's name of the reason.
    pub fn finished_choices(&self) -> Family<FinishedLabel, Counter> {
        self.finished_choices.clone()
    }

    /// Returns the histogram of waiting times in engines.
    pub fn queue_time(&self) -> Histogram {
        self.stages.get_or_create(&StageLabel { stage: Stage::Queue.name() }).clone()
    }

    /// Counts `tokens` tokens, each of which came `gap` after its predecessor.
    pub fn observe_gap(&self, gap: Duration, tokens: usize) {
        self.inter_token_latency.observe_each(gap, tokens as u64);
        self.objectives().count_gaps(gap, tokens as u64);
    }

    /// Counts the videos of a request that were planned without decoding.
    pub fn count_planned_videos(&self, videos: usize) {
        self.media.count_planned_videos(videos);
    }

    /// Counts videos that went to vLLM's own processor as whole files.
    pub fn count_whole_videos(&self, cause: &'static str, videos: usize) {
        self.media.count_whole_videos(cause, videos);
    }

    /// Counts a request that was planned again, because a media item differed from its plan.
    pub fn count_replanned(&self) {
        self.media.count_replanned();
    }

    /// Returns the number of times that a request was planned again.
    #[cfg(feature = "test-support")]
    pub fn replanned(&self) -> u64 {
        self.media.replanned()
    }

    /// Counts a recording whose tokens were read from its header.
    pub fn count_planned_recording(&self) {
        self.media.count_planned_recording();
    }

    /// Counts a recording that vLLM's own processor made before its request was routed.
    pub fn count_whole_recording(&self, cause: &'static str) {
        self.media.count_whole_recording(cause);
    }

    /// Returns the number of recordings that were planned.
    #[cfg(feature = "test-support")]
    pub fn planned_recordings(&self) -> u64 {
        self.media.planned_recordings()
    }

    /// Returns the number of recordings that were made before their requests were routed.
    #[cfg(feature = "test-support")]
    pub fn whole_recordings(&self, cause: &'static str) -> u64 {
        self.media.whole_recordings(cause)
    }

    /// Returns the number of videos that went to vLLM's own processor for a cause.
    #[cfg(feature = "test-support")]
    pub fn whole_videos(&self, cause: &'static str) -> u64 {
        self.media.whole_videos(cause)
    }

    /// Counts a request that lost its worker.
    pub fn count_retry(&self, retry: Retry) {
        self.retries.get_or_create(&CauseLabel { cause: retry.name() }).inc();
    }

    /// Counts the cached tokens of a prompt that were reported after the first token.
    pub fn count_late_prefill(&self, route: &RouteOutcome) {
        self.lock_cache_stats().add_late_prefill(route);
    }

    /// Counts a forwarded answer, whose first content came `after` the request's arrival.
    pub fn count_first_content(&self, after: Duration) {
        self.time_to_first_token.observe(after);
        self.objectives().count_first_token(after);
    }

    /// Returns the number of retries for this reason.
    #[cfg(feature = "test-support")]
    pub fn retries(&self, retry: Retry) -> u64 {
        self.retries.get_or_create(&CauseLabel { cause: retry.name() }).get()
    }

    /// Returns the number of continuations with this finish reason.
    #[cfg(feature = "test-support")]
    pub fn finishes(&self, finish: &Finish) -> u64 {
        self.finished_choices.get_or_create(&finished_label(finish)).get()
    }

    /// Counts a finished continuation.
    pub fn count_finished(&self, finish: &Finish) {
        self.finished_choices.get_or_create(&finished_label(finish)).inc();
    }

    /// Sets the objectives. Only the first call has an effect.
    pub fn set_objectives(&self, objectives: Objectives) {
        let _ = self.objectives.set(self.no_objectives.with_objectives(objectives));
    }

    fn objectives(&self) -> &ObjectiveMetrics {
        self.objectives.get().unwrap_or(&self.no_objectives)
    }

    /// Returns the cache statistics, and forgets all workers except `workers`.
    pub fn cache_stats(&self, workers: &[WorkerSnapshot]) -> CacheStats {
        let mut stats = self.lock_cache_stats();
        stats.retain(workers);
        stats.clone()
    }

    /// Returns the prompt tokens of all workers, including removed ones.
    pub fn total_prompt_tokens(&self) -> PromptTokens {
        self.lock_cache_stats().total
    }

    /// Locks the statistics, ignoring poison: a panic elsewhere leaves at worst one wrong count.
    fn lock_cache_stats(&self) -> MutexGuard<'_, CacheStats> {
        self.cache_stats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns vLLM's label of a finish reason (`FINISH_REASON_STRINGS` in `v1/engine/__init__.py`),
/// for ends that are not failures.
fn finished_label(finish: &Finish) -> FinishedLabel {
    let finished_reason = match finish {
        Finish::Eos | Finish::StopToken(_) | Finish::StopString(_) | Finish::ToolCalls => "stop",
        Finish::Length => "length",
        Finish::Repetition => "repetition",
    };
    FinishedLabel { finished_reason }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode_registry;

    use super::*;

    #[test]
    fn removed_worker_has_no_series() {
        let metrics = PipelineMetrics::default();
        let worker = WorkerId(7);
        metrics.routed.get_or_create(&worker.into()).inc();
        metrics.count_encoded(worker, 2, 1, Duration::from_secs(1));
        let has_series = || {
            let mut registry = Registry::default();
            metrics.register(&mut registry);
            let mut text = String::new();
            encode_registry(&mut text, &registry).unwrap();
            text.contains("worker=\"worker_7\"")
        };
        assert!(has_series());
        metrics.forget(worker);
        assert!(!has_series());
    }
}
