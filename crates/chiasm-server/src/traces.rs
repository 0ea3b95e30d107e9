//! Traces of requests for OpenTelemetry: which requests have one, and what its spans are.
//!
//! A request's spans are made when it is over, of what its record knows by then: until then it
//! costs no more than a number.

use std::time::{Duration, SystemTime};

use chiasm_api::openai::Usage;
use chiasm_backend::{Delivered, TraceContext};
use chiasm_otlp::{ExportCounts, Exporter, Kind, Span, SpanId, TraceId};
use chiasm_request::{RequestedSampling, RouteOutcome};

/// Records traces, and sends them.
pub struct Traces {
    exporter: Exporter,
    sample: f64,
}

/// A request whose trace is recorded.
#[derive(Clone, Debug)]
pub(crate) struct Traced {
    /// The request's own span, which engines are told to put theirs below.
    context: TraceContext,
    parent: Option<SpanId>,
    arrived: SystemTime,
}

/// What is known of a request when it is over.
pub(crate) struct Over<'a> {
    pub(crate) endpoint: &'static str,
    pub(crate) model: &'a str,
    pub(crate) id: &'a str,
    pub(crate) status: u16,
    /// A word for why it failed, and what was said of it.
    pub(crate) failure: Option<(&'static str, Option<&'a str>)>,
    pub(crate) attempted: Option<&'a RouteOutcome>,
    pub(crate) usage: Usage,
    pub(crate) took: Duration,
}

impl Traces {
    /// Records a part of the requests, 0 to 1, whose clients leave it to this server; those whose
    /// clients say (`traceparent`) that they want to are recorded in any case, and never those
    /// whose clients don't.
    pub fn new(exporter: Exporter, sample: f64) -> Self {
        Self { exporter, sample }
    }

    /// Sends what waits, for `patience` at most, and takes no more.
    pub async fn finish(&self, patience: Duration) {
        self.exporter.finish(patience).await;
    }

    pub(crate) fn counts(&self) -> ExportCounts {
        self.exporter.counts()
    }

    /// Begins the trace of a request that has come with this context. What it has from then on may
    /// also say that nobody, the engine neither, is to record it; else it comes with what records
    /// it.
    pub(crate) fn begin(&self, came_with: Option<&TraceContext>) -> (TraceContext, Option<Traced>) {
        let id = SpanId::random();
        let (context, parent) = match came_with {
            Some(context) if !context.is_sampled() => return (context.clone(), None),
            Some(context) => (context.child(id.0), Some(SpanId(context.ids().1))),
            None => {
                let is_sampled = self.sample >= 1.0 || rand::random::<f64>() < self.sample;
                let context = TraceContext::begin(TraceId::random().0, id.0, is_sampled);
                if !is_sampled {
                    return (context, None);
                }
                (context, None)
            }
        };
        (context.clone(), Some(Traced { context, parent, arrived: SystemTime::now() }))
    }

    /// Ends the trace of a request.
    pub(crate) fn end(&self, traced: &Traced, over: &Over<'_>) {
        let mut spans = vec![traced.root(over)];
        if let Some(attempted) = over.attempted {
            traced.parts(attempted, over.took, &mut spans);
        }
        self.exporter.send(spans);
    }
}

impl Traced {
    /// The request's own span. Names and attributes are those of OpenTelemetry's conventions for
    /// HTTP and for generative AI, and vLLM's (`vllm.tracing.SpanAttributes`) where these have
    /// none.
    fn root(&self, over: &Over<'_>) -> Span {
        let (trace, id) = self.context.ids();
        let operation = match over.endpoint {
            "chat" | "responses" | "messages" => Some("chat"),
            "completions" => Some("text_completion"),
            _ => None,
        };
        let name = operation.map_or_else(
            || over.endpoint.to_owned(),
            |operation| format!("{operation} {}", over.model),
        );
        let end = self.arrived + over.took;
        let mut span = Span::new(
            TraceId(trace),
            SpanId(id),
            self.parent,
            name,
            Kind::Server,
            (self.arrived, end),
        );
        if let Some(state) = self.context.state() {
            span = span.with_state(state);
        }
        span.text("http.request.method", "POST");
        span.count("http.response.status_code", over.status.into());
        span.text("gen_ai.provider.name", "chiasm");
        span.text("gen_ai.request.model", over.model);
        span.text("gen_ai.request.id", over.id);
        if let Some(operation) = operation {
            span.text("gen_ai.operation.name", operation);
        }
        if let Some((cause, message)) = over.failure {
            span.text("error.type", cause);
            // A client's own mistake is no failure of the server, as the conventions for HTTP have
            // it.
            if over.status >= 500 || over.status < 400 {
                span.fail(message.unwrap_or(cause));
            }
        }
        if let Some(attempted) = over.attempted {
            describe(&mut span, attempted, over);
        }
        span
    }

    /// The parts of a request, one after the other.
    fn parts(&self, attempted: &RouteOutcome, took: Duration, spans: &mut Vec<Span>) {
        let (trace, parent) = self.context.ids();
        let mut part = |name: &str, from: Duration, to: Duration| {
            let times = (self.arrived + from, self.arrived + to.max(from));
            spans.push(Span::new(
                TraceId(trace),
                SpanId::random(),
                Some(SpanId(parent)),
                name,
                Kind::Internal,
                times,
            ));
        };
        let RouteOutcome { took: prepared, picked, hand_off, encoded, prefilled, .. } = *attempted;
        let planned_from = prepared.before + prepared.fetch;
        if attempted.delivered != Delivered::default() {
            part("fetch", prepared.before, planned_from);
        }
        part("plan", planned_from, planned_from + prepared.plan);
        let first = attempted.first_token.unwrap_or(took);
        // Before anything else is done, as the embeddings have to be there.
        let picked = match encoded {
            None => picked,
            Some(by) => {
                part("encode", picked, picked + by.took);
                picked + by.took
            }
        };
        match prefilled {
            None => {
                part("hand_off", picked, picked + hand_off);
                part("prefill", picked + hand_off, first);
            }
            // Two workers, one after the other.
            Some(by) => {
                let left = picked + by.took;
                part("hand_off", picked, picked + by.hand_off);
                part("prefill", picked + by.hand_off, left);
                part("kv_transfer", left, first);
            }
        }
        if attempted.first_token.is_some() {
            part("decode", first, took);
        }
    }
}

fn describe(span: &mut Span, attempted: &RouteOutcome, over: &Over<'_>) {
    let RequestedSampling { temperature, top_p, max_tokens, choices } = attempted.asked;
    let numbers = [("gen_ai.request.temperature", temperature), ("gen_ai.request.top_p", top_p)];
    for (name, value) in numbers.into_iter().filter_map(|(name, value)| Some((name, value?))) {
        span.number(name, value);
    }
    if let Some(max_tokens) = max_tokens {
        span.count("gen_ai.request.max_tokens", max_tokens);
    }
    span.count("gen_ai.request.choice.count", choices);
    span.count("gen_ai.usage.input_tokens", attempted.prompt_tokens.max(over.usage.prompt_tokens));
    span.count("gen_ai.usage.output_tokens", over.usage.completion_tokens);
    span.count("gen_ai.usage.cache_read.input_tokens", over.usage.cached_tokens);
    if let Some(created) = over.usage.created_tokens {
        span.count("gen_ai.usage.cache_creation.input_tokens", created);
    }
    if let Some(first) = attempted.first_token {
        span.number("gen_ai.latency.time_to_first_token", first.as_secs_f64());
    }
    if let Some(queued) = attempted.prefill.queued {
        span.number("gen_ai.latency.time_in_queue", queued.as_secs_f64());
    }
    span.number("gen_ai.latency.e2e", over.took.as_secs_f64());
    span.text("chiasm.worker", attempted.worker.to_string());
    if let Some(by) = &attempted.encoded {
        span.text("chiasm.encode_worker", by.worker.to_string());
    }
    if let Some(by) = &attempted.prefilled {
        span.text("chiasm.prefill_worker", by.worker.to_string());
    }
    span.count("chiasm.overlap_blocks", attempted.overlap_blocks);
    span.count("chiasm.total_blocks", attempted.total_blocks);
    span.text("chiasm.transfer", attempted.delivered.transfer().name());
    span.count("chiasm.moves", attempted.moves);
}

#[cfg(test)]
mod tests;
