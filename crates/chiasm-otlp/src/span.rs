//! Spans and their attributes in OTLP's format.

use std::time::{SystemTime, UNIX_EPOCH};

use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{self as wire, Status};

/// The id of a trace; not all zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceId(pub [u8; 16]);

/// The id of a span; not all zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanId(pub [u8; 8]);

impl TraceId {
    /// Creates a random id.
    pub fn random() -> Self {
        Self(rand::random::<u128>().max(1).to_be_bytes())
    }
}

impl SpanId {
    /// Creates a random id.
    pub fn random() -> Self {
        Self(rand::random::<u64>().max(1).to_be_bytes())
    }
}

/// The kind of a span: its side of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanKind {
    /// The server's side.
    Server,
    /// An operation within a process.
    Internal,
}

/// A span: an operation with a start and an end.
#[derive(Clone, Debug, PartialEq)]
pub struct Span(pub(crate) wire::Span);

impl Span {
    /// Creates a span.
    pub fn new(
        trace: TraceId,
        id: SpanId,
        parent: Option<SpanId>,
        name: impl Into<String>,
        kind: SpanKind,
        (start, end): (SystemTime, SystemTime),
    ) -> Self {
        let kind = match kind {
            SpanKind::Server => wire::span::SpanKind::Server,
            SpanKind::Internal => wire::span::SpanKind::Internal,
        };
        Self(wire::Span {
            trace_id: trace.0.to_vec(),
            span_id: id.0.to_vec(),
            parent_span_id: parent.map_or_else(Vec::new, |parent| parent.0.to_vec()),
            name: name.into(),
            kind: kind.into(),
            start_time_unix_nano: nanoseconds(start),
            end_time_unix_nano: nanoseconds(end),
            ..wire::Span::default()
        })
    }

    /// Sets the value of the header `tracestate`.
    #[must_use]
    pub fn with_trace_state(mut self, state: &str) -> Self {
        self.0.trace_state = state.to_owned();
        self
    }

    /// Adds a text attribute.
    pub fn text(&mut self, name: &str, value: impl Into<String>) {
        self.attribute(name, Value::StringValue(value.into()));
    }

    /// Adds an integer attribute.
    pub fn count(&mut self, name: &str, value: usize) {
        self.attribute(name, Value::IntValue(i64::try_from(value).unwrap_or(i64::MAX)));
    }

    /// Adds a floating-point attribute.
    pub fn number(&mut self, name: &str, value: f64) {
        self.attribute(name, Value::DoubleValue(value));
    }

    /// Marks the operation as failed, with a message.
    pub fn fail(&mut self, message: impl Into<String>) {
        self.0.status = Some(Status { message: message.into(), code: StatusCode::Error.into() });
    }

    fn attribute(&mut self, name: &str, value: Value) {
        self.0.attributes.push(attribute(name, value));
    }
}

/// Creates an attribute in OTLP's format.
pub(crate) fn attribute(name: &str, value: Value) -> KeyValue {
    KeyValue {
        key: name.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
        ..KeyValue::default()
    }
}

/// Returns the nanoseconds since the Unix epoch.
fn nanoseconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}
