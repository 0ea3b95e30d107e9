use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use axum::routing::post;
use chiasm_backend::fake::{FakeBackend, Script};
use chiasm_backend::{DeathReason, Finish, JobError};
use chiasm_otlp::{Endpoint, Headers};
use http_body_util::BodyExt;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span as ExportedSpan;
use prost::Message;
use tokio::sync::mpsc::{self, UnboundedReceiver};

use super::*;
use crate::connection::Connection;
use crate::test_server::TestServer;
use crate::{Server, ServerSettings, layers};

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// A frontend in front of one fake backend, and the spans that its collector received.
struct TestHarness {
    server: Arc<Server>,
    backend: FakeBackend,
    received: UnboundedReceiver<Vec<ExportedSpan>>,
}

impl TestHarness {
    async fn with_sample(sample: f64) -> Self {
        let (endpoint, received) = collector().await;
        let exporter = Exporter::start(endpoint, Headers::default(), "test", "1").unwrap();
        let traces = Some(Traces::new(exporter, sample));
        let TestServer { server, mut test } =
            TestServer::with_settings(ServerSettings { traces, ..Default::default() }).await;
        Self { server, backend: test.backends.remove(0), received }
    }

    async fn post(&self, body: &str, traceparent: Option<&str>) -> Response {
        let request = Request::post("/v1/chat/completions").header(header::HOST, "test");
        let request = request.header(header::CONTENT_TYPE, "application/json");
        let request = traceparent.into_iter().fold(request, |request, parent| {
            request.header("traceparent", parent).header("tracestate", "a=b")
        });
        let request = request.body(Body::from(body.to_owned())).unwrap();
        let connection = Arc::new(Connection::from_peer(Ipv4Addr::LOCALHOST.into()));
        layers::answer(self.server.app(), self.server.parts().3.clone(), connection, request).await
    }

    /// Returns the spans of all requests so far.
    async fn spans(mut self) -> Vec<ExportedSpan> {
        self.server.finish_traces(Duration::from_secs(10)).await;
        let mut spans = Vec::new();
        while let Ok(more) = self.received.try_recv() {
            spans.extend(more);
        }
        spans
    }
}

async fn collector() -> (Endpoint, UnboundedReceiver<Vec<ExportedSpan>>) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (sender, receiver) = mpsc::unbounded_channel();
    let receive = async move |body: Bytes| {
        let request = ExportTraceServiceRequest::decode(body).unwrap();
        let scopes = request.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
        sender.send(scopes.flat_map(|scope| scope.spans).collect()).unwrap();
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let app = axum::Router::new().route("/v1/traces", post(receive));
    tokio::spawn(async move {
        let listener = listener;
        loop {
            let Ok((stream, _)) = listener.accept().await else { return };
            let service = hyper_util::service::TowerToHyperService::new(app.clone());
            let io = hyper_util::rt::TokioIo::new(stream);
            tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(io, service));
        }
    });
    (endpoint, receiver)
}

fn body(more: &str) -> String {
    format!(
        "{{\"messages\": [{{\"role\": \"user\", \"content\": \"hello\"}}], \
         \"max_tokens\": 2, \"temperature\": 0.5{more}}}"
    )
}

fn attributes(span: &ExportedSpan) -> BTreeMap<&str, String> {
    let text = |value: &Value| match value {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        Value::DoubleValue(number) => number.to_string(),
        other => panic!("{other:?}"),
    };
    let value = |attribute: &'_ opentelemetry_proto::tonic::common::v1::KeyValue| {
        text(attribute.value.as_ref().unwrap().value.as_ref().unwrap())
    };
    span.attributes.iter().map(|attribute| (attribute.key.as_str(), value(attribute))).collect()
}

#[tokio::test]
async fn spans_of_a_request_join_the_clients_trace() {
    let harness = TestHarness::with_sample(0.0).await;
    harness.backend.next_job(Script::tokens(&[40, 41]).finish(Finish::Length));
    let answer = harness.post(&body(""), Some(PARENT)).await;
    assert_eq!(answer.status(), 200);
    let id = answer.headers()["x-request-id"].to_str().unwrap().to_owned();
    drop(answer.into_body().collect().await);
    let job = harness.backend.jobs().remove(0);
    let spans = harness.spans().await;
    let [root, parts @ ..] = &spans[..] else { panic!("no spans") };
    let (parent_trace, parent_span) = TraceContext::parse(PARENT, None).unwrap().ids();
    assert_eq!(
        (&root.trace_id[..], &root.parent_span_id[..]),
        (&parent_trace[..], &parent_span[..])
    );
    assert_eq!(
        (root.name.as_str(), root.trace_state.as_str(), &root.status),
        ("chat m", "a=b", &None)
    );
    let job_trace = job.trace.as_ref().unwrap();
    assert_eq!(
        (&job_trace.ids().0[..], &job_trace.ids().1[..]),
        (&parent_trace[..], &root.span_id[..]),
        "the parent of the engine's spans"
    );
    let attributes = attributes(root);
    for (name, value) in [
        ("gen_ai.operation.name", "chat"),
        ("gen_ai.request.model", "m"),
        ("gen_ai.request.max_tokens", "2"),
        ("gen_ai.request.temperature", "0.5"),
        ("gen_ai.usage.output_tokens", "2"),
        ("gen_ai.request.id", id.as_str()),
        ("http.response.status_code", "200"),
        ("chiasm.worker", "worker_0"),
    ] {
        assert_eq!(attributes.get(name).map(String::as_str), Some(value), "{name}");
    }
    let names: Vec<_> = parts.iter().map(|part| part.name.as_str()).collect();
    assert_eq!(names, ["plan", "hand_off", "prefill", "decode"]);
    for part in parts {
        assert_eq!((&part.trace_id, &part.parent_span_id), (&root.trace_id, &root.span_id));
        assert!(root.start_time_unix_nano <= part.start_time_unix_nano, "{part:?}");
        assert!(
            part.start_time_unix_nano <= part.end_time_unix_nano
                && part.end_time_unix_nano <= root.end_time_unix_nano,
            "{part:?}"
        );
    }
}

#[tokio::test]
async fn unsampled_trace_context_is_forwarded_unchanged() {
    let harness = TestHarness::with_sample(1.0).await;
    harness.backend.next_job(Script::tokens(&[40]).finish(Finish::Length));
    let unsampled = format!("{}00", &PARENT[..53]);
    drop(harness.post(&body(""), Some(&unsampled)).await.into_body().collect().await);
    let job = harness.backend.jobs().remove(0);
    let headers: Vec<_> = job.trace.iter().flat_map(TraceContext::headers).collect();
    assert_eq!(headers, [("traceparent", unsampled.as_str()), ("tracestate", "a=b")]);
    assert_eq!(harness.spans().await, []);
}

#[tokio::test]
async fn request_without_traceparent_is_sampled() {
    for sample in [0.0, 1.0] {
        let harness = TestHarness::with_sample(sample).await;
        harness.backend.next_job(Script::tokens(&[40]).finish(Finish::Length));
        drop(harness.post(&body(""), None).await.into_body().collect().await);
        let job = harness.backend.jobs().remove(0);
        let spans = harness.spans().await;
        let roots: Vec<_> = spans.iter().filter(|span| span.parent_span_id.is_empty()).collect();
        let context = job.trace.as_ref().expect("the engine gets a context in either case");
        assert_eq!((roots.len(), context.is_sampled()), (sample as usize, sample > 0.0));
    }
}

#[tokio::test]
async fn span_of_a_stream_has_its_failure() {
    let harness = TestHarness::with_sample(1.0).await;
    let died = JobError::Dead(DeathReason::new("it was unplugged"));
    harness.backend.next_job(Script::tokens(&[40]).fail(died));
    let stream = harness.post(&body(", \"stream\": true"), None).await;
    assert_eq!(
        stream.headers()[header::CONTENT_TYPE],
        HeaderValue::from_static("text/event-stream; charset=utf-8")
    );
    drop(stream.into_body().collect().await);
    harness.backend.next_job(Script::tokens(&[40]));
    let left = harness.post(&body(", \"stream\": true"), None).await;
    drop(left);
    let spans = harness.spans().await;
    let failures: Vec<_> = spans
        .iter()
        .filter(|span| span.parent_span_id.is_empty())
        .map(|span| (attributes(span)["error.type"].clone(), span.status.is_some()))
        .collect();
    assert_eq!(failures, [("stream_failed".to_owned(), true), ("client_left".to_owned(), true)]);
}

#[tokio::test]
async fn client_error_does_not_fail_the_span() {
    let harness = TestHarness::with_sample(1.0).await;
    let refused = harness.post(&body(", \"nonsense\": 1"), None).await;
    assert_eq!(refused.status(), 400);
    drop(refused);
    let spans = harness.spans().await;
    assert_eq!((spans.len(), &spans[0].status), (1, &None));
    let attributes = attributes(&spans[0]);
    assert_eq!(
        (attributes["error.type"].as_str(), attributes["http.response.status_code"].as_str()),
        ("unsupported_field", "400")
    );
}
