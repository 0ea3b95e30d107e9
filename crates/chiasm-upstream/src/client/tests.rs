use futures_util::FutureExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::*;

#[tokio::test]
async fn others_have_their_turn_behind_so_many_bytes() {
    let mut stream =
        InTurns { stream: tokio::io::repeat(b'0'), read: 0, reading: Reading::default() };
    let mut piece = vec![0; READ_IN_TURN / 2];
    for _ in 0..3 {
        for _ in 0..2 {
            assert_eq!(stream.read(&mut piece).now_or_never().unwrap().unwrap(), piece.len());
        }
        assert!(stream.read(&mut piece).now_or_never().is_none());
    }
    // It is woken by itself, and ends where nothing comes of it.
    stream.read_exact(&mut vec![0; FOR_NOTHING / 2]).await.unwrap();
    stream.reading.for_nothing.store(0, Relaxed);
    stream.read_exact(&mut vec![0; FOR_NOTHING]).await.unwrap();
    stream.read_exact(&mut vec![0; READ_IN_TURN]).await.unwrap_err();
}

/// A complete answer that leaves the connection open.
const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// A server whose connections each answer with the texts of one script, one per request, and close.
struct Scripted {
    url: String,
    /// One message per request.
    requests: mpsc::UnboundedReceiver<()>,
    serving: JoinSet<()>,
}

impl Scripted {
    /// After the last script no connection is accepted.
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

    async fn ask(&self, client: &Client) -> Result<(), SendError> {
        let request = Request::post(&self.url).body(Bytes::from_static(b"body")).unwrap();
        let answer = client.send(request).await?;
        assert_eq!(answer.text().await.unwrap(), "ok");
        Ok(())
    }

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
    client(
        ClientConfig::builder()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth(),
    )
}

#[tokio::test]
async fn request_on_closed_idle_connection_is_sent_again() {
    let server = Scripted::start(&[&[OK, ""], &[OK]]).await;
    let client = plain_client();
    server.ask(&client).await.unwrap();
    server.ask(&client).await.unwrap();
    assert_eq!(server.stop().await, 3);
}

#[tokio::test]
async fn second_end_without_an_answer_is_a_loss() {
    let server = Scripted::start(&[&[OK, ""], &[""], &[OK]]).await;
    let client = plain_client();
    server.ask(&client).await.unwrap();
    assert!(matches!(server.ask(&client).await, Err(SendError::Lost(_))));
    assert_eq!(server.stop().await, 3, "it visits a server twice at most");
}

#[tokio::test]
async fn server_that_dies_of_a_request_is_a_loss() {
    let server = Scripted::start(&[&[OK, ""]]).await;
    let client = plain_client();
    server.ask(&client).await.unwrap();
    // The second request is read, the connection closed, and nobody listens any more.
    assert!(matches!(server.ask(&client).await, Err(SendError::Lost(_))));
    assert!(matches!(server.ask(&client).await, Err(SendError::NotConnected(_))));
    assert_eq!(server.stop().await, 2);
}

#[tokio::test]
async fn fresh_connection_that_closes_is_a_loss() {
    let server = Scripted::start(&[&[""], &[OK]]).await;
    assert!(matches!(server.ask(&plain_client()).await, Err(SendError::Lost(_))));
    assert_eq!(server.stop().await, 1);
}

#[tokio::test]
async fn answer_cut_in_its_head_is_a_loss() {
    let server = Scripted::start(&[&[OK, "HTTP/1.1 2"], &[OK]]).await;
    let client = plain_client();
    server.ask(&client).await.unwrap();
    assert!(matches!(server.ask(&client).await, Err(SendError::Lost(_))));
    assert_eq!(server.stop().await, 2);
}
