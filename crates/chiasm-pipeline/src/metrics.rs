//! Metrics of requests on their way through the pipeline, for Prometheus.

mod buckets;
mod found;
mod kinds;
mod latency;
mod media;
mod objectives;
mod roles;
mod workers;

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use chiasm_backend::{Delivered, Finish};
use chiasm_fleet::WorkerLabel;
use chiasm_request::{PrefillOutcome, RouteOutcome};
use chiasm_router::{Knowledge, Reservation, WorkerSnapshot};
use chiasm_types::WorkerId;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

pub use self::found::{Found, PromptTokens};
pub use self::kinds::{Retry, Stage};
pub use self::latency::{LatencyCounts, LatencyHistogram};
use self::media::MediaMetrics;
pub use self::media::{MediaState, by_source};
use self::objectives::ObjectiveMetrics;
pub use self::objectives::Objectives;
use self::roles::RoleMetrics;
use self::workers::WorkerSums;
use crate::cpu::CpuMetrics;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OverlapErrorLabels {
    /// The side on which the prediction was wrong.
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

/// The label of a family that has vLLM's name, too.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct FinishedLabel {
    /// vLLM's word for the reason.
    pub finished_reason: &'static str,
}

/// The metrics of one pipeline.
pub struct PipelineMetrics {
    routed: Family<WorkerLabel, Counter>,
    prompt_blocks: Counter,
    overlap_blocks: Counter,
    overlap_error: Family<OverlapErrorLabels, Counter>,
    finished_choices: Family<FinishedLabel, Counter>,
    /// Media items decoded and processed.
    pub media_decoded: Counter,
    /// Media items whose tensors another request or engine had been given.
    pub media_reused: Counter,
    retries: Family<CauseLabel, Counter>,
    /// Times from requests' arrivals to their first tokens.
    pub time_to_first_token: LatencyHistogram,
    /// Times between two tokens of an answer.
    pub inter_token_latency: LatencyHistogram,
    stages: Family<StageLabel, Histogram, fn() -> Histogram>,
    /// Set once, before requests come.
    objectives: OnceLock<ObjectiveMetrics>,
    no_objectives: ObjectiveMetrics,
    found: Mutex<Found>,
    worker_sums: WorkerSums,
    media: MediaMetrics,
    roles: RoleMetrics,
    /// The waiting times for the CPU pool.
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
            found: Mutex::default(),
            worker_sums: WorkerSums::default(),
            media: MediaMetrics::default(),
            roles: RoleMetrics::default(),
            cpu: CpuMetrics::default(),
        };
        metrics.begin_at_zero();
        metrics
    }
}

impl PipelineMetrics {
    /// Registers all of them.
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
            "Blocks by which the overlap was predicted too high or too low, against what the engine found in its cache; \
             requests that run side by side can make it too low",
            self.overlap_error.clone(),
        );
        r.register(
            "finished_choices",
            "Continuations that ran to their end: stop (an end token, a stop string, calls), length, or repetition",
            self.finished_choices.clone(),
        );
        r.register(
            "media_decoded",
            "Media items decoded and processed",
            self.media_decoded.clone(),
        );
        r.register(
            "media_reused",
            "Media items sent to an engine whose tensors had been made for another request or engine",
            self.media_reused.clone(),
        );
        r.register(
            "retries",
            "Requests that lost their workers before a token was sent: tried again as the worker never had them (not_taken) or \
             died or hung with them (lost), begun on another one too as theirs says nothing (suspect), or given up as the prompt did so too often (quarantined) or too many move (over_budget)",
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
            "Between two tokens of an answer after the first",
            Unit::Seconds,
            self.inter_token_latency.clone(),
        );
        r.register_with_unit(
            "request_stage",
            "Parts of a request: fetch (media bytes), plan (template, tokens, media plans, block keys), process (an item's tensors, \
             waiting for a thread included), hand_off (until the engine has the request), queue (in the engine), prefill (from \
             routing to the first token)",
            Unit::Seconds,
            self.stages.clone(),
        );
        self.no_objectives.register(r);
        self.worker_sums.register(r);
        self.media.register(r);
        self.roles.register(r);
        self.cpu.register(r);
    }

    /// Makes the series whose labels are known exist from the start: Prometheus sees no increase in
    /// a series that appears with its first event, so an alert would miss the first failure.
    fn begin_at_zero(&self) {
        for retry in Retry::ALL {
            drop(self.retries.get_or_create(&CauseLabel { cause: retry.name() }));
        }
        for stage in Stage::ALL {
            drop(self.stages.get_or_create(&StageLabel { stage: stage.name() }));
        }
        for finish in [Finish::Eos, Finish::Length, Finish::Repetition] {
            drop(self.finished_choices.get_or_create(&finished(&finish)));
        }
    }

    /// Sets the gauges to the present state. The router has these workers, and `present` can take
    /// requests.
    pub(super) fn refresh(
        &self,
        media: &MediaState,
        workers: &[WorkerSnapshot],
        present: &[WorkerId],
    ) {
        self.media.refresh(media);
        self.worker_sums.refresh(workers, &self.found(workers));
        for worker in present {
            // A worker's counts begin with the worker.
            drop(self.routed.get_or_create(&(*worker).into()));
        }
    }

    /// Forgets the counts of a worker that was let go for good.
    pub(super) fn forget(&self, worker: WorkerId) {
        self.routed.remove(&worker.into());
        self.roles.forget(worker);
    }

    /// A request was sent to a worker.
    pub fn routed(&self, attempted: &RouteOutcome) {
        self.routed.get_or_create(&attempted.worker.into()).inc();
        self.prompt_blocks.inc_by(attempted.total_blocks as u64);
        self.overlap_blocks.inc_by(attempted.overlap_blocks as u64);
    }

    /// A worker was asked to encode so many media items for others and has left the embeddings of
    /// so many, after this time.
    pub fn encoded(&self, worker: WorkerId, asked: usize, left: usize, took: Duration) {
        self.roles.encoded(worker, asked, left, took);
    }

    /// A worker has computed a prompt for another one that answers.
    pub fn prefilled(&self, by: &PrefillOutcome) {
        self.roles.prefilled(by);
    }

    /// A prompt was computed again by the worker that answers.
    pub fn recomputed(&self) {
        self.roles.recomputed();
    }

    /// An engine found so many leading tokens of a prompt in its cache, where so many blocks were
    /// predicted.
    pub fn prompt_found(
        &self,
        reservation: &Reservation,
        predicted: usize,
        prompt_tokens: usize,
        cached_tokens: usize,
    ) {
        let block_size = reservation.block_size.get();
        // The engine computes the last token of a prompt in any case.
        let most = prompt_tokens.saturating_sub(1) / block_size;
        self.overlap_found(predicted.min(most), cached_tokens / block_size, reservation.knowledge);
    }

    /// An engine found so many leading blocks in its cache that were predicted to be `predicted`.
    pub fn overlap_found(&self, predicted: usize, found: usize, knowledge: Knowledge) {
        let state = knowledge.name();
        let label = |too| OverlapErrorLabels { too, state };
        // Both exist from the first request on.
        self.overlap_error
            .get_or_create(&label("high"))
            .inc_by(predicted.saturating_sub(found) as u64);
        self.overlap_error
            .get_or_create(&label("low"))
            .inc_by(found.saturating_sub(predicted) as u64);
    }

    /// A request has its first token, so long after routing.
    pub fn first_token(&self, attempted: &RouteOutcome, prefill: Duration) {
        let RouteOutcome { took, hand_off, first_token, prefill: found, delivered, .. } = attempted;
        if let Some(after) = first_token {
            self.time_to_first_token.observe(*after);
            self.objectives().first_token(*after);
        }
        if *delivered != Delivered::default() {
            self.stage(Stage::Fetch, took.fetch);
        }
        self.found_mut().add(attempted);
        self.stage(Stage::Plan, took.plan);
        self.stage(Stage::HandOff, *hand_off);
        self.stage(Stage::Prefill, prefill);
        if let Some(queued) = found.queued {
            self.stage(Stage::Queue, queued);
        }
    }

    /// A part of a request took so long.
    pub fn stage(&self, stage: Stage, took: Duration) {
        self.stages.get_or_create(&StageLabel { stage: stage.name() }).observe(took.as_secs_f64());
    }

    /// Returns the counts of continuations that ran to their end, by vLLM's word for the reason.
    pub fn finished_choices(&self) -> Family<FinishedLabel, Counter> {
        self.finished_choices.clone()
    }

    /// Returns the waiting times of requests in engines.
    pub fn queue_time(&self) -> Histogram {
        self.stages.get_or_create(&StageLabel { stage: Stage::Queue.name() }).clone()
    }

    /// So many tokens each came so long after the one before it.
    pub fn between_tokens(&self, gap: Duration, tokens: usize) {
        self.inter_token_latency.observe_each(gap, tokens as u64);
        self.objectives().between_tokens(gap, tokens as u64);
    }

    /// A request lost its worker.
    pub fn retried(&self, retry: Retry) {
        self.retries.get_or_create(&CauseLabel { cause: retry.name() }).inc();
    }

    /// Counts the cached tokens of a prompt that became known after the first token.
    pub fn found_later(&self, attempted: &RouteOutcome) {
        self.found_mut().add_later(attempted);
    }

    /// The first bytes of an answer that is passed on have come, so long after its request.
    pub fn answer_began(&self, after: Duration) {
        self.time_to_first_token.observe(after);
        self.objectives().first_token(after);
    }

    /// Returns how often requests were retried for this reason.
    #[cfg(test)]
    pub fn retries(&self, retry: Retry) -> u64 {
        self.retries.get_or_create(&CauseLabel { cause: retry.name() }).get()
    }

    /// Returns the number of continuations that ended so.
    #[cfg(test)]
    pub fn finishes(&self, finish: &Finish) -> u64 {
        self.finished_choices.get_or_create(&finished(finish)).get()
    }

    /// A continuation ran to its end.
    pub fn finished(&self, finish: &Finish) {
        self.finished_choices.get_or_create(&finished(finish)).inc();
    }

    /// Counts from now on what meets these objectives. Has an effect once.
    pub fn set_objectives(&self, objectives: Objectives) {
        let _ = self.objectives.set(self.no_objectives.of(objectives));
    }

    fn objectives(&self) -> &ObjectiveMetrics {
        self.objectives.get().unwrap_or(&self.no_objectives)
    }

    /// Returns the cached tokens of the present workers.
    pub fn found(&self, workers: &[WorkerSnapshot]) -> Found {
        let mut found = self.found_mut();
        found.keep(workers);
        found.clone()
    }

    /// Returns the cached tokens of all engines that there ever were.
    pub fn found_in_all(&self) -> PromptTokens {
        self.found_mut().total
    }

    fn found_mut(&self) -> MutexGuard<'_, Found> {
        // Counts: a panic elsewhere can at worst have left one wrong.
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The reason by vLLM's names of them (`FINISH_REASON_STRINGS` in `v1/engine/__init__.py`): those
/// of ends that aren't failures.
fn finished(finish: &Finish) -> FinishedLabel {
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
    fn departed_worker_leaves_no_series() {
        let metrics = PipelineMetrics::default();
        let worker = WorkerId(7);
        metrics.routed.get_or_create(&worker.into()).inc();
        metrics.encoded(worker, 2, 1, Duration::from_secs(1));
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
