//! An exporter of spans to an OpenTelemetry collector: OTLP over HTTP with protobuf bodies.
//!
//! [`Exporter::send`] puts the spans of a trace into a bounded queue and returns immediately. A
//! background task sends them in batches. If the collector is slow or down, spans are dropped and
//! counted; nothing else is affected.
//!
//! | module | contents |
//! |---|---|
//! | `endpoint` | the collector's address, and the headers of each message |
//! | `exporter` | the queue, and the task that sends its spans |
//! | `span` | spans and their attributes in OTLP's format |
#![forbid(unsafe_code)]

mod endpoint;
mod exporter;
mod span;

pub use endpoint::{Endpoint, EndpointError, Headers, HeadersError};
pub use exporter::{ExportCounts, ExportError, Exporter};
pub use span::{Span, SpanId, SpanKind, TraceId};
