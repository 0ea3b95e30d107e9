//! Traces of requests for OpenTelemetry: sampling, and the spans of each request.
//!
//! A request's spans are built from its record when the request ends. Until then it only carries
//! its trace context.

use std::time::{Duration, SystemTime};

use chiasm_api::openai::Usage;
use chiasm_backend::{MediaDelivery, TraceContext};
use chiasm_otlp::{ExportCounts, Exporter, Span, SpanId, SpanKind, TraceId};
use chiasm_request::{RequestedSampling, RouteOutcome};

/// The recorder and exporter of traces.
pub struct Traces {
    exporter: Exporter,
    sample: f64,
}

/// The trace of a request that is recorded.
#[derive(Clone, Debug)]
pub(crate) struct ActiveTrace {
    /// The context of the request's own span, the parent of the engines' spans.
    context: TraceContext,
    parent: Option<SpanId>,
    arrived: SystemTime,
}

/// The facts of a finished request.
pub(crate) struct FinishedRequest<'a> {
    pub(crate) endpoint: &'static str,
    pub(crate) model: &'a str,
    pub(crate) id: &'a str,
    pub(crate) status: u16,
    /// A word for the cause of the failure, and the error message.
    pub(crate) failure: Option<(&'static str, Option<&'a str>)>,
    pub(crate) route: Option<&'a RouteOutcome>,
    pub(crate) usage: Usage,
    pub(crate) duration: Duration,
}

impl Traces {
    /// Creates a recorder that samples a part of the requests, 0 to 1. A client's `traceparent`
    /// overrides the sampling: sampled ones are always recorded, unsampled ones never.
    pub fn new(exporter: Exporter, sample: f64) -> Self {
        Self { exporter, sample }
    }

    /// Sends the queued spans, for at most `timeout`, and accepts no more.
    pub async fn finish(&self, timeout: Duration) {
        self.exporter.finish(timeout).await;
    }

    pub(crate) fn counts(&self) -> ExportCounts {
        self.exporter.counts()
    }

    /// Begins the trace of a request with this client context.
    ///
    /// Returns the request's trace context, and its trace if it is recorded. An unsampled context
    /// also keeps the engine from recording.
    pub(crate) fn begin(
        &self,
        client: Option<&TraceContext>,
    ) -> (TraceContext, Option<ActiveTrace>) {
        let id = SpanId::random();
        let (context, parent) = match client {
            Some(context) if !context.is_sampled() => return (context.clone(), None),
            Some(context) => (context.child(id.0), Some(SpanId(context.ids().1))),
            None => {
                let is_sampled = self.sample >= 1.0 || rand::random::<f64>() < self.sample;
                let context = TraceContext::new_root(TraceId::random().0, id.0, is_sampled);
                if !is_sampled {
                    return (context, None);
                }
                (context, None)
            }
        };
        (context.clone(), Some(ActiveTrace { context, parent, arrived: SystemTime::now() }))
    }

    /// Ends the trace of a request.
    pub(crate) fn end(&self, trace: &ActiveTrace, request: &FinishedRequest<'_>) {
        let mut spans = vec![trace.root_span(request)];
        if let Some(route) = request.route {
            trace.stage_spans(route, request.duration, &mut spans);
        }
        self.exporter.send(spans);
    }
}

impl ActiveTrace {
    /// Builds the request's own span.
    ///
    /// Names and attributes are those of OpenTelemetry's conventions for HTTP and for generative
    /// AI, and vLLM's (`vllm.tracing.SpanAttributes`) where these have none.
    fn root_span(&self, request: &FinishedRequest<'_>) -> Span {
        let (trace, id) = self.context.ids();
        let operation = match request.endpoint {
            "chat" | "responses" | "messages" => Some("chat"),
            "completions" => Some("text_completion"),
            _ => None,
        };
        let name = operation.map_or_else(
            || request.endpoint.to_owned(),
            |operation| format!("{operation} {}", request.model),
        );
        let end = self.arrived + request.duration;
        let mut span = Span::new(
            TraceId(trace),
            SpanId(id),
            self.parent,
            name,
            SpanKind::Server,
            (self.arrived, end),
        );
        if let Some(state) = self.context.state() {
            span = span.with_trace_state(state);
        }
        span.text("http.request.method", "POST");
        span.count("http.response.status_code", request.status.into());
        span.text("gen_ai.provider.name", "chiasm");
        span.text("gen_ai.request.model", request.model);
        span.text("gen_ai.request.id", request.id);
        if let Some(operation) = operation {
            span.text("gen_ai.operation.name", operation);
        }
        if let Some((cause, message)) = request.failure {
            span.text("error.type", cause);
            // A client's mistake is not a failure of the server according to the conventions for
            // HTTP.
            if request.status >= 500 || request.status < 400 {
                span.fail(message.unwrap_or(cause));
            }
        }
        if let Some(route) = request.route {
            add_route_attributes(&mut span, route, request);
        }
        span
    }

    /// Builds the spans of a request's stages, in order.
    fn stage_spans(&self, route: &RouteOutcome, duration: Duration, spans: &mut Vec<Span>) {
        let (trace, parent) = self.context.ids();
        let mut add_span = |name: &str, from: Duration, to: Duration| {
            let times = (self.arrived + from, self.arrived + to.max(from));
            spans.push(Span::new(
                TraceId(trace),
                SpanId::random(),
                Some(SpanId(parent)),
                name,
                SpanKind::Internal,
                times,
            ));
        };
        let RouteOutcome { stage_times, picked_after, hand_off, encoded, prefilled, .. } = *route;
        let plan_start = stage_times.parse + stage_times.fetch;
        if route.delivered != MediaDelivery::default() {
            add_span("fetch", stage_times.parse, plan_start);
        }
        add_span("plan", plan_start, plan_start + stage_times.plan);
        let first_token = route.first_token.unwrap_or(duration);
        // Encoding comes first, as prefill needs the embeddings.
        let start = match encoded {
            None => picked_after,
            Some(by) => {
                let encoded_at = picked_after + by.duration;
                add_span("encode", picked_after, encoded_at);
                encoded_at
            }
        };
        match prefilled {
            None => {
                add_span("hand_off", start, start + hand_off);
                add_span("prefill", start + hand_off, first_token);
            }
            // One worker prefills, then another one decodes.
            Some(by) => {
                let prefilled_at = start + by.duration;
                add_span("hand_off", start, start + by.hand_off);
                add_span("prefill", start + by.hand_off, prefilled_at);
                add_span("kv_transfer", prefilled_at, first_token);
            }
        }
        if route.first_token.is_some() {
            add_span("decode", first_token, duration);
        }
    }
}

/// Adds the attributes of a request's route and usage to its span.
fn add_route_attributes(span: &mut Span, route: &RouteOutcome, request: &FinishedRequest<'_>) {
    let RequestedSampling { temperature, top_p, max_tokens, choices } = route.sampling;
    let numbers = [("gen_ai.request.temperature", temperature), ("gen_ai.request.top_p", top_p)];
    for (name, value) in numbers.into_iter().filter_map(|(name, value)| Some((name, value?))) {
        span.number(name, value);
    }
    if let Some(max_tokens) = max_tokens {
        span.count("gen_ai.request.max_tokens", max_tokens);
    }
    span.count("gen_ai.request.choice.count", choices);
    span.count("gen_ai.usage.input_tokens", route.prompt_tokens.max(request.usage.prompt_tokens));
    span.count("gen_ai.usage.output_tokens", request.usage.completion_tokens);
    span.count("gen_ai.usage.cache_read.input_tokens", request.usage.cached_tokens);
    if let Some(created) = request.usage.created_tokens {
        span.count("gen_ai.usage.cache_creation.input_tokens", created);
    }
    if let Some(first) = route.first_token {
        span.number("gen_ai.latency.time_to_first_token", first.as_secs_f64());
    }
    if let Some(queued) = route.prefill.queued {
        span.number("gen_ai.latency.time_in_queue", queued.as_secs_f64());
    }
    span.number("gen_ai.latency.e2e", request.duration.as_secs_f64());
    span.text("chiasm.worker", route.worker.to_string());
    if let Some(by) = &route.encoded {
        span.text("chiasm.encode_worker", by.worker.to_string());
    }
    if let Some(by) = &route.prefilled {
        span.text("chiasm.prefill_worker", by.worker.to_string());
    }
    span.count("chiasm.overlap_blocks", route.overlap_blocks);
    span.count("chiasm.total_blocks", route.total_blocks);
    span.text("chiasm.transfer", route.delivered.transfer().name());
    span.count("chiasm.moves", route.moves);
}

#[cfg(test)]
mod tests;
