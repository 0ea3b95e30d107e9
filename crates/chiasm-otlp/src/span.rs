//! Spans and their attributes, as OTLP has them.

use std::time::{SystemTime, UNIX_EPOCH};

use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{self as wire, Status};

/// Names a trace; not all zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceId(pub [u8; 16]);

/// Names a span of a trace; not all zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanId(pub [u8; 8]);

impl TraceId {
    /// A new one.
    pub fn random() -> Self {
        Self(rand::random::<u128>().max(1).to_be_bytes())
    }
}

impl SpanId {
    /// A new one.
    pub fn random() -> Self {
        Self(rand::random::<u64>().max(1).to_be_bytes())
    }
}

/// Says on whose side of a call a span is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The side that was asked.
    Server,
    /// Within a process.
    Internal,
}

/// What took from one moment to another.
#[derive(Clone, Debug, PartialEq)]
pub struct Span(pub(crate) wire::Span);

impl Span {
    /// A span that lasted from one time to another.
    pub fn new(
        trace: TraceId,
        id: SpanId,
        parent: Option<SpanId>,
        name: impl Into<String>,
        kind: Kind,
        (start, end): (SystemTime, SystemTime),
    ) -> Self {
        let kind = match kind {
            Kind::Server => SpanKind::Server,
            Kind::Internal => SpanKind::Internal,
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

    /// The same span with what came in the header `tracestate`.
    #[must_use]
    pub fn with_state(mut self, state: &str) -> Self {
        self.0.trace_state = state.to_owned();
        self
    }

    /// Adds a text.
    pub fn text(&mut self, name: &str, value: impl Into<String>) {
        self.attribute(name, Value::StringValue(value.into()));
    }

    /// Adds a number.
    pub fn count(&mut self, name: &str, value: usize) {
        self.attribute(name, Value::IntValue(i64::try_from(value).unwrap_or(i64::MAX)));
    }

    /// Adds a number with a fraction.
    pub fn number(&mut self, name: &str, value: f64) {
        self.attribute(name, Value::DoubleValue(value));
    }

    /// Says that what the span is of failed, and how.
    pub fn fail(&mut self, message: impl Into<String>) {
        self.0.status = Some(Status { message: message.into(), code: StatusCode::Error.into() });
    }

    fn attribute(&mut self, name: &str, value: Value) {
        self.0.attributes.push(attribute(name, value));
    }
}

/// An attribute as OTLP has it.
pub(crate) fn attribute(name: &str, value: Value) -> KeyValue {
    KeyValue {
        key: name.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
        ..KeyValue::default()
    }
}

fn nanoseconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}
