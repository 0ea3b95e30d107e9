//! A server whose every answer a test gives itself, for what real servers do only by accident.

use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::Named;

/// So long may anything take in a test before it has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until what is named is as it should be.
pub(crate) async fn until(
    named: &mut watch::Receiver<Named>,
    what: impl Fn(&Named) -> bool,
) -> Named {
    let found = timeout(PATIENCE, async { named.wait_for(what).await.unwrap().clone() }).await;
    found.unwrap_or_else(|_| panic!("it never was as it should be: {:?}", named.borrow()))
}

/// Whether exactly these are named, by a source that answers.
pub(crate) fn exactly(addresses: &[&str]) -> impl Fn(&Named) -> bool {
    move |named| named.is_current && named.addresses.iter().eq(addresses)
}

/// Whether exactly these were named, by a source that does not answer now.
pub(crate) fn once(addresses: &[&str]) -> impl Fn(&Named) -> bool {
    move |named| !named.is_current && named.addresses.iter().eq(addresses)
}

/// HTTP/1.1 on a loopback port, one request for each connection.
pub(crate) struct Fake {
    listener: TcpListener,
}

/// A request that waits for its answer.
pub(crate) struct Asked {
    stream: TcpStream,
    /// Method and target.
    pub(crate) line: String,
    /// The head, lower-case.
    pub(crate) head: String,
    pub(crate) body: String,
}

/// An answer that goes on.
pub(crate) struct Answering(TcpStream);

impl Fake {
    pub(crate) async fn new() -> Self {
        Self { listener: TcpListener::bind("127.0.0.1:0").await.unwrap() }
    }

    pub(crate) fn address(&self) -> String {
        self.listener.local_addr().unwrap().to_string()
    }

    /// The next request.
    pub(crate) async fn asked(&self) -> Asked {
        let mut stream =
            timeout(PATIENCE, self.listener.accept()).await.expect("nobody asks").unwrap().0;
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
        Asked { stream, line, head, body }
    }
}

impl Asked {
    pub(crate) async fn answer(self, body: &Value) {
        self.answer_with(200, &body.to_string()).await;
    }

    pub(crate) async fn answer_with(mut self, status: u16, body: &str) {
        let head = format!(
            "HTTP/1.1 {status} Whatever\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        // Who asked may be gone.
        let _ = self.stream.write_all((head + body).as_bytes()).await;
    }

    /// Begins an answer that goes on.
    pub(crate) async fn begin(mut self) -> Answering {
        self.stream
            .write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            .await
            .unwrap();
        Answering(self.stream)
    }
}

impl Answering {
    /// Sends a line, in two chunks.
    pub(crate) async fn line(&mut self, line: &Value) {
        let line = line.to_string() + "\n";
        let (left, right) = line.split_at(line.len() / 2);
        self.piece(left).await;
        self.piece(right).await;
    }

    /// Sends anything as one chunk.
    pub(crate) async fn piece(&mut self, piece: &str) {
        let chunk = format!("{:x}\r\n{piece}\r\n", piece.len());
        // Who asked may have had enough.
        let _ = self.0.write_all(chunk.as_bytes()).await;
    }

    /// Ends it in good order. Dropping it cuts it off.
    pub(crate) async fn end(mut self) {
        self.0.write_all(b"0\r\n\r\n").await.unwrap();
    }

    /// Waits until who asked has closed the connection.
    pub(crate) async fn closed(mut self) {
        let mut rest = Vec::new();
        let _ = timeout(PATIENCE, self.0.read_to_end(&mut rest)).await.expect("it is never closed");
    }
}
