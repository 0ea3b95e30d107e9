use futures_util::FutureExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::*;

#[tokio::test]
async fn stream_yields_after_its_read_quota() {
    let mut stream = YieldingStream {
        stream: tokio::io::repeat(b'0'),
        read: 0,
        progress: ReadProgress::default(),
    };
    let mut piece = vec![0; READ_QUOTA_BYTES / 2];
    for _ in 0..3 {
        for _ in 0..2 {
            assert_eq!(stream.read(&mut piece).now_or_never().unwrap().unwrap(), piece.len());
        }
        assert!(stream.read(&mut piece).now_or_never().is_none());
    }
    // The stream wakes its own task, and fails once too many bytes bring no answer.
    stream.read_exact(&mut vec![0; MAX_UNPRODUCTIVE_BYTES / 2]).await.unwrap();
    stream.progress.unproductive_bytes.store(0, Relaxed);
    stream.read_exact(&mut vec![0; MAX_UNPRODUCTIVE_BYTES]).await.unwrap();
    stream.read_exact(&mut vec![0; READ_QUOTA_BYTES]).await.unwrap_err();
}

/// A complete answer that leaves the connection open.
const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// A server that plays one script per connection: one text per request, then it closes.
struct ScriptedServer {
    url: String,
    /// One message per request.
    requests: mpsc::UnboundedReceiver<()>,
    serving: JoinSet<()>,
}

impl ScriptedServer {
    /// Starts a server that accepts one connection per script.
    async fn start(scripts: &'static [&'static [&'static str]]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let (sender, requests) = mpsc::unbounded_channel();
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            for script in scripts {
                let (mut stream, _) = listener.accept().await.unwrap();
                for answer in *script {
                    let mut request = Vec::new();
                    while !request.ends_with(b"body") {
                        stream.read_buf(&mut request).await.unwrap();
                    }
                    sender.send(()).unwrap();
                    stream.write_all(answer.as_bytes()).await.unwrap();
                }
            }
        });
        Self { url, requests, serving }
    }

    async fn send(&self, client: &Client) -> Result<(), SendError> {
        let request = Request::post(&self.url).body(Bytes::from_static(b"body")).unwrap();
        let answer = client.send(request).await?;
        assert_eq!(answer.text().await.unwrap(), "ok");
        Ok(())
    }

    /// Stops the server and returns the number of requests it received.
    async fn stop(mut self) -> usize {
        self.serving.shutdown().await;
        let mut count = 0;
        while self.requests.recv().await.is_some() {
            count += 1;
        }
        count
    }
}

fn plain_client() -> Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    build_client(
        ClientConfig::builder()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth(),
    )
}

#[tokio::test]
async fn request_on_closed_idle_connection_is_sent_again() {
    let server = ScriptedServer::start(&[&[OK, ""], &[OK]]).await;
    let client = plain_client();
    server.send(&client).await.unwrap();
    server.send(&client).await.unwrap();
    assert_eq!(server.stop().await, 3);
}

#[tokio::test]
async fn second_end_without_answer_is_a_loss() {
    let server = ScriptedServer::start(&[&[OK, ""], &[""], &[OK]]).await;
    let client = plain_client();
    server.send(&client).await.unwrap();
    assert!(matches!(server.send(&client).await, Err(SendError::Lost(_))));
    assert_eq!(server.stop().await, 3, "a request is sent at most twice");
}

#[tokio::test]
async fn request_that_kills_server_is_a_loss() {
    let server = ScriptedServer::start(&[&[OK, ""]]).await;
    let client = plain_client();
    server.send(&client).await.unwrap();
    // The server reads the second request, closes the connection and stops listening.
    assert!(matches!(server.send(&client).await, Err(SendError::Lost(_))));
    assert!(matches!(server.send(&client).await, Err(SendError::NotConnected(_))));
    assert_eq!(server.stop().await, 2);
}

#[tokio::test]
async fn fresh_connection_that_closes_is_a_loss() {
    let server = ScriptedServer::start(&[&[""], &[OK]]).await;
    assert!(matches!(server.send(&plain_client()).await, Err(SendError::Lost(_))));
    assert_eq!(server.stop().await, 1);
}

#[tokio::test]
async fn answer_cut_in_its_head_is_a_loss() {
    let server = ScriptedServer::start(&[&[OK, "HTTP/1.1 2"], &[OK]]).await;
    let client = plain_client();
    server.send(&client).await.unwrap();
    assert!(matches!(server.send(&client).await, Err(SendError::Lost(_))));
    assert_eq!(server.stop().await, 2);
}
