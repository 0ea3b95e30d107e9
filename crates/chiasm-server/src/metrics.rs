//! Prometheus metrics of requests and connections, and the page `/metrics` with those of all parts.

mod stream_end;
mod vllm_names;

use std::sync::atomic::Ordering;
use std::time::Duration;

use chiasm_api::openai::Usage;
use chiasm_otlp::ExportCounts;
use chiasm_pipeline::Pipeline;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

pub(crate) use self::stream_end::StreamEnd;
use crate::connection_metrics::ConnectionMetrics;
use crate::log_counts::LogCounts;
use crate::process_metrics::ProcessMetrics;

/// The upper bounds, in seconds, of the buckets for the time from a request's arrival to the end of
/// its answer. vLLM has none below 300 ms.
const REQUEST_DURATION_BUCKETS: [f64; 24] = [
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RequestLabels {
    endpoint: &'static str,
    status: u16,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CauseLabel {
    cause: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct EndpointLabel {
    endpoint: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct HowLabel {
    how: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RefusalLabels {
    status: u16,
    code: &'static str,
}

/// The state that is read for each scrape.
pub(crate) struct ScrapeState<'a> {
    pub(crate) pipeline: &'a Pipeline,
    /// The number of requests that may be in flight at once.
    pub(crate) slots: usize,
    pub(crate) log: LogCounts,
    /// The counts of exported spans, if traces are recorded.
    pub(crate) spans: Option<ExportCounts>,
}

/// The metrics of requests and connections, and the registry of all metrics of the process.
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    busy: Counter,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    completion_tokens: Counter,
    log_lines_dropped: Family<CauseLabel, Counter>,
    panics: Counter,
    spans: Family<OutcomeLabel, Counter>,
    request_duration: Family<EndpointLabel, Histogram, fn() -> Histogram>,
    stream_ends: Family<HowLabel, Counter>,
    refusals: Family<RefusalLabels, Counter>,
    in_flight: Gauge,
    pub(crate) connections: ConnectionMetrics,
    slots: Gauge,
}

impl Metrics {
    /// Creates the metrics of a server in front of this pipeline.
    pub(crate) fn new(pipeline: &Pipeline) -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("chiasm"),
            requests: Family::default(),
            busy: Counter::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            completion_tokens: Counter::default(),
            log_lines_dropped: Family::default(),
            panics: Counter::default(),
            spans: Family::default(),
            request_duration: Family::new_with_constructor(|| {
                Histogram::new(REQUEST_DURATION_BUCKETS)
            }),
            stream_ends: Family::default(),
            refusals: Family::default(),
            in_flight: Gauge::default(),
            connections: ConnectionMetrics::default(),
            slots: Gauge::default(),
        };
        metrics.register();
        pipeline.metrics.register(&mut metrics.registry);
        pipeline.fleet.metrics().register(&mut metrics.registry);
        // Prometheus sees no increase in a series that appears with its first event, so an alert
        // would miss the first failure.
        for end in StreamEnd::ALL {
            drop(metrics.stream_ends.get_or_create(&HowLabel { how: end.name() }));
        }
        metrics
    }

    fn register(&mut self) {
        let r = &mut self.registry;
        r.register("requests", "Requests answered, by endpoint and status", self.requests.clone());
        r.register(
            "busy_refusals",
            "Requests refused because all workers were busy",
            self.busy.clone(),
        );
        r.register("prompt_tokens", "Tokens of expanded prompts", self.prompt_tokens.clone());
        r.register(
            "cached_tokens",
            "Prompt tokens that engines found in their caches",
            self.cached_tokens.clone(),
        );
        r.register("completion_tokens", "New tokens", self.completion_tokens.clone());
        r.register(
            "log_lines_dropped",
            "Log lines that were not written: too many were queued (full), the reader of the log \
             was gone (unwritten), or the warning was a repetition (repeated)",
            self.log_lines_dropped.clone(),
        );
        r.register(
            "panics",
            "Panics, which are bugs of Chiasm; the part that panicked starts over",
            self.panics.clone(),
        );
        r.register(
            "otlp_spans",
            "Spans of traces: sent, dropped because too many were queued (full), \
             or refused by the collector (refused)",
            self.spans.clone(),
        );
        r.register_with_unit(
            "request_duration",
            "From a request's arrival to the end of its answer, successful or not",
            Unit::Seconds,
            self.request_duration.clone(),
        );
        r.register(
            "stream_ends",
            "Streamed answers by outcome: finished, failed, or left by the client",
            self.stream_ends.clone(),
        );
        r.register(
            "refusals",
            "Requests refused with an error, by status and the error's code",
            self.refusals.clone(),
        );
        r.register("in_flight_requests", "Requests being answered", self.in_flight.clone());
        self.connections.register(r);
        r.register("request_slots", "Requests that may be in flight at once", self.slots.clone());
        r.register_collector(Box::new(ProcessMetrics::new()));
    }

    /// Counts a request that was refused because all workers are busy.
    pub(crate) fn count_busy(&self) {
        self.busy.inc();
    }

    /// Records the time from a request's arrival to the end of its answer.
    pub(crate) fn observe_duration(&self, endpoint: &'static str, duration: Duration) {
        self.request_duration
            .get_or_create(&EndpointLabel { endpoint })
            .observe(duration.as_secs_f64());
    }

    /// Counts the end of a streamed answer.
    pub(crate) fn count_stream_end(&self, end: StreamEnd) {
        self.stream_ends.get_or_create(&HowLabel { how: end.name() }).inc();
    }

    /// Counts a request that was refused with an error of this code.
    pub(crate) fn count_refusal(&self, status: u16, code: &'static str) {
        self.refusals.get_or_create(&RefusalLabels { status, code }).inc();
    }

    /// Counts a request that was answered or refused.
    pub(crate) fn count_answer(&self, endpoint: &'static str, status: u16) {
        self.requests.get_or_create(&RequestLabels { endpoint, status }).inc();
    }

    /// Counts the tokens of an answer.
    pub(crate) fn count_tokens(&self, usage: Usage) {
        self.prompt_tokens.inc_by(usage.prompt_tokens as u64);
        self.cached_tokens.inc_by(usage.cached_tokens as u64);
        self.completion_tokens.inc_by(usage.completion_tokens as u64);
    }

    /// Returns the number of requests in flight.
    pub(crate) fn requests_in_flight(&self) -> i64 {
        self.in_flight.get()
    }

    /// Counts a request as in flight until the guard is dropped.
    pub(crate) fn in_flight(&self) -> InFlight {
        self.in_flight.inc();
        InFlight(self.in_flight.clone())
    }

    /// Renders all metrics in Prometheus' text format, with the current state of the workers.
    pub(crate) fn render(&self, state: &ScrapeState<'_>) -> Result<String, std::fmt::Error> {
        self.slots.set(state.slots as i64);
        let pipeline = state.pipeline;
        let workers = pipeline.fleet.router().workers();
        pipeline.fleet.refresh_metrics(&workers);
        pipeline.refresh_metrics(&workers);
        let LogCounts { full, unwritten, repeated, panics } = state.log;
        self.panics.inner().store(panics, Ordering::Relaxed);
        for (cause, lines) in [("full", full), ("unwritten", unwritten), ("repeated", repeated)] {
            self.log_lines_dropped
                .get_or_create(&CauseLabel { cause })
                .inner()
                .store(lines, Ordering::Relaxed);
        }
        if let Some(ExportCounts { sent, full, refused }) = state.spans {
            for (outcome, spans) in [("sent", sent), ("full", full), ("refused", refused)] {
                self.spans
                    .get_or_create(&OutcomeLabel { outcome })
                    .inner()
                    .store(spans, Ordering::Relaxed);
            }
        }
        let mut text = String::new();
        encode_registry(&mut text, &self.registry)?;
        encode_registry(&mut text, &vllm_names::registry(self, pipeline))?;
        encode_eof(&mut text)?;
        Ok(text)
    }
}

/// Counts a request as in flight until this is dropped.
pub(crate) struct InFlight(Gauge);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.dec();
    }
}
