//! Spans on their way to an OpenTelemetry collector, by OTLP over HTTP with protobuf bodies.
//!
//! Whoever has made a trace's spans gives them to an [`Exporter`] and goes on: a queue of bounded
//! length lies between, and a task of its own sends what is in it, many spans at once. A collector
//! that is slow, dead or gone costs spans, which are counted, and nothing else.
//!
//! | module | is |
//! |---|---|
//! | `endpoint` | where spans are sent, and what is sent along |
//! | `exporter` | the queue, and the task that empties it |
//! | `span` | spans and their attributes, as OTLP has them |
#![forbid(unsafe_code)]

mod endpoint;
mod exporter;
mod span;

pub use endpoint::{BadHeaders, Endpoint, EndpointError, Headers};
pub use exporter::{ExportCounts, ExportError, Exporter};
pub use span::{Kind, Span, SpanId, TraceId};
