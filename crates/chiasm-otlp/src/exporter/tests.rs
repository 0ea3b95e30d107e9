use std::time::{Instant, SystemTime};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use tokio::sync::mpsc::UnboundedSender;

use super::*;
use crate::{SpanId, SpanKind, TraceId};

/// A message that a collector has received.
type Received = (HeaderMap, ExportTraceServiceRequest);

/// Starts a collector that responds with `status` after `delay`. Returns its address and the
/// messages that it receives.
async fn collector(
    status: StatusCode,
    delay: Duration,
) -> (Endpoint, mpsc::UnboundedReceiver<Received>) {
    collector_with_body(status, delay, Body::empty).await
}

async fn collector_with_body(
    status: StatusCode,
    delay: Duration,
    response_body: fn() -> Body,
) -> (Endpoint, mpsc::UnboundedReceiver<Received>) {
    // The features of the workspace determine the provider; the binary installs it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (sender, receiver) = mpsc::unbounded_channel();
    let receive = async move |State(sender): State<UnboundedSender<Received>>,
                              headers: HeaderMap,
                              body: Bytes| {
        tokio::time::sleep(delay).await;
        let request = ExportTraceServiceRequest::decode(body).expect("protobuf");
        let _ = sender.send((headers, request));
        (status, response_body())
    };
    let app = axum::Router::new().route("/v1/traces", post(receive)).with_state(sender);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"))
        .parse()
        .expect("an endpoint");
    tokio::spawn(async move { axum::serve(listener, app).await });
    (endpoint, receiver)
}

fn span(name: &str) -> Span {
    let now = SystemTime::now();
    let mut span = Span::new(
        TraceId::random(),
        SpanId::random(),
        Some(SpanId([7; 8])),
        name,
        SpanKind::Server,
        (now, now),
    );
    span.count("tokens", 3);
    span
}

#[tokio::test]
async fn spans_reach_the_collector_with_their_service() {
    let (endpoint, mut messages) = collector(StatusCode::OK, Duration::ZERO).await;
    let exporter =
        Exporter::start(endpoint, "api-key=secret".parse().unwrap(), "front", "1").unwrap();
    exporter.send(vec![span("a"), span("b")]);
    exporter.send(vec![span("c")]);
    exporter.finish(Duration::from_secs(5)).await;
    let (headers, request) = messages.recv().await.unwrap();
    assert_eq!(
        (&headers["api-key"], &headers["content-type"]),
        (&"secret".parse().unwrap(), &"application/x-protobuf".parse().unwrap())
    );
    let [resource_spans] = &request.resource_spans[..] else { panic!("{request:?}") };
    let service = &resource_spans.resource.as_ref().unwrap().attributes[0];
    assert_eq!(
        (service.key.as_str(), &service.value),
        ("service.name", &attribute("", Value::StringValue("front".into())).value)
    );
    let spans = &resource_spans.scope_spans[0].spans;
    let names: Vec<_> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c"], "in one message");
    assert_eq!((spans[0].parent_span_id.as_slice(), spans[0].trace_id.len()), (&[7; 8][..], 16));
    assert_eq!(exporter.counts(), ExportCounts { sent: 3, ..ExportCounts::default() });
    exporter.send(vec![span("late")]);
    assert_eq!(exporter.counts().full, 0, "spans after `finish` are not counted");
}

#[tokio::test]
async fn hanging_collector_delays_nothing() {
    let (endpoint, _messages) = collector(StatusCode::OK, Duration::from_secs(60)).await;
    let exporter = Exporter::start(endpoint, Headers::default(), "front", "1").unwrap();
    exporter.send(vec![span("first")]);
    // After this, the exporter waits for the response to the first message.
    tokio::time::sleep(BATCH_DELAY * 2).await;
    let started = Instant::now();
    (0..QUEUE_TRACES + 5).for_each(|_| exporter.send(vec![span("a"), span("b")]));
    assert_eq!(exporter.counts().full, 10);
    exporter.finish(Duration::from_millis(200)).await;
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    // Queued spans and those of the message in flight are lost and counted.
    let refused = 1 + 2 * QUEUE_TRACES as u64;
    assert_eq!(exporter.counts(), ExportCounts { sent: 0, full: 10, refused });
}

#[tokio::test]
async fn refused_spans_are_counted() {
    let (endpoint, _messages) = collector(StatusCode::UNAUTHORIZED, Duration::ZERO).await;
    let exporter = Exporter::start(endpoint, Headers::default(), "front", "1").unwrap();
    exporter.send(vec![span("a")]);
    exporter.finish(Duration::from_secs(5)).await;
    assert_eq!(exporter.counts(), ExportCounts { refused: 1, ..ExportCounts::default() });
    let unreachable = "http://127.0.0.1:9".parse().unwrap();
    let exporter = Exporter::start(unreachable, Headers::default(), "front", "1").unwrap();
    exporter.send(vec![span("a")]);
    exporter.finish(Duration::from_secs(5)).await;
    assert_eq!(exporter.counts().refused, 1);
}

/// Returns the counts of four spans that a collector responds to in this way.
async fn counts_after(status: StatusCode, body: fn() -> Body) -> ExportCounts {
    let (endpoint, _messages) = collector_with_body(status, Duration::ZERO, body).await;
    let exporter = Exporter::start(endpoint, Headers::default(), "front", "1").unwrap();
    exporter.send(vec![span("a"), span("b"), span("c"), span("d")]);
    exporter.finish(Duration::from_secs(5)).await;
    exporter.counts()
}

#[tokio::test]
async fn redirect_is_a_refusal() {
    let counts = counts_after(StatusCode::TEMPORARY_REDIRECT, Body::empty).await;
    assert_eq!(counts, ExportCounts { refused: 4, ..ExportCounts::default() });
}

#[tokio::test]
async fn rejected_spans_do_not_count_as_sent() {
    // `partial_success { rejected_spans: 3, error_message: "no" }`
    let counts =
        counts_after(StatusCode::OK, || Body::from(&b"\x0a\x06\x08\x03\x12\x02no"[..])).await;
    assert_eq!(counts, ExportCounts { sent: 1, refused: 3, ..ExportCounts::default() });
    // More rejected spans than were sent.
    let counts = counts_after(StatusCode::OK, || Body::from(&b"\x0a\x02\x08\x7f"[..])).await;
    assert_eq!(counts, ExportCounts { refused: 4, ..ExportCounts::default() });
    let counts = counts_after(StatusCode::OK, || Body::from("{}")).await;
    assert_eq!(counts, ExportCounts { sent: 4, ..ExportCounts::default() });
}

#[tokio::test]
async fn endless_response_is_refused() {
    let endless = || {
        Body::from_stream(futures_util::stream::repeat_with(|| {
            Ok::<_, std::io::Error>(vec![0; 1 << 10])
        }))
    };
    let counts = counts_after(StatusCode::OK, endless).await;
    assert_eq!(counts, ExportCounts { refused: 4, ..ExportCounts::default() });
}
