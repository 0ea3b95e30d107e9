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

async fn arrives(
    headers: &[(&str, &str)],
    body: Body,
    budget: &ByteBudget,
) -> Result<Arrived, HttpError> {
    arrive(&head(headers), body, None, &limits(), budget, &connection()).await
}

async fn status(headers: &[(&str, &str)], body: Body) -> u16 {
    arrives(headers, body, &ByteBudget::new(1000))
        .await
        .map_or_else(|error| error.status.as_u16(), |_| 200)
}

/// A body of unknown length.
fn in_pieces(pieces: usize) -> Body {
    Body::from_stream(stream::iter((0..pieces).map(|_| Ok::<_, io::Error>(vec![0; 10]))))
}

/// Pieces of so many bytes with a pause before each.
fn slowly(
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
async fn a_body_may_have_as_many_bytes_as_the_limit_and_no_more() {
    assert_eq!(status(JSON, Body::from(vec![0; 100])).await, 200);
    assert_eq!(status(JSON, Body::from(vec![0; 101])).await, 413);
}

#[tokio::test]
async fn a_body_of_unknown_length_is_counted() {
    assert_eq!(status(JSON, in_pieces(10)).await, 200);
    assert_eq!(status(JSON, in_pieces(11)).await, 413);
}

#[tokio::test]
async fn a_body_that_memory_has_no_room_for_is_refused_for_now() {
    let budget = ByteBudget::new(100);
    let held = arrives(JSON, in_pieces(10), &budget).await.unwrap();
    assert_eq!(budget.held(), 100);
    let error = arrives(JSON, in_pieces(10), &budget).await.unwrap_err();
    assert_eq!(error.status, StatusCode::SERVICE_UNAVAILABLE);
    drop(held);
    assert_eq!(budget.held(), 0);
}

#[tokio::test]
async fn only_what_is_called_json_is_read() {
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
    let unnamed = arrives(&[], Body::from("{}"), &ByteBudget::new(100)).await.unwrap_err();
    assert_eq!((unnamed.status.as_u16(), unnamed.param()), (415, Some("content-type")));
}

#[tokio::test]
async fn compressed_bodies_are_not_read() {
    let encoded = |coding| [("content-encoding", coding), JSON[0]];
    assert_eq!(status(&encoded("identity"), Body::from("{}")).await, 200);
    for coding in ["gzip", "br", "identity, gzip", "zstd"] {
        assert_eq!(status(&encoded(coding), Body::from("{}")).await, 415, "{coding}");
    }
    let error =
        arrives(&encoded("gzip"), Body::from("{}"), &ByteBudget::new(100)).await.unwrap_err();
    assert_eq!(error.param(), Some("content-encoding"));
}

/// A body that fails the test when it is asked for, as asking invites a client that waits.
fn uninvited(announced: usize) -> Body {
    struct Uninvited(usize);
    impl HttpBody for Uninvited {
        type Data = Bytes;
        type Error = io::Error;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
            panic!("the body was asked for")
        }

        fn size_hint(&self) -> SizeHint {
            SizeHint::with_exact(self.0 as u64)
        }
    }
    Body::new(Uninvited(announced))
}

#[tokio::test]
async fn a_client_that_asks_first_is_refused_before_it_sends() {
    let asks = |kind| [("expect", "100-Continue"), ("content-type", kind)];
    assert_eq!(status(&asks("application/json"), uninvited(99_000_000_000)).await, 413);
    assert_eq!(status(&asks("text/plain"), uninvited(5)).await, 415);
    assert_eq!(status(&asks("application/json"), Body::from("{}")).await, 200);
}

#[tokio::test]
async fn a_refused_body_is_read_as_far_as_the_limit() {
    let (sent, body) = counted(1000);
    assert_eq!(status(&[], body).await, 415);
    assert_eq!(
        sent.load(Ordering::Relaxed),
        11,
        "as much as the limit, and what shows that there is more"
    );
    let (sent, body) = counted(5);
    assert_eq!(status(&[], body).await, 415);
    assert_eq!(sent.load(Ordering::Relaxed), 5);
}

/// A body of pieces of ten bytes that counts those that were read.
fn counted(pieces: usize) -> (Arc<AtomicUsize>, Body) {
    let sent = Arc::<AtomicUsize>::default();
    let count = sent.clone();
    let pieces = stream::iter(0..pieces).map(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        Ok::<_, io::Error>(vec![0; 10])
    });
    (sent, Body::from_stream(pieces))
}

/// The outcome, and after how many seconds it was there.
async fn timed(
    body: impl Stream<Item = Result<Vec<u8>, io::Error>> + Send + 'static,
    limits: &HttpLimits,
) -> (String, u64) {
    let started = Instant::now();
    let outcome = arrive(
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
async fn a_body_that_stops_coming_is_not_waited_for() {
    let limits = HttpLimits { min_body_rate: 100, ..HttpLimits::default() };
    // A good start does not help.
    let stuck = stream::iter([Ok(vec![0; 500_000])]).chain(stream::pending());
    let (outcome, seconds) = timed(stuck, &limits).await;
    assert!(outcome.starts_with("408: less than 100 bytes/s"), "{outcome}");
    assert_eq!(seconds, 10);
    let (outcome, seconds) = timed(slowly(100, 99, Duration::from_secs(1)), &limits).await;
    assert!(outcome.contains("--min-body-rate"), "{outcome}");
    assert_eq!(seconds, 10);
    assert_eq!(
        timed(slowly(50, 101, Duration::from_secs(1)), &limits).await,
        ("read".to_owned(), 50)
    );
}

#[tokio::test(start_paused = true)]
async fn a_body_may_take_so_long_and_no_longer() {
    let limits = HttpLimits { min_body_rate: 100, ..HttpLimits::default() };
    let (outcome, seconds) = timed(slowly(1000, 200, Duration::from_secs(1)), &limits).await;
    assert!(outcome.contains("60 s (--body-timeout)"), "{outcome}");
    assert_eq!(seconds, 60);
    let any_rate =
        HttpLimits { min_body_rate: 0, body_timeout: Duration::MAX, ..HttpLimits::default() };
    assert_eq!(
        timed(slowly(2, 1, Duration::from_secs(25)), &any_rate).await,
        ("read".to_owned(), 50)
    );
}

#[tokio::test]
async fn every_value_but_the_first_is_counted() {
    let values = async |pieces: Vec<Vec<u8>>| {
        let body = Body::from_stream(stream::iter(pieces.into_iter().map(Ok::<_, io::Error>)));
        arrive(
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

/// A body whose length is known before it comes.
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
async fn a_connection_knows_while_a_large_body_arrives() {
    let large_from = async |announced: bool| {
        let (connection, limits) = (Arc::new(connection()), HttpLimits::default());
        let (seen, its) = (Arc::<Mutex<Vec<bool>>>::default(), connection.clone());
        let notes = seen.clone();
        let pieces = stream::iter(0..3).map(move |_| {
            notes.lock().unwrap().push(its.has_large_body());
            Ok::<_, io::Error>(vec![b' '; LARGE])
        });
        let body = Body::from_stream(pieces);
        let body = if announced { Body::new(Announced(body, 3 * LARGE as u64)) } else { body };
        arrive(&head(JSON), body, None, &limits, &ByteBudget::new(1 << 30), &connection)
            .await
            .unwrap();
        assert!(!connection.has_large_body(), "after the body");
        Arc::into_inner(seen).unwrap().into_inner().unwrap()
    };
    assert_eq!(large_from(false).await, [false, true, true]);
    assert_eq!(large_from(true).await, [true, true, true]);
}
