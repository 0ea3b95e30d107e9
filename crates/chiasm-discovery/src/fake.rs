//! A scripted HTTP server for tests, for behaviour that real servers rarely show.

use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::NamedAgents;

/// The timeout for anything in a test.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Waits until the named agents satisfy `condition`.
pub(crate) async fn wait_until(
    named: &mut watch::Receiver<NamedAgents>,
    condition: impl Fn(&NamedAgents) -> bool,
) -> NamedAgents {
    let found =
        timeout(TEST_TIMEOUT, async { named.wait_for(condition).await.unwrap().clone() }).await;
    found.unwrap_or_else(|_| panic!("the condition never held: {:?}", named.borrow()))
}

/// Returns a condition: exactly `addresses` are named, and the source answers.
pub(crate) fn exactly(addresses: &[&str]) -> impl Fn(&NamedAgents) -> bool {
    move |named| named.is_current && named.addresses.iter().eq(addresses)
}

/// Returns a condition: exactly `addresses` are named, and the source does not answer.
pub(crate) fn stale(addresses: &[&str]) -> impl Fn(&NamedAgents) -> bool {
    move |named| !named.is_current && named.addresses.iter().eq(addresses)
}

/// An HTTP/1.1 server on a loopback port, with one request per connection.
pub(crate) struct FakeServer {
    listener: TcpListener,
}

/// A request that has not been answered yet.
pub(crate) struct FakeRequest {
    stream: TcpStream,
    /// The method and the target.
    pub(crate) line: String,
    /// The head in lower case.
    pub(crate) head: String,
    pub(crate) body: String,
}

/// A response whose body is streamed. Dropping it cuts the connection.
pub(crate) struct FakeStream(TcpStream);

impl FakeServer {
    pub(crate) async fn new() -> Self {
        Self { listener: TcpListener::bind("127.0.0.1:0").await.unwrap() }
    }

    pub(crate) fn address(&self) -> String {
        self.listener.local_addr().unwrap().to_string()
    }

    /// Waits for the next request.
    pub(crate) async fn next_request(&self) -> FakeRequest {
        let accepted = timeout(TEST_TIMEOUT, self.listener.accept()).await;
        let mut stream = accepted.expect("no request arrives").unwrap().0;
        let mut bytes = Vec::new();
        let end = loop {
            assert_ne!(stream.read_buf(&mut bytes).await.unwrap(), 0, "a request without an end");
            if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
                break end + 4;
            }
        };
        let head = str::from_utf8(&bytes[..end]).unwrap();
        let line = head.lines().next().unwrap().trim_end_matches(" HTTP/1.1").to_owned();
        let head = head.to_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.map_or(0, |length| length.parse().unwrap());
        while bytes.len() < end + length {
            assert_ne!(stream.read_buf(&mut bytes).await.unwrap(), 0, "a body without an end");
        }
        let body = String::from_utf8(bytes.split_off(end)).unwrap();
        FakeRequest { stream, line, head, body }
    }
}

impl FakeRequest {
    pub(crate) async fn respond(self, body: &Value) {
        self.respond_with(200, &body.to_string()).await;
    }

    pub(crate) async fn respond_with(mut self, status: u16, body: &str) {
        let head = format!(
            "HTTP/1.1 {status} Whatever\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        // The client may have closed the connection.
        let _ = self.stream.write_all((head + body).as_bytes()).await;
    }

    /// Begins a streamed response.
    pub(crate) async fn begin_stream(mut self) -> FakeStream {
        self.stream
            .write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            .await
            .unwrap();
        FakeStream(self.stream)
    }
}

impl FakeStream {
    /// Sends a line in two chunks.
    pub(crate) async fn line(&mut self, line: &Value) {
        let line = line.to_string() + "\n";
        let (left, right) = line.split_at(line.len() / 2);
        self.piece(left).await;
        self.piece(right).await;
    }

    /// Sends any text as one chunk.
    pub(crate) async fn piece(&mut self, piece: &str) {
        let chunk = format!("{:x}\r\n{piece}\r\n", piece.len());
        // The client may have closed the connection.
        let _ = self.0.write_all(chunk.as_bytes()).await;
    }

    /// Ends the body properly.
    pub(crate) async fn end(mut self) {
        self.0.write_all(b"0\r\n\r\n").await.unwrap();
    }

    /// Waits until the client closes the connection.
    pub(crate) async fn closed(mut self) {
        let mut rest = Vec::new();
        let closed = timeout(TEST_TIMEOUT, self.0.read_to_end(&mut rest)).await;
        let _ = closed.expect("the connection is never closed");
    }
}
