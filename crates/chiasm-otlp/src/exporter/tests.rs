use std::time::{Instant, SystemTime};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use tokio::sync::mpsc::UnboundedSender;

use super::*;
use crate::{Kind, SpanId, TraceId};

type Told = (HeaderMap, ExportTraceServiceRequest);

/// A collector that answers with this status after so long, and what it was told.
async fn collector(
    status: StatusCode,
    after: Duration,
) -> (Endpoint, mpsc::UnboundedReceiver<Told>) {
    collector_that_says(status, after, Body::empty).await
}

async fn collector_that_says(
    status: StatusCode,
    after: Duration,
    body_of_answer: fn() -> Body,
) -> (Endpoint, mpsc::UnboundedReceiver<Told>) {
    // Cargo's features of the workspace decide which provider there is; the binary installs it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (told, receiver) = mpsc::unbounded_channel();
    let take = async move |State(told): State<UnboundedSender<Told>>,
                           headers: HeaderMap,
                           body: Bytes| {
        tokio::time::sleep(after).await;
        let _ = told.send((headers, ExportTraceServiceRequest::decode(body).expect("protobuf")));
        (status, body_of_answer())
    };
    let app = axum::Router::new().route("/v1/traces", post(take)).with_state(told);
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
        Kind::Server,
        (now, now),
    );
    span.count("tokens", 3);
    span
}

#[tokio::test]
async fn spans_reach_the_collector_together_with_whose_they_are() {
    let (endpoint, mut told) = collector(StatusCode::OK, Duration::ZERO).await;
    let exporter =
        Exporter::start(endpoint, "api-key=secret".parse().unwrap(), "front", "1").unwrap();
    exporter.send(vec![span("a"), span("b")]);
    exporter.send(vec![span("c")]);
    exporter.finish(Duration::from_secs(5)).await;
    let (headers, request) = told.recv().await.unwrap();
    assert_eq!(
        (&headers["api-key"], &headers["content-type"]),
        (&"secret".parse().unwrap(), &"application/x-protobuf".parse().unwrap())
    );
    let [of_resource] = &request.resource_spans[..] else { panic!("{request:?}") };
    let service = &of_resource.resource.as_ref().unwrap().attributes[0];
    assert_eq!(
        (service.key.as_str(), &service.value),
        ("service.name", &attribute("", Value::StringValue("front".into())).value)
    );
    let spans = &of_resource.scope_spans[0].spans;
    let names: Vec<_> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c"], "in one message");
    assert_eq!((spans[0].parent_span_id.as_slice(), spans[0].trace_id.len()), (&[7; 8][..], 16));
    assert_eq!(exporter.counts(), ExportCounts { sent: 3, ..ExportCounts::default() });
    exporter.send(vec![span("late")]);
    assert_eq!(exporter.counts().full, 0, "what comes after the end is nobody's");
}

#[tokio::test]
async fn a_collector_that_hangs_holds_up_nobody() {
    let (endpoint, _told) = collector(StatusCode::OK, Duration::from_secs(60)).await;
    let exporter = Exporter::start(endpoint, Headers::default(), "front", "1").unwrap();
    exporter.send(vec![span("first")]);
    // It waits for the answer to the first message from now on.
    tokio::time::sleep(GATHERING * 2).await;
    let began = Instant::now();
    (0..QUEUE + 5).for_each(|_| exporter.send(vec![span("a"), span("b")]));
    assert_eq!(exporter.counts().full, 10);
    exporter.finish(Duration::from_millis(200)).await;
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    // What was queued and what was on its way is lost, and counted.
    let refused = 1 + 2 * QUEUE as u64;
    assert_eq!(exporter.counts(), ExportCounts { sent: 0, full: 10, refused });
}

#[tokio::test]
async fn spans_that_are_not_taken_are_counted() {
    let (endpoint, _told) = collector(StatusCode::UNAUTHORIZED, Duration::ZERO).await;
    let exporter = Exporter::start(endpoint, Headers::default(), "front", "1").unwrap();
    exporter.send(vec![span("a")]);
    exporter.finish(Duration::from_secs(5)).await;
    assert_eq!(exporter.counts(), ExportCounts { refused: 1, ..ExportCounts::default() });
    let nobody = "http://127.0.0.1:9".parse().unwrap();
    let exporter = Exporter::start(nobody, Headers::default(), "front", "1").unwrap();
    exporter.send(vec![span("a")]);
    exporter.finish(Duration::from_secs(5)).await;
    assert_eq!(exporter.counts().refused, 1);
}

/// What is counted of four spans that a collector answers so.
async fn counts_after(status: StatusCode, answer: fn() -> Body) -> ExportCounts {
    let (endpoint, _told) = collector_that_says(status, Duration::ZERO, answer).await;
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
async fn rejected_spans_are_not_sent_ones() {
    // `partial_success { rejected_spans: 3, error_message: "no" }`
    let counts =
        counts_after(StatusCode::OK, || Body::from(&b"\x0a\x06\x08\x03\x12\x02no"[..])).await;
    assert_eq!(counts, ExportCounts { sent: 1, refused: 3, ..ExportCounts::default() });
    // More than there were.
    let counts = counts_after(StatusCode::OK, || Body::from(&b"\x0a\x02\x08\x7f"[..])).await;
    assert_eq!(counts, ExportCounts { refused: 4, ..ExportCounts::default() });
    let counts = counts_after(StatusCode::OK, || Body::from("{}")).await;
    assert_eq!(counts, ExportCounts { sent: 4, ..ExportCounts::default() });
}

#[tokio::test]
async fn answer_without_end_is_not_read() {
    let endless = || {
        Body::from_stream(futures_util::stream::repeat_with(|| {
            Ok::<_, std::io::Error>(vec![0; 1 << 10])
        }))
    };
    let counts = counts_after(StatusCode::OK, endless).await;
    assert_eq!(counts, ExportCounts { refused: 4, ..ExportCounts::default() });
}
