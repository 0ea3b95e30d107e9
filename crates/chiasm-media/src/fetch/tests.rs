//! Tests of fetches from a small HTTP server in the process.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use super::*;
use crate::Fault;

mod addresses;
mod encrypted;
mod hostile;
mod reuse;

/// An origin on 127.0.0.1.
struct Origin {
    port: u16,
    connections: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Origin {
    /// Starts an origin that reads one request head per connection and passes it to `answer`.
    async fn start<F, A>(answer: F) -> Self
    where
        F: Fn(String, TcpStream) -> A + Clone + Send + Sync + 'static,
        A: Future<Output = ()> + Send + 'static,
    {
        Self::accepting(move |mut stream| {
            let answer = answer.clone();
            async move {
                if let Some(head) = read_head(&mut stream).await {
                    answer(head, stream).await;
                }
            }
        })
        .await
    }

    /// Starts an origin that passes each connection to `serve`.
    async fn accepting<F, S>(serve: F) -> Self
    where
        F: Fn(TcpStream) -> S + Send + Sync + 'static,
        S: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let connections = Arc::new(AtomicUsize::new(0));
        let counter = connections.clone();
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                counter.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(serve(stream));
            }
        });
        Self { port, connections, task }
    }

    /// Starts an origin that answers every request with `response`.
    async fn fixed(response: impl Into<Vec<u8>>) -> Self {
        let response: Arc<[u8]> = response.into().into();
        Self::start(move |_, mut stream| {
            let response = response.clone();
            async move {
                let _ = stream.write_all(&response).await;
            }
        })
        .await
    }

    fn url(&self, path: &str) -> Url {
        Url::parse(&format!("http://127.0.0.1:{}{path}", self.port)).unwrap()
    }
}

/// Reads the head of the next request. Returns `None` if the client disconnects.
async fn read_head(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    Some(String::from_utf8(head).unwrap())
}

/// The maximum size of a body in bytes.
const MAX_BODY_BYTES: u64 = 1000;

fn config() -> MediaConfig {
    MediaConfig { max_redirects: 3, allow_private_addresses: true, ..MediaConfig::default() }
}

fn fetcher(config: &MediaConfig) -> Fetcher {
    Fetcher::new(config, ByteBudget::new(1 << 20), Clock::default()).unwrap()
}

fn open_fetcher() -> Fetcher {
    fetcher(&config())
}

/// Fetches a URL without a cached answer.
async fn get(fetcher: &Fetcher, url: Url) -> Result<Bytes, MediaError> {
    match fetcher.get(url, None, MAX_BODY_BYTES).await? {
        FetchOutcome::Fetched(fetched) => Ok(fetched.bytes),
        FetchOutcome::NotModified(_) => panic!("a 304 for an unconditional request"),
    }
}

/// Returns a fetcher for which 127.0.0.1 is the public internet and every other address is
/// internal.
fn guarded_fetcher(lookup: Lookup) -> Fetcher {
    let rule = Arc::new(|address| address == IpAddr::V4(Ipv4Addr::LOCALHOST));
    Fetcher::with(&config(), ByteBudget::new(1 << 20), rule, lookup, web_roots()).unwrap()
}

/// Returns a look-up for a fixed table of names.
fn names(entries: &'static [(&'static str, &'static [&'static str])]) -> Lookup {
    Arc::new(move |host| {
        Box::pin(async move {
            let found =
                entries.iter().find(|(name, _)| *name == host).map(|(_, addresses)| *addresses);
            let addresses = found.ok_or(std::io::ErrorKind::NotFound)?;
            Ok(addresses.iter().map(|address| address.parse().unwrap()).collect())
        })
    })
}

fn no_names() -> Lookup {
    names(&[])
}

fn ok(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len())
}

fn redirect(to: &str) -> String {
    format!(
        "HTTP/1.1 302 Found\r\nlocation: {to}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    )
}

#[tokio::test]
async fn fetch_sends_a_plain_request() {
    let (sender, mut heads) = mpsc::unbounded_channel();
    let origin = Origin::start(move |head, mut stream| {
        let sender = sender.clone();
        async move {
            sender.send(head).unwrap();
            stream.write_all(ok("pixels").as_bytes()).await.unwrap();
        }
    })
    .await;
    assert_eq!(get(&open_fetcher(), origin.url("/a?b=c#d")).await.unwrap(), "pixels");
    let head = heads.recv().await.unwrap().to_ascii_lowercase();
    assert!(head.starts_with("get /a?b=c http/1.1\r\n"), "{head}");
    assert!(head.contains("user-agent: chiasm/"), "{head}");
    assert!(head.contains("accept-encoding: identity\r\n"), "{head}");
    for unwanted in ["cookie", "if-", "authorization", "referer"] {
        assert!(!head.contains(unwanted), "{head}");
    }
}

#[tokio::test]
async fn statuses_become_faults() {
    for (status, fault) in [
        (404, Fault::NotFound),
        (410, Fault::NotFound),
        (403, Fault::OriginFailed),
        (500, Fault::OriginFailed),
        (503, Fault::OriginFailed),
        (504, Fault::OriginTimeout),
        (304, Fault::OriginFailed),
        (204, Fault::OriginFailed),
        (206, Fault::OriginFailed),
        (302, Fault::OriginFailed),
        (999, Fault::OriginFailed),
    ] {
        let origin =
            Origin::fixed(format!("HTTP/1.1 {status} Secret\r\ncontent-length: 6\r\n\r\nsecret"))
                .await;
        let error = get(&open_fetcher(), origin.url("/")).await.unwrap_err();
        assert_eq!(error, MediaError::OriginStatus { status });
        assert_eq!(error.fault(), fault);
        assert!(!error.to_string().contains("ecret"));
    }
}

#[tokio::test]
async fn body_of_exactly_the_limit_is_fetched() {
    for body in ["y".repeat(999), "y".repeat(1000)] {
        let origin = Origin::fixed(ok(&body)).await;
        assert_eq!(get(&open_fetcher(), origin.url("/")).await.unwrap(), body);
    }
}

#[tokio::test]
async fn redirects_are_followed_up_to_the_limit() {
    let origin = Origin::start(|head, mut stream| async move {
        let count: usize = head[5..6].parse().unwrap();
        let answer = if count == 0 { ok("there") } else { redirect(&format!("/{}", count - 1)) };
        stream.write_all(answer.as_bytes()).await.unwrap();
    })
    .await;
    assert_eq!(get(&open_fetcher(), origin.url("/3")).await.unwrap(), "there");
    let error = get(&open_fetcher(), origin.url("/4")).await.unwrap_err();
    assert_eq!(error, MediaError::TooManyRedirects { limit: 3 });
}

#[tokio::test]
async fn refused_connection_is_the_origins_fault() {
    let port = {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        listener.local_addr().unwrap().port()
    };
    let error = get(&open_fetcher(), Url::parse(&format!("http://127.0.0.1:{port}/")).unwrap())
        .await
        .unwrap_err();
    assert_eq!(error, MediaError::OriginFailed);
    assert!(!error.to_string().contains("127"));
}

#[tokio::test]
async fn failed_tls_handshake_is_the_origins_fault() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let origin = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.read_u8().await.unwrap();
        stream.write_all(b"no tls here").await.unwrap();
    });
    let url = Url::parse(&format!("https://127.0.0.1:{port}/")).unwrap();
    let fetcher = guarded_fetcher(no_names());
    assert_eq!(get(&fetcher, url).await.unwrap_err(), MediaError::OriginFailed);
    origin.await.unwrap();
}
