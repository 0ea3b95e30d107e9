mod encrypted;

use std::net::{Ipv4Addr, SocketAddr};

use chiasm_backend::Finish;
use chiasm_backend::fake::{FakeBackend, Script};
use chiasm_pipeline::PipelineLimits;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::sync::oneshot;

use super::*;
use crate::HttpLimits;
use crate::test_server::TestServer;

/// Longer than anything here takes on a busy machine, and shorter than what must not be waited for.
const SOON: Duration = Duration::from_secs(30);

/// A frontend that listens, before one fake backend.
struct Listening {
    address: SocketAddr,
    server: TestServer,
    _stop: oneshot::Sender<()>,
}

impl Listening {
    async fn with(limits: HttpLimits) -> Self {
        Self::within(None, limits, PipelineLimits::default()).await
    }

    /// The same within TLS, if there is a certificate.
    async fn within(
        certificate: Option<Arc<Certificate>>,
        http: HttpLimits,
        pipeline: PipelineLimits,
    ) -> Self {
        let server = TestServer::limited(http, pipeline).await;
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await.unwrap();
        let address =
            SocketAddr::from((Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port()));
        let (stop, stopped) = oneshot::channel();
        let serving = server.server.clone();
        tokio::spawn(async move {
            serving.serve(listener, certificate, async { drop(stopped.await) }).await
        });
        Self { address, server, _stop: stop }
    }

    /// A connection on which this has been sent.
    async fn sent(&self, bytes: impl AsRef<[u8]>) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(bytes.as_ref()).await.unwrap();
        stream
    }

    /// What is answered to this until the connection is closed.
    async fn answer(&self, request: impl AsRef<[u8]>) -> String {
        rest(self.sent(request).await).await
    }

    fn backend(&self) -> &FakeBackend {
        &self.server.test.backends[0]
    }

    fn metric(&self, name: &str) -> u64 {
        let text = self.server.metrics();
        let line =
            text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }
}

/// All that comes until the connection is closed.
async fn rest(mut stream: impl AsyncRead + Unpin) -> String {
    let mut answer = String::new();
    tokio::time::timeout(SOON, stream.read_to_string(&mut answer))
        .await
        .expect("the end in time")
        .unwrap();
    answer
}

async fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, waiting).await.unwrap_or_else(|_| panic!("no {what}"));
}

/// A completion with more fields, after whose answer the connection is closed.
fn completion(fields: &str) -> String {
    let body = format!("{{\"prompt\": \"the quick brown fox\"{fields}}}");
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close";
    format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
}

#[tokio::test]
async fn bodies_that_do_not_come_hold_no_slot() {
    let one_request = PipelineLimits { requests: Some(1), ..PipelineLimits::default() };
    let server = Listening::within(None, HttpLimits::default(), one_request).await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n";
    let mut slow = Vec::new();
    for _ in 0..3 {
        slow.push(server.sent(format!("{head}{}", " ".repeat(1000))).await);
    }
    wait_for("their bytes", || server.server.test.pipeline.media.budget().held() >= 3000).await;
    server.backend().next_job(Script::tokens(&[40]).finish(Finish::Eos));
    let answer = server.answer(completion("")).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(server.metric("chiasm_in_flight_requests"), 0);
}

#[tokio::test]
async fn who_closes_its_side_gets_what_is_answered_at_once() {
    let server = Listening::with(HttpLimits::default()).await;
    let post = |headers: &str, body: &str| {
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\n{headers}content-length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    for (request, status) in [
        (get("/health"), 200),
        ("GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(), 200),
        (get("/nowhere"), 404),
        (post("", "{}"), 415),
        (post("content-type: application/json\r\n", "{"), 400),
        (post("content-type: application/json\r\n", "{\"prompt\": 5}"), 400),
        // One that takes a while to be understood, so that the end of what the client sends is
        // there first.
        (post("content-type: application/json\r\n", &"{".repeat(1_000_000)), 400),
    ] {
        let mut stream = server.sent(&request).await;
        stream.shutdown().await.unwrap();
        let answer = rest(stream).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{:.200}: {answer}", request);
    }
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_request() {
    let server = Listening::with(HttpLimits::default()).await;
    for (round, fields) in ["", ", \"stream\": true"].into_iter().enumerate() {
        for (half, aborted) in [(false, 2 * round + 1), (true, 2 * round + 2)] {
            let mut stream = server.sent(completion(fields)).await;
            wait_for("job", || server.backend().jobs().len() == aborted).await;
            // One that only closes its side can't be told from one that left.
            if half {
                stream.shutdown().await.unwrap();
                assert_eq!(rest(stream).await.matches("HTTP/1.1 2").count(), 0);
            } else {
                drop(stream);
            }
            wait_for("abort", || server.backend().aborted() == aborted).await;
        }
    }
    wait_for("free slots", || server.metric("chiasm_in_flight_requests") == 0).await;
}

#[tokio::test]
async fn a_client_that_leaves_in_the_middle_of_a_stream_ends_its_request() {
    let server = Listening::with(HttpLimits::default()).await;
    server.backend().next_job(Script::tokens(&[40]));
    let mut stream =
        server.sent(completion(", \"stream\": true, \"return_token_ids\": true")).await;
    let mut seen = Vec::new();
    while !seen.windows(5).any(|seen| seen == b"data:") {
        assert_ne!(stream.read_buf(&mut seen).await.unwrap(), 0);
    }
    drop(stream);
    wait_for("abort", || server.backend().aborted() == 1).await;
}

#[tokio::test]
async fn an_answer_that_nobody_reads_ends() {
    let limits = HttpLimits { write_timeout: Duration::from_millis(200), ..HttpLimits::default() };
    let one_request = PipelineLimits { requests: Some(1), ..PipelineLimits::default() };
    let server = Listening::within(None, limits, one_request).await;
    // More than the system takes on both sides.
    let endless = (0..60_000).fold(Script::tokens(&[40]), |script, _| script.then(0, &[41]));
    server.backend().next_job(endless);
    let unread = server.sent(completion(", \"stream\": true, \"return_token_ids\": true")).await;
    wait_for("end", || server.metric("chiasm_closed_connections_total{cause=\"unread\"}") == 1)
        .await;
    wait_for("abort", || server.backend().aborted() == 1).await;
    server.backend().next_job(Script::tokens(&[40]).finish(Finish::Eos));
    assert!(server.answer(completion("")).await.starts_with("HTTP/1.1 200"), "the slot is free");
    drop(unread);
}

/// Addresses of this machine differ on Linux only.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn connections_of_one_client_do_not_keep_out_others() {
    let server = Listening::with(HttpLimits { connections: 4, ..HttpLimits::default() }).await;
    let mut silent = Vec::new();
    for _ in 0..4 {
        silent.push(server.sent("GET /hea").await);
    }
    wait_for("all places taken", || server.metric("chiasm_connections") == 4).await;
    let other = TcpSocket::new_v4().unwrap();
    other.bind((Ipv4Addr::new(127, 0, 0, 2), 0).into()).unwrap();
    let mut other = other.connect(server.address).await.unwrap();
    other.write_all(get("/health").as_bytes()).await.unwrap();
    assert!(rest(other).await.starts_with("HTTP/1.1 200"));
    assert_eq!(server.metric("chiasm_closed_connections_total{cause=\"room\"}"), 1);
    // The one that had waited longest has gone.
    assert_eq!(silent.remove(0).read(&mut [0]).await.unwrap_or(0), 0);
    // Its place is free again.
    assert!(server.answer(get("/health")).await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn who_does_not_read_keeps_out_nobody() {
    let server = Listening::with(HttpLimits { connections: 1, ..HttpLimits::default() }).await;
    // Answers of more than the system takes on both sides.
    let unread = server.sent("GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n".repeat(3000)).await;
    assert!(server.answer(get("/health")).await.starts_with("HTTP/1.1 200"));
    assert_eq!(server.metric("chiasm_closed_connections_total{cause=\"room\"}"), 1);
    drop(unread);
}

#[tokio::test]
async fn who_has_to_wait_for_a_place_gets_it() {
    let server = Listening::with(HttpLimits { connections: 2, ..HttpLimits::default() }).await;
    let mut at_work = Vec::new();
    for count in 1..=2 {
        at_work.push(server.sent(completion("")).await);
        wait_for("job", || server.backend().jobs().len() == count).await;
    }
    let waiting = [server.sent(get("/health")).await, server.sent(get("/health")).await];
    // The end of one request is the beginning of both others, one after the other.
    at_work.pop();
    for waiting in waiting {
        assert!(rest(waiting).await.starts_with("HTTP/1.1 200"));
    }
    assert_eq!(server.metric("chiasm_closed_connections_total{cause=\"room\"}"), 0);
    assert_eq!(server.backend().aborted(), 1);
}

#[tokio::test]
async fn a_request_names_one_host() {
    let server = Listening::with(HttpLimits::default()).await;
    for hosts in ["", "host: a\r\nhost: b\r\n"] {
        let answer = server
            .answer(format!("GET /health HTTP/1.1\r\n{hosts}connection: close\r\n\r\n"))
            .await;
        assert!(
            answer.starts_with("HTTP/1.1 400") && answer.contains("\"param\":\"host\""),
            "{answer}"
        );
    }
    assert!(server.answer("GET /health HTTP/1.0\r\n\r\n").await.starts_with("HTTP/1.0 200"));
}

#[tokio::test]
async fn a_head_is_not_read_without_end() {
    let server = Listening::with(HttpLimits::default()).await;
    let head = |bytes: usize| {
        get("/health").replace("host: x", &format!("host: x\r\nx: {}", "x".repeat(bytes)))
    };
    assert!(server.answer(head(BUFFER - 1000)).await.starts_with("HTTP/1.1 200"));
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    // The answer may be lost to a client that is still sending.
    let _ = stream.write_all(head(100 * BUFFER).as_bytes()).await;
    let mut answer = String::new();
    let _ = tokio::time::timeout(SOON, stream.read_to_string(&mut answer))
        .await
        .expect("the end in time");
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
}

#[tokio::test]
async fn expectations_are_met_or_refused() {
    let server = Listening::with(HttpLimits::default()).await;
    let post = |expect: &str, length: u64| {
        let head =
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nexpect";
        format!("{head}: {expect}\r\ncontent-length: {length}\r\n\r\n")
    };
    let answer = server.answer(post("fireworks\r\nconnection: close", 2) + "{}").await;
    assert!(
        answer.starts_with("HTTP/1.1 417") && answer.contains("\"param\":\"expect\""),
        "{answer}"
    );
    // A body that is too large is not invited.
    let answer = server.answer(post("100-continue", 99_000_000_000)).await;
    assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("connection: close"), "{answer}");
    // Another one is.
    let mut stream = server.sent(post("100-continue", 2)).await;
    let mut told = [0; 25];
    stream.read_exact(&mut told).await.unwrap();
    assert_eq!(&told, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(b"{}").await.unwrap();
    let answer = rest(stream).await;
    assert!(
        answer.starts_with("HTTP/1.1 400") && answer.contains("\"param\":\"prompt\""),
        "{answer}"
    );
}

#[tokio::test]
async fn slots_follow_the_workers() {
    use chiasm_backend::Capabilities;
    use chiasm_backend::fake::fake_capabilities;
    let large = FakeBackend::with(Capabilities { max_running: 700, ..fake_capabilities() });
    let server = TestServer::new(2).await;
    assert_eq!(server.slots(), 1024, "however few the engines run");
    let server = TestServer::with(vec![large, FakeBackend::new()]).await;
    assert_eq!(server.slots(), 2 * (700 + 8));
    server.test.backends[0].die(chiasm_backend::Death::new("it was unplugged"));
    wait_for("the worker to leave", || server.slots() == 1024).await;
    let limits = PipelineLimits { requests: Some(3), ..PipelineLimits::default() };
    let fixed = TestServer::limited(HttpLimits::default(), limits).await;
    assert_eq!(fixed.slots(), 3);
}
