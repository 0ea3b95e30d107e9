use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use axum::http::{Request, StatusCode};
use futures_util::stream::{self, Stream, StreamExt};
use hyper::body::{Frame, SizeHint};

use super::*;

const JSON: &[(&str, &str)] = &[("content-type", "application/json")];

fn head(headers: &[(&str, &str)]) -> Parts {
    let mut request = Request::post("/v1/completions");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(()).unwrap().into_parts().0
}

fn connection() -> Connection {
    Connection::from_peer([127, 0, 0, 1].into())
}

fn limits() -> HttpLimits {
    HttpLimits { body_bytes: 100, ..HttpLimits::default() }
}

async fn receive_json(
    headers: &[(&str, &str)],
    body: Body,
    budget: &ByteBudget,
) -> Result<ReceivedBody, HttpError> {
    receive(&head(headers), body, None, &limits(), budget, &connection()).await
}

async fn status(headers: &[(&str, &str)], body: Body) -> u16 {
    receive_json(headers, body, &ByteBudget::new(1000))
        .await
        .map_or_else(|error| error.status.as_u16(), |_| 200)
}

/// Returns a body of unknown length, in pieces of ten bytes.
fn in_pieces(pieces: usize) -> Body {
    Body::from_stream(stream::iter((0..pieces).map(|_| Ok::<_, io::Error>(vec![0; 10]))))
}

/// Returns pieces of `bytes` bytes with a pause before each.
fn slow_pieces(
    pieces: usize,
    bytes: usize,
    pause: Duration,
) -> impl Stream<Item = Result<Vec<u8>, io::Error>> {
    stream::iter(0..pieces).then(move |_| async move {
        tokio::time::sleep(pause).await;
        Ok(vec![0; bytes])
    })
}

#[tokio::test]
async fn body_over_size_limit_is_refused() {
    assert_eq!(status(JSON, Body::from(vec![0; 100])).await, 200);
    assert_eq!(status(JSON, Body::from(vec![0; 101])).await, 413);
}

#[tokio::test]
async fn body_of_unknown_length_is_counted() {
    assert_eq!(status(JSON, in_pieces(10)).await, 200);
    assert_eq!(status(JSON, in_pieces(11)).await, 413);
}

#[tokio::test]
async fn body_over_memory_budget_gets_503() {
    let budget = ByteBudget::new(100);
    let held = receive_json(JSON, in_pieces(10), &budget).await.unwrap();
    assert_eq!(budget.held(), 100);
    let error = receive_json(JSON, in_pieces(10), &budget).await.unwrap_err();
    assert_eq!(error.status, StatusCode::SERVICE_UNAVAILABLE);
    drop(held);
    assert_eq!(budget.held(), 0);
}

#[tokio::test]
async fn body_without_json_content_type_is_refused() {
    for json in [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        "application/json;x=y",
    ] {
        assert_eq!(status(&[("content-type", json)], Body::from("{}")).await, 200, "{json}");
    }
    for other in
        ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", "text/json", ""]
    {
        assert_eq!(status(&[("content-type", other)], Body::from("{}")).await, 415, "{other}");
    }
    let unnamed = receive_json(&[], Body::from("{}"), &ByteBudget::new(100)).await.unwrap_err();
    assert_eq!((unnamed.status.as_u16(), unnamed.param()), (415, Some("content-type")));
}

#[tokio::test]
async fn compressed_body_is_refused() {
    let encoded = |coding| [("content-encoding", coding), JSON[0]];
    assert_eq!(status(&encoded("identity"), Body::from("{}")).await, 200);
    for coding in ["gzip", "br", "identity, gzip", "zstd"] {
        assert_eq!(status(&encoded(coding), Body::from("{}")).await, 415, "{coding}");
    }
    let error =
        receive_json(&encoded("gzip"), Body::from("{}"), &ByteBudget::new(100)).await.unwrap_err();
    assert_eq!(error.param(), Some("content-encoding"));
}

/// Returns a body that panics when it is polled, as polling makes hyper send `100 Continue`.
fn unpolled_body(length: usize) -> Body {
    struct UnpolledBody(usize);
    impl HttpBody for UnpolledBody {
        type Data = Bytes;
        type Error = io::Error;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
            panic!("the body was polled")
        }

        fn size_hint(&self) -> SizeHint {
            SizeHint::with_exact(self.0 as u64)
        }
    }
    Body::new(UnpolledBody(length))
}

#[tokio::test]
async fn expect_continue_is_refused_before_the_body() {
    let headers = |kind| [("expect", "100-Continue"), ("content-type", kind)];
    assert_eq!(status(&headers("application/json"), unpolled_body(99_000_000_000)).await, 413);
    assert_eq!(status(&headers("text/plain"), unpolled_body(5)).await, 415);
    assert_eq!(status(&headers("application/json"), Body::from("{}")).await, 200);
}

#[tokio::test]
async fn refused_body_is_read_up_to_the_limit() {
    let (sent, body) = counted(1000);
    assert_eq!(status(&[], body).await, 415);
    assert_eq!(sent.load(Ordering::Relaxed), 11, "up to the limit, and the piece that exceeds it");
    let (sent, body) = counted(5);
    assert_eq!(status(&[], body).await, 415);
    assert_eq!(sent.load(Ordering::Relaxed), 5);
}

/// Returns a body of pieces of ten bytes, and the number of pieces read so far.
fn counted(pieces: usize) -> (Arc<AtomicUsize>, Body) {
    let sent = Arc::<AtomicUsize>::default();
    let count = sent.clone();
    let pieces = stream::iter(0..pieces).map(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        Ok::<_, io::Error>(vec![0; 10])
    });
    (sent, Body::from_stream(pieces))
}

/// Receives a body. Returns the outcome and the seconds until then.
async fn timed(
    body: impl Stream<Item = Result<Vec<u8>, io::Error>> + Send + 'static,
    limits: &HttpLimits,
) -> (String, u64) {
    let started = Instant::now();
    let outcome = receive(
        &head(JSON),
        Body::from_stream(body),
        None,
        limits,
        &ByteBudget::new(1 << 20),
        &connection(),
    )
    .await;
    let outcome = outcome.map_or_else(
        |error| format!("{}: {}", error.status.as_u16(), error.error.message),
        |_| "read".to_owned(),
    );
    (outcome, started.elapsed().as_secs())
}

#[tokio::test(start_paused = true)]
async fn stalled_body_is_refused_after_the_rate_window() {
    let limits = HttpLimits { min_body_rate: 100, ..HttpLimits::default() };
    // A fast start does not help.
    let stuck = stream::iter([Ok(vec![0; 500_000])]).chain(stream::pending());
    let (outcome, seconds) = timed(stuck, &limits).await;
    assert!(outcome.starts_with("408: the body arrived at less than 100 bytes/s"), "{outcome}");
    assert_eq!(seconds, 10);
    let (outcome, seconds) = timed(slow_pieces(100, 99, Duration::from_secs(1)), &limits).await;
    assert!(outcome.contains("--min-body-rate"), "{outcome}");
    assert_eq!(seconds, 10);
    assert_eq!(
        timed(slow_pieces(50, 101, Duration::from_secs(1)), &limits).await,
        ("read".to_owned(), 50)
    );
}

#[tokio::test(start_paused = true)]
async fn body_over_timeout_is_refused() {
    let limits = HttpLimits { min_body_rate: 100, ..HttpLimits::default() };
    let (outcome, seconds) = timed(slow_pieces(1000, 200, Duration::from_secs(1)), &limits).await;
    assert!(outcome.contains("60 s (--body-timeout)"), "{outcome}");
    assert_eq!(seconds, 60);
    let any_rate =
        HttpLimits { min_body_rate: 0, body_timeout: Duration::MAX, ..HttpLimits::default() };
    assert_eq!(
        timed(slow_pieces(2, 1, Duration::from_secs(25)), &any_rate).await,
        ("read".to_owned(), 50)
    );
}

#[tokio::test]
async fn values_beside_the_first_are_counted() {
    let values = async |pieces: Vec<Vec<u8>>| {
        let body = Body::from_stream(stream::iter(pieces.into_iter().map(Ok::<_, io::Error>)));
        receive(
            &head(JSON),
            body,
            None,
            &HttpLimits::default(),
            &ByteBudget::new(1 << 20),
            &connection(),
        )
        .await
        .unwrap()
        .values
    };
    let json = vec![b"[".to_vec(), b"0,".repeat(1000), b"{\"a\": 1, \"b\": [2, 3]}]".to_vec()];
    assert_eq!(values(vec![json.concat()]).await, 1 + 1000 + 1 + 1 + 1 + 1);
    assert_eq!(values(json).await, 1 + 1000 + 1 + 1 + 1 + 1);
    for only in [b',', b'[', b'{'] {
        assert_eq!(values(vec![vec![only; 5000]]).await, 5000);
    }
    assert_eq!(values(vec![vec![b'x'; 5000]]).await, 0);
}

/// A body with an announced length.
struct Announced(Body, u64);

impl HttpBody for Announced {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.0).poll_frame(context)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.1)
    }
}

#[tokio::test]
async fn large_body_is_marked_while_it_arrives() {
    let large_from = async |announced: bool| {
        let connection = Arc::new(connection());
        let limits = HttpLimits::default();
        let seen = Arc::<Mutex<Vec<bool>>>::default();
        let observed = connection.clone();
        let notes = seen.clone();
        let pieces = stream::iter(0..3).map(move |_| {
            notes.lock().unwrap().push(observed.has_large_body());
            Ok::<_, io::Error>(vec![b' '; LARGE_BODY_BYTES])
        });
        let body = Body::from_stream(pieces);
        let body =
            if announced { Body::new(Announced(body, 3 * LARGE_BODY_BYTES as u64)) } else { body };
        receive(&head(JSON), body, None, &limits, &ByteBudget::new(1 << 30), &connection)
            .await
            .unwrap();
        assert!(!connection.has_large_body(), "after the body");
        Arc::into_inner(seen).unwrap().into_inner().unwrap()
    };
    assert_eq!(large_from(false).await, [false, true, true]);
    assert_eq!(large_from(true).await, [true, true, true]);
}
