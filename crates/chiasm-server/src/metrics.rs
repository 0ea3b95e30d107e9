//! Counters and histograms for Prometheus, at `/metrics`.

mod buckets;
mod fleet;
mod found;
mod kinds;
mod labels;
mod latency;
mod media;
mod objectives;
mod roles;
mod vllm_names;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use chiasm_backend::{Delivered, Finish, Transfer};
use chiasm_otlp::ExportCounts;
use chiasm_router::{Knowledge, Reservation, WorkerSnapshot};
use chiasm_types::WorkerId;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use self::fleet::FleetMetrics;
pub(crate) use self::found::{Found, PromptTokens};
pub(crate) use self::kinds::{Retry, Stage, StreamEnd};
use self::labels::{
    CauseLabel, EndpointLabel, FinishedLabel, FormLabel, HowLabel, OutcomeLabel, OverlapErrorLabels, RefusalLabels,
    RequestLabels, StageLabel, TransferLabel, WorkerLabel,
};
pub(crate) use self::latency::{LatencyCounts, LatencyHistogram};
use self::objectives::ObjectiveMetrics;
pub use self::objectives::Objectives;
use self::roles::RoleMetrics;
use crate::connections::ConnectionMetrics;
use crate::cpu::CpuMetrics;
use crate::door_metrics::DoorMetrics;
use crate::frontend::{Frontend, LogCounts};
use crate::openai::Usage;
use crate::pipeline::{Attempted, PrefilledBy};
use crate::process_metrics::ProcessMetrics;
use crate::traces::Traces;

/// All metrics of one frontend.
pub struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    routed: Family<WorkerLabel, Counter>,
    prompt_blocks: Counter,
    overlap_blocks: Counter,
    overlap_error: Family<OverlapErrorLabels, Counter>,
    busy: Counter,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    completion_tokens: Counter,
    finished_choices: Family<FinishedLabel, Counter>,
    transfers: Family<TransferLabel, Counter>,
    step_downs: Family<CauseLabel, Counter>,
    media_sent: Family<FormLabel, Counter>,
    media_sent_bytes: Counter,
    media_lent_bytes: Counter,
    log_lines_dropped: Family<CauseLabel, Counter>,
    panics: Counter,
    spans: Family<OutcomeLabel, Counter>,
    /// Media items decoded and processed.
    pub(crate) media_decoded: Counter,
    /// Media items whose tensors another request or engine had been given.
    pub(crate) media_reused: Counter,
    /// Media items that engines did not hold although they were believed to.
    mm_cache_misses: Counter,
    retries: Family<CauseLabel, Counter>,
    engine_deaths: Family<WorkerLabel, Counter>,
    distrusted: Family<WorkerLabel, Counter>,
    pub(crate) time_to_first_token: LatencyHistogram,
    pub(crate) inter_token_latency: LatencyHistogram,
    request_duration: Family<EndpointLabel, Histogram, fn() -> Histogram>,
    stages: Family<StageLabel, Histogram, fn() -> Histogram>,
    stream_ends: Family<HowLabel, Counter>,
    refusals: Family<RefusalLabels, Counter>,
    in_flight: Gauge,
    /// Set once, before requests come.
    objectives: OnceLock<ObjectiveMetrics>,
    no_objectives: ObjectiveMetrics,
    found: Mutex<Found>,
    fleet: FleetMetrics,
    door: DoorMetrics,
    roles: RoleMetrics,
    pub(crate) connections: ConnectionMetrics,
    slots: Gauge,
    /// The waiting times for the CPU pool.
    pub(crate) cpu: CpuMetrics,
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self {
            registry: Registry::with_prefix("chiasm"),
            requests: Family::default(),
            routed: Family::default(),
            prompt_blocks: Counter::default(),
            overlap_blocks: Counter::default(),
            overlap_error: Family::default(),
            busy: Counter::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            completion_tokens: Counter::default(),
            finished_choices: Family::default(),
            transfers: Family::default(),
            step_downs: Family::default(),
            media_sent: Family::default(),
            media_sent_bytes: Counter::default(),
            media_lent_bytes: Counter::default(),
            log_lines_dropped: Family::default(),
            panics: Counter::default(),
            spans: Family::default(),
            media_decoded: Counter::default(),
            media_reused: Counter::default(),
            mm_cache_misses: Counter::default(),
            retries: Family::default(),
            engine_deaths: Family::default(),
            distrusted: Family::default(),
            time_to_first_token: LatencyHistogram::new(&buckets::FIRST_TOKEN),
            inter_token_latency: LatencyHistogram::new(&buckets::BETWEEN_TOKENS),
            request_duration: Family::new_with_constructor(|| Histogram::new(buckets::WHOLE_REQUEST)),
            // 0.1 ms to 3 min
            stages: Family::new_with_constructor(|| Histogram::new(exponential_buckets(0.0001, 2.0, 21))),
            stream_ends: Family::default(),
            refusals: Family::default(),
            in_flight: Gauge::default(),
            objectives: OnceLock::new(),
            no_objectives: ObjectiveMetrics::default(),
            found: Mutex::default(),
            fleet: FleetMetrics::default(),
            door: DoorMetrics::default(),
            roles: RoleMetrics::default(),
            connections: ConnectionMetrics::default(),
            slots: Gauge::default(),
            cpu: CpuMetrics::default(),
        };
        metrics.registered()
    }
}

impl Metrics {
    fn registered(mut self) -> Self {
        let r = &mut self.registry;
        r.register("requests", "Requests answered, by endpoint and status", self.requests.clone());
        r.register("routed_requests", "Requests sent to each worker", self.routed.clone());
        r.register("prompt_blocks", "Full blocks of routed prompts", self.prompt_blocks.clone());
        r.register("overlap_blocks", "Blocks that the chosen worker already held", self.overlap_blocks.clone());
        r.register(
            "overlap_error_blocks",
            "Blocks by which the overlap was predicted too high or too low, against what the engine found in its cache; \
             requests that run side by side can make it too low",
            self.overlap_error.clone(),
        );
        r.register("busy_refusals", "Requests refused because all workers were busy", self.busy.clone());
        r.register("prompt_tokens", "Tokens of expanded prompts", self.prompt_tokens.clone());
        r.register("cached_tokens", "Prompt tokens that engines found in their caches", self.cached_tokens.clone());
        r.register("completion_tokens", "New tokens", self.completion_tokens.clone());
        r.register(
            "finished_choices",
            "Continuations that ran to their end: stop (an end token, a stop string, calls), length, or repetition",
            self.finished_choices.clone(),
        );
        r.register("mm_transfer", "Media items handed to engines, by how they travelled", self.transfers.clone());
        r.register(
            "mm_transfer_fallback",
            "Media items that were to travel in shared memory or as tensors and did not, or that an agent was to fetch or read and was \
             sent, by cause",
            self.step_downs.clone(),
        );
        r.register(
            "media_sent_items",
            "Media items that agents lacked and were sent: encoded as the client sent them, or as tensors",
            self.media_sent.clone(),
        );
        r.register(
            "media_sent_bytes",
            "Bytes of files and tensors of media items that agents lacked and were sent",
            self.media_sent_bytes.clone(),
        );
        r.register(
            "media_lent_bytes",
            "Bytes of tensors of media items that agents lacked and read out of this process's memory by NIXL",
            self.media_lent_bytes.clone(),
        );
        r.register(
            "log_lines_dropped",
            "Lines of the log that were not written: too many were waiting, standard error did not take them, or warnings that \
             repeat themselves",
            self.log_lines_dropped.clone(),
        );
        r.register(
            "panics",
            "Panics: faults of Chiasm, after which whatever panicked starts over",
            self.panics.clone(),
        );
        r.register(
            "otlp_spans",
            "Spans of traces: sent, dropped as too many were waiting (full), or not taken by the collector (refused)",
            self.spans.clone(),
        );
        r.register("media_decoded", "Media items decoded and processed", self.media_decoded.clone());
        r.register(
            "media_reused",
            "Media items sent to an engine whose tensors had been made for another request or engine",
            self.media_reused.clone(),
        );
        r.register("mm_cache_misses", "Media items that engines turned out not to hold", self.mm_cache_misses.clone());
        r.register(
            "retries",
            "Requests that lost their workers before a token was sent: tried again as the worker never had them (not_taken) or \
             died or hung with them (lost), begun on another one too as theirs says nothing (suspect), or given up as the prompt did so too often (quarantined) or too many move (over_budget)",
            self.retries.clone(),
        );
        r.register("engine_deaths", "Engines that died or could not be started, by worker", self.engine_deaths.clone());
        r.register(
            "distrusted_workers",
            "Servers found to make other prompts of media items than was expected, by worker: what they hold is approximate from then on",
            self.distrusted.clone(),
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
            "request_duration",
            "From a request's arrival to the end of its answer, whatever that is",
            Unit::Seconds,
            self.request_duration.clone(),
        );
        r.register_with_unit(
            "request_stage",
            "Parts of a request: fetch (media bytes), plan (template, tokens, media plans, block keys), process (an item's tensors, \
             waiting for a thread included), hand_off (until the engine has the request), queue (in the engine), prefill (from \
             routing to the first token)",
            Unit::Seconds,
            self.stages.clone(),
        );
        r.register(
            "stream_ends",
            "Streamed answers, by how they ended: finished, failed, or left by the client",
            self.stream_ends.clone(),
        );
        r.register("refusals", "Requests refused with an error, by status and the error's code", self.refusals.clone());
        r.register("in_flight_requests", "Requests being answered", self.in_flight.clone());
        self.no_objectives.register(r);
        self.fleet.register(r);
        self.door.register(r);
        self.roles.register(r);
        self.connections.register(r);
        r.register("request_slots", "Requests that may be in flight at once", self.slots.clone());
        self.cpu.register(r);
        r.register_collector(Box::new(ProcessMetrics::new()));
        self.begin_at_zero();
        self
    }

    /// Makes the series whose labels are known exist from the start: Prometheus sees no increase in a series that appears with its
    /// first event, so an alert would miss the first failure.
    fn begin_at_zero(&self) {
        for retry in Retry::ALL {
            drop(self.retries.get_or_create(&CauseLabel { cause: retry.name() }));
        }
        for how in StreamEnd::ALL {
            drop(self.stream_ends.get_or_create(&HowLabel { how: how.name() }));
        }
        for stage in Stage::ALL {
            drop(self.stages.get_or_create(&StageLabel { stage: stage.name() }));
        }
        for finish in [Finish::Eos, Finish::Length, Finish::Repetition] {
            drop(self.finished_choices.get_or_create(&finished(&finish)));
        }
        media::begin_at_zero(self);
    }

    /// A request was sent to a worker.
    pub(crate) fn routed(&self, attempted: &Attempted) {
        self.routed.get_or_create(&WorkerLabel { worker: attempted.worker.to_string() }).inc();
        self.prompt_blocks.inc_by(attempted.total_blocks as u64);
        self.overlap_blocks.inc_by(attempted.overlap_blocks as u64);
    }

    /// A worker was asked to encode so many media items for others and has left the embeddings of so many, after this time.
    pub(crate) fn encoded(&self, worker: WorkerId, asked: usize, left: usize, took: Duration) {
        self.roles.encoded(worker, asked, left, took);
    }

    /// A worker has computed a prompt for another one that answers.
    pub(crate) fn prefilled(&self, by: &PrefilledBy) {
        self.roles.prefilled(by);
    }

    /// A prompt was computed again by the worker that answers.
    pub(crate) fn recomputed(&self) {
        self.roles.recomputed();
    }

    /// An engine found so many leading tokens of a prompt in its cache, where so many blocks were predicted.
    pub(crate) fn prompt_found(
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
    pub(crate) fn overlap_found(&self, predicted: usize, found: usize, knowledge: Knowledge) {
        let state = knowledge.name();
        let label = |too| OverlapErrorLabels { too, state };
        // Both exist from the first request on.
        self.overlap_error.get_or_create(&label("high")).inc_by(predicted.saturating_sub(found) as u64);
        self.overlap_error.get_or_create(&label("low")).inc_by(found.saturating_sub(predicted) as u64);
    }

    /// A request was refused because all workers are busy.
    pub(crate) fn all_busy(&self) {
        self.busy.inc();
    }

    /// A request has its first token, so long after routing.
    pub(crate) fn first_token(&self, attempted: &Attempted, prefill: Duration) {
        let Attempted { took, hand_off, first_token, prefill: found, delivered, .. } = attempted;
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
    pub(crate) fn stage(&self, stage: Stage, took: Duration) {
        self.stages.get_or_create(&StageLabel { stage: stage.name() }).observe(took.as_secs_f64());
    }

    /// Returns the waiting times of requests in engines.
    fn queue_time(&self) -> Histogram {
        self.stages.get_or_create(&StageLabel { stage: Stage::Queue.name() }).clone()
    }

    /// So many tokens each came so long after the one before it.
    pub(crate) fn between_tokens(&self, gap: Duration, tokens: usize) {
        self.inter_token_latency.observe_each(gap, tokens as u64);
        self.objectives().between_tokens(gap, tokens as u64);
    }

    /// A request is over, so long after its arrival.
    pub(crate) fn over(&self, endpoint: &'static str, after: Duration) {
        self.request_duration.get_or_create(&EndpointLabel { endpoint }).observe(after.as_secs_f64());
    }

    /// A streamed answer has ended.
    pub(crate) fn stream_ended(&self, how: StreamEnd) {
        self.stream_ends.get_or_create(&HowLabel { how: how.name() }).inc();
    }

    /// A request was refused with an error of this code.
    pub(crate) fn refused(&self, status: u16, code: &'static str) {
        self.refusals.get_or_create(&RefusalLabels { status, code }).inc();
    }

    /// A request lost its worker.
    pub(crate) fn retried(&self, retry: Retry) {
        self.retries.get_or_create(&CauseLabel { cause: retry.name() }).inc();
    }

    /// The engine of a worker died, or could not be started.
    pub(crate) fn engine_died(&self, worker: WorkerId) {
        self.engine_deaths.get_or_create(&WorkerLabel { worker: worker.to_string() }).inc();
    }

    /// Counts the cached tokens of a prompt that became known after the first token.
    pub(crate) fn found_later(&self, attempted: &Attempted) {
        self.found_mut().add_later(attempted);
    }

    /// A worker made another prompt of what it was given than was expected.
    pub(crate) fn distrusted(&self, worker: WorkerId) {
        self.distrusted.get_or_create(&WorkerLabel { worker: worker.to_string() }).inc();
    }

    /// The first bytes of an answer that is passed on have come, so long after its request.
    pub(crate) fn answer_began(&self, after: Duration) {
        self.time_to_first_token.observe(after);
        self.objectives().first_token(after);
    }

    /// A worker was let go for good. Ids are not given again: what was counted for workers that come and go would grow for ever.
    pub(crate) fn forget(&self, worker: WorkerId) {
        let label = WorkerLabel { worker: worker.to_string() };
        self.routed.remove(&label);
        self.engine_deaths.remove(&label);
        self.distrusted.remove(&label);
    }

    /// Returns `true` if any series is one of this worker.
    #[cfg(test)]
    pub(crate) fn tells_of(&self, worker: WorkerId) -> bool {
        let mut text = String::new();
        encode_registry(&mut text, &self.registry).expect("strings take everything");
        text.contains(&format!("worker=\"{worker}\""))
    }

    /// Returns how often requests were retried for this reason.
    #[cfg(test)]
    pub(crate) fn retries(&self, retry: Retry) -> u64 {
        self.retries.get_or_create(&CauseLabel { cause: retry.name() }).get()
    }

    /// Returns the number of continuations that ended so.
    #[cfg(test)]
    pub(crate) fn finishes(&self, finish: &Finish) -> u64 {
        self.finished_choices.get_or_create(&finished(finish)).get()
    }

    /// Returns how many engines of a worker died.
    #[cfg(test)]
    pub(crate) fn engine_deaths(&self, worker: WorkerId) -> u64 {
        self.engine_deaths.get_or_create(&WorkerLabel { worker: worker.to_string() }).get()
    }

    /// A request was answered, or refused with an error.
    pub(crate) fn answered(&self, endpoint: &'static str, status: u16) {
        self.requests.get_or_create(&RequestLabels { endpoint, status }).inc();
    }

    /// Tokens of an answer that ran to its end.
    pub(crate) fn used(&self, usage: Usage) {
        self.prompt_tokens.inc_by(usage.prompt_tokens as u64);
        self.cached_tokens.inc_by(usage.cached_tokens as u64);
        self.completion_tokens.inc_by(usage.completion_tokens as u64);
    }

    /// A continuation ran to its end.
    pub(crate) fn finished(&self, finish: &Finish) {
        self.finished_choices.get_or_create(&finished(finish)).inc();
    }

    /// Counts from now on what meets these objectives. Has an effect once.
    pub(crate) fn set_objectives(&self, objectives: Objectives) {
        let _ = self.objectives.set(self.no_objectives.of(objectives));
    }

    fn objectives(&self) -> &ObjectiveMetrics {
        self.objectives.get().unwrap_or(&self.no_objectives)
    }

    /// Returns the cached tokens of the present workers.
    pub(crate) fn found(&self, workers: &[WorkerSnapshot]) -> Found {
        let mut found = self.found_mut();
        found.keep(workers);
        found.clone()
    }

    /// Returns the cached tokens of all engines that there ever were.
    pub(crate) fn found_in_all(&self) -> PromptTokens {
        self.found_mut().total
    }

    fn found_mut(&self) -> MutexGuard<'_, Found> {
        // Counts: a panic elsewhere can at worst have left one wrong.
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Media items handed to engines so far, by how they travelled.
    pub(crate) fn transfers(&self) -> BTreeMap<&'static str, u64> {
        let ways = [Transfer::Cached, Transfer::SharedMemory, Transfer::Inline].map(Transfer::name);
        let count = |mode| self.transfers.get(&TransferLabel { mode }).map_or(0, |count| count.get());
        ways.map(|mode| (mode, count(mode))).into()
    }

    /// Requests that are being answered.
    pub(crate) fn requests_in_flight(&self) -> i64 {
        self.in_flight.get()
    }

    /// Counts a request as in flight until the guard is dropped.
    pub(crate) fn in_flight(&self) -> InFlight {
        self.in_flight.inc();
        InFlight(self.in_flight.clone())
    }

    /// Prometheus' text format, with the workers as they are now.
    pub(crate) fn render(&self, frontend: &Frontend) -> Result<String, std::fmt::Error> {
        self.door.set(frontend);
        self.slots.set(frontend.slots.limit() as i64);
        let workers = frontend.fleet.router().workers();
        self.fleet.set(&frontend.fleet, &workers, &self.found(&workers));
        let LogCounts { full, unwritten, repeated, panics } = (frontend.log_counts)();
        self.panics.inner().store(panics, Ordering::Relaxed);
        for (cause, lines) in [("full", full), ("unwritten", unwritten), ("repeated", repeated)] {
            self.log_lines_dropped.get_or_create(&CauseLabel { cause }).inner().store(lines, Ordering::Relaxed);
        }
        if let Some(ExportCounts { sent, full, refused }) = frontend.traces.as_ref().map(Traces::counts) {
            for (outcome, spans) in [("sent", sent), ("full", full), ("refused", refused)] {
                self.spans.get_or_create(&OutcomeLabel { outcome }).inner().store(spans, Ordering::Relaxed);
            }
        }
        for worker in frontend.fleet.workers() {
            let label = WorkerLabel { worker: worker.id.to_string() };
            // A worker's counts begin with the worker.
            drop(self.engine_deaths.get_or_create(&label));
            drop(self.distrusted.get_or_create(&label));
            drop(self.routed.get_or_create(&label));
        }
        let mut text = String::new();
        encode_registry(&mut text, &self.registry)?;
        encode_registry(&mut text, &vllm_names::registry(self, frontend))?;
        encode_eof(&mut text)?;
        Ok(text)
    }
}

/// The reason by vLLM's names of them (`FINISH_REASON_STRINGS` in `v1/engine/__init__.py`): those of ends that aren't failures.
fn finished(finish: &Finish) -> FinishedLabel {
    let finished_reason = match finish {
        Finish::Eos | Finish::StopToken(_) | Finish::StopString(_) | Finish::ToolCalls => "stop",
        Finish::Length => "length",
        Finish::Repetition => "repetition",
    };
    FinishedLabel { finished_reason }
}

/// One request in flight.
pub(crate) struct InFlight(Gauge);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.dec();
    }
}
