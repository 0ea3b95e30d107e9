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

/// A timeout longer than anything here takes on a busy machine, and shorter than the timeouts under
/// test.
const SOON: Duration = Duration::from_secs(30);

/// A listening frontend in front of one fake backend.
struct TestListener {
    address: SocketAddr,
    server: TestServer,
    _stop: oneshot::Sender<()>,
}

impl TestListener {
    async fn with_limits(limits: HttpLimits) -> Self {
        Self::start(None, limits, PipelineLimits::default()).await
    }

    /// Starts a frontend; with TLS if there is a certificate.
    async fn start(
        certificate: Option<Arc<Certificate>>,
        http: HttpLimits,
        pipeline: PipelineLimits,
    ) -> Self {
        let server = TestServer::with_limits(http, pipeline).await;
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

    /// Opens a connection and sends these bytes.
    async fn send(&self, bytes: impl AsRef<[u8]>) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(bytes.as_ref()).await.unwrap();
        stream
    }

    /// Sends a request and returns everything received until the connection is closed.
    async fn answer(&self, request: impl AsRef<[u8]>) -> String {
        read_to_end(self.send(request).await).await
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

/// Reads until the connection is closed.
async fn read_to_end(mut stream: impl AsyncRead + Unpin) -> String {
    let mut answer = String::new();
    tokio::time::timeout(SOON, stream.read_to_string(&mut answer))
        .await
        .expect("should end in time")
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

/// Returns a completion request with these fields added, which has the connection closed after the
/// answer.
fn completion(fields: &str) -> String {
    let body = format!("{{\"prompt\": \"the quick brown fox\"{fields}}}");
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\n\
                content-type: application/json\r\nconnection: close";
    format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
}

#[tokio::test]
async fn incomplete_body_holds_no_slot() {
    let one_request = PipelineLimits { requests: Some(1), ..PipelineLimits::default() };
    let server = TestListener::start(None, HttpLimits::default(), one_request).await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\n\
                content-type: application/json\r\ncontent-length: 5000\r\n\r\n";
    let mut slow = Vec::new();
    for _ in 0..3 {
        slow.push(server.send(format!("{head}{}", " ".repeat(1000))).await);
    }
    wait_for("received bytes", || server.server.test.pipeline.media.budget().held() >= 3000).await;
    server.backend().next_job(Script::tokens(&[40]).finish(Finish::Eos));
    let answer = server.answer(completion("")).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(server.metric("chiasm_in_flight_requests"), 0);
}

#[tokio::test]
async fn half_closed_client_gets_immediate_answers() {
    let server = TestListener::with_limits(HttpLimits::default()).await;
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
        // This body takes a while to parse, so that the client's end of stream arrives first.
        (post("content-type: application/json\r\n", &"{".repeat(1_000_000)), 400),
    ] {
        let mut stream = server.send(&request).await;
        stream.shutdown().await.unwrap();
        let answer = read_to_end(stream).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{:.200}: {answer}", request);
    }
}

#[tokio::test]
async fn disconnect_aborts_request() {
    let server = TestListener::with_limits(HttpLimits::default()).await;
    for (round, fields) in ["", ", \"stream\": true"].into_iter().enumerate() {
        for (half, aborted) in [(false, 2 * round + 1), (true, 2 * round + 2)] {
            let mut stream = server.send(completion(fields)).await;
            wait_for("job", || server.backend().jobs().len() == aborted).await;
            // A half-closed connection can't be told from a closed one.
            if half {
                stream.shutdown().await.unwrap();
                assert_eq!(read_to_end(stream).await.matches("HTTP/1.1 2").count(), 0);
            } else {
                drop(stream);
            }
            wait_for("abort", || server.backend().aborted() == aborted).await;
        }
    }
    wait_for("free slots", || server.metric("chiasm_in_flight_requests") == 0).await;
}

#[tokio::test]
async fn disconnect_in_mid_stream_aborts_request() {
    let server = TestListener::with_limits(HttpLimits::default()).await;
    server.backend().next_job(Script::tokens(&[40]));
    let mut stream =
        server.send(completion(", \"stream\": true, \"return_token_ids\": true")).await;
    let mut seen = Vec::new();
    while !seen.windows(5).any(|seen| seen == b"data:") {
        assert_ne!(stream.read_buf(&mut seen).await.unwrap(), 0);
    }
    drop(stream);
    wait_for("abort", || server.backend().aborted() == 1).await;
}

#[tokio::test]
async fn unread_answer_is_aborted() {
    let limits = HttpLimits { write_timeout: Duration::from_millis(200), ..HttpLimits::default() };
    let one_request = PipelineLimits { requests: Some(1), ..PipelineLimits::default() };
    let server = TestListener::start(None, limits, one_request).await;
    // More than both sockets' buffers hold.
    let endless = (0..60_000).fold(Script::tokens(&[40]), |script, _| script.then(0, &[41]));
    server.backend().next_job(endless);
    let unread = server.send(completion(", \"stream\": true, \"return_token_ids\": true")).await;
    wait_for("end", || server.metric("chiasm_closed_connections_total{cause=\"unread\"}") == 1)
        .await;
    wait_for("abort", || server.backend().aborted() == 1).await;
    server.backend().next_job(Script::tokens(&[40]).finish(Finish::Eos));
    assert!(server.answer(completion("")).await.starts_with("HTTP/1.1 200"), "the slot is free");
    drop(unread);
}

/// Only Linux has several loopback addresses by default.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn silent_connections_make_room_for_other_clients() {
    let server =
        TestListener::with_limits(HttpLimits { connections: 4, ..HttpLimits::default() }).await;
    let mut silent = Vec::new();
    for _ in 0..4 {
        silent.push(server.send("GET /hea").await);
    }
    wait_for("all slots taken", || server.metric("chiasm_connections") == 4).await;
    let other = TcpSocket::new_v4().unwrap();
    other.bind((Ipv4Addr::new(127, 0, 0, 2), 0).into()).unwrap();
    let mut other = other.connect(server.address).await.unwrap();
    other.write_all(get("/health").as_bytes()).await.unwrap();
    assert!(read_to_end(other).await.starts_with("HTTP/1.1 200"));
    assert_eq!(server.metric("chiasm_closed_connections_total{cause=\"room\"}"), 1);
    // The connection that had waited longest was closed.
    assert_eq!(silent.remove(0).read(&mut [0]).await.unwrap_or(0), 0);
    // Its slot is free again.
    assert!(server.answer(get("/health")).await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn unread_connection_makes_room_for_others() {
    let server =
        TestListener::with_limits(HttpLimits { connections: 1, ..HttpLimits::default() }).await;
    // Answers that exceed both sockets' buffers.
    let unread = server.send("GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n".repeat(3000)).await;
    assert!(server.answer(get("/health")).await.starts_with("HTTP/1.1 200"));
    assert_eq!(server.metric("chiasm_closed_connections_total{cause=\"room\"}"), 1);
    drop(unread);
}

#[tokio::test]
async fn pending_connections_get_freed_slots() {
    let server =
        TestListener::with_limits(HttpLimits { connections: 2, ..HttpLimits::default() }).await;
    let mut engaged = Vec::new();
    for count in 1..=2 {
        engaged.push(server.send(completion("")).await);
        wait_for("job", || server.backend().jobs().len() == count).await;
    }
    let waiting = [server.send(get("/health")).await, server.send(get("/health")).await];
    // The end of one request lets in both waiting connections, one after the other.
    engaged.pop();
    for waiting in waiting {
        assert!(read_to_end(waiting).await.starts_with("HTTP/1.1 200"));
    }
    assert_eq!(server.metric("chiasm_closed_connections_total{cause=\"room\"}"), 0);
    assert_eq!(server.backend().aborted(), 1);
}

#[tokio::test]
async fn missing_or_repeated_host_is_refused() {
    let server = TestListener::with_limits(HttpLimits::default()).await;
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
async fn endless_head_is_refused() {
    let server = TestListener::with_limits(HttpLimits::default()).await;
    let head = |bytes: usize| {
        get("/health").replace("host: x", &format!("host: x\r\nx: {}", "x".repeat(bytes)))
    };
    assert!(server.answer(head(MAX_HEAD_BYTES - 1000)).await.starts_with("HTTP/1.1 200"));
    let answer = server.answer(head(MAX_HEAD_BYTES)).await;
    assert!(
        answer.starts_with("HTTP/1.1 431") && answer.contains("more than 65536 bytes"),
        "{answer}"
    );
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    // The answer may be lost to a client that is still sending.
    let _ = stream.write_all(head(100 * READ_BUFFER_BYTES).as_bytes()).await;
    let mut answer = String::new();
    let _ = tokio::time::timeout(SOON, stream.read_to_string(&mut answer))
        .await
        .expect("should end in time");
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
}

#[tokio::test]
async fn over_100_header_lines_are_refused() {
    let server = TestListener::with_limits(HttpLimits::default()).await;
    // With `host` and `connection`.
    let head = |more: usize| {
        get("/health").replace("host: x", &format!("host: x{}", "\r\na: b".repeat(more)))
    };
    assert!(server.answer(head(98)).await.starts_with("HTTP/1.1 200"));
    assert!(server.answer(head(99)).await.starts_with("HTTP/1.1 431"));
}

#[tokio::test]
async fn wrong_path_or_method_is_named() {
    let server = TestListener::with_limits(HttpLimits::default()).await;
    let long = format!("/{}", "x".repeat(10_000));
    for (request, status, message) in [
        (get("/nowhere"), 404, "there is no path '/nowhere'; docs/api.md lists the paths"),
        (get(&long), 404, "xxx…'; docs/api.md"),
        (
            get("/v1/load_lora_adapter"),
            404,
            "'/v1/load_lora_adapter' needs --allow-runtime-lora-updating",
        ),
        (get("/v1/completions"), 405, "this path does not support GET; it supports POST"),
        (
            get("/health").replace("GET", "PUT"),
            405,
            "this path does not support PUT; it supports GET, HEAD",
        ),
    ] {
        let answer = server.answer(request).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
        assert!(answer.contains(message) && answer.len() < 1000, "{answer}");
        assert_eq!(answer.contains("\r\nallow: "), status == 405, "{answer}");
    }
}

#[tokio::test]
async fn expectation_is_met_or_refused() {
    let server = TestListener::with_limits(HttpLimits::default()).await;
    let post = |expect: &str, length: u64| {
        let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\n\
                    content-type: application/json\r\nexpect";
        format!("{head}: {expect}\r\ncontent-length: {length}\r\n\r\n")
    };
    let answer = server.answer(post("fireworks\r\nconnection: close", 2) + "{}").await;
    assert!(
        answer.starts_with("HTTP/1.1 417") && answer.contains("\"param\":\"expect\""),
        "{answer}"
    );
    // A body that is too large gets no `100 Continue`.
    let answer = server.answer(post("100-continue", 99_000_000_000)).await;
    assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("connection: close"), "{answer}");
    // A small body gets `100 Continue`.
    let mut stream = server.send(post("100-continue", 2)).await;
    let mut interim = [0; 25];
    stream.read_exact(&mut interim).await.unwrap();
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(b"{}").await.unwrap();
    let answer = read_to_end(stream).await;
    assert!(
        answer.starts_with("HTTP/1.1 400") && answer.contains("\"param\":\"prompt\""),
        "{answer}"
    );
}

#[tokio::test]
async fn slots_follow_the_workers() {
    use chiasm_backend::Capabilities;
    use chiasm_backend::fake::fake_capabilities;
    let large =
        FakeBackend::with_capabilities(Capabilities { max_running: 700, ..fake_capabilities() });
    let server = TestServer::new(2).await;
    assert_eq!(server.slots(), 1024, "the minimum, although the engines run fewer");
    let server = TestServer::with_backends(vec![large, FakeBackend::new()]).await;
    assert_eq!(server.slots(), 2 * (700 + 8));
    server.test.backends[0].die(chiasm_backend::DeathReason::new("it was unplugged"));
    wait_for("the worker to leave", || server.slots() == 1024).await;
    let limits = PipelineLimits { requests: Some(3), ..PipelineLimits::default() };
    let fixed = TestServer::with_limits(HttpLimits::default(), limits).await;
    assert_eq!(fixed.slots(), 3);
}
