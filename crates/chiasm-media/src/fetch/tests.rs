//! Against a small HTTP server in the process.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use super::*;
use crate::Fault;

/// An origin on 127.0.0.1 that answers every connection with what `answer` makes of the request's head.
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
    async fn start<F, A>(answer: F) -> Self
    where
        F: Fn(String, TcpStream) -> A + Clone + Send + Sync + 'static,
        A: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let connections = Arc::new(AtomicUsize::new(0));
        let counter = connections.clone();
        let task = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                counter.fetch_add(1, Ordering::SeqCst);
                let answer = answer.clone();
                tokio::spawn(async move {
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") {
                        match stream.read_u8().await {
                            Ok(byte) => head.push(byte),
                            Err(_) => return,
                        }
                    }
                    answer(String::from_utf8(head).unwrap(), stream).await;
                });
            }
        });
        Self { port, connections, task }
    }

    /// An origin that always answers the same.
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

fn config() -> MediaConfig {
    MediaConfig { max_bytes: 1000, max_redirects: 3, allow_private_addresses: true, ..MediaConfig::default() }
}

fn fetcher(config: &MediaConfig) -> Fetcher {
    Fetcher::new(config, ByteBudget::new(1 << 20)).unwrap()
}

fn open_fetcher() -> Fetcher {
    fetcher(&config())
}

/// What a fetch that knows nothing yet gives.
async fn get(fetcher: &Fetcher, url: Url) -> Result<Bytes, MediaError> {
    match fetcher.get(url, None).await? {
        Answer::New(fetched) => Ok(fetched.bytes),
        Answer::NotModified(_) => panic!("nobody asked whether it was modified"),
    }
}

/// 127.0.0.1 stands for the public internet, everything else for what is behind the firewall.
fn guarded_fetcher(lookup: Lookup) -> Fetcher {
    let rule = Arc::new(|address| address == IpAddr::V4(Ipv4Addr::LOCALHOST));
    Fetcher::with(&config(), ByteBudget::new(1 << 20), rule, lookup, web_roots()).unwrap()
}

fn names(entries: &'static [(&'static str, &'static [&'static str])]) -> Lookup {
    Arc::new(move |host| {
        Box::pin(async move {
            let found = entries.iter().find(|(name, _)| *name == host).map(|(_, addresses)| *addresses);
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
    format!("HTTP/1.1 302 Found\r\nlocation: {to}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
}

#[tokio::test]
async fn a_body_is_fetched_with_a_plain_request() {
    let (heads, mut seen) = mpsc::unbounded_channel();
    let origin = Origin::start(move |head, mut stream| {
        let heads = heads.clone();
        async move {
            heads.send(head).unwrap();
            stream.write_all(ok("pixels").as_bytes()).await.unwrap();
        }
    })
    .await;
    assert_eq!(get(&open_fetcher(), origin.url("/a?b=c#d")).await.unwrap(), "pixels");
    let head = seen.recv().await.unwrap().to_ascii_lowercase();
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
    ] {
        let origin = Origin::fixed(format!("HTTP/1.1 {status} Secret\r\ncontent-length: 6\r\n\r\nsecret")).await;
        let error = get(&open_fetcher(), origin.url("/")).await.unwrap_err();
        assert_eq!(error, MediaError::OriginStatus { status });
        assert_eq!(error.fault(), fault);
        assert!(!error.to_string().contains("ecret"));
    }
}

#[tokio::test]
async fn an_announced_length_over_the_limit_is_refused_unread() {
    let origin = Origin::fixed("HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n").await;
    let error = get(&open_fetcher(), origin.url("/")).await.unwrap_err();
    assert_eq!(error, MediaError::TooManyBytes { limit: 1000 });
}

#[tokio::test]
async fn an_endless_body_is_dropped_at_the_limit() {
    let (closed, mut seen) = mpsc::unbounded_channel();
    let origin = Origin::start(move |_, mut stream| {
        let closed = closed.clone();
        async move {
            stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await.unwrap();
            let mut sent = 0u64;
            while stream.write_all(b"64\r\n").await.is_ok()
                && stream.write_all(&[b'x'; 100]).await.is_ok()
                && stream.write_all(b"\r\n").await.is_ok()
            {
                sent += 100;
            }
            closed.send(sent).unwrap();
        }
    })
    .await;
    let error = get(&open_fetcher(), origin.url("/")).await.unwrap_err();
    assert_eq!(error, MediaError::TooManyBytes { limit: 1000 });
    // The origin notices, after what the socket's buffers took.
    let sent = seen.recv().await.unwrap();
    assert!(sent < 64 << 20, "{sent} bytes were taken");
}

#[tokio::test]
async fn a_body_of_just_the_limit_is_fine() {
    for body in ["y".repeat(999), "y".repeat(1000)] {
        let origin = Origin::fixed(ok(&body)).await;
        assert_eq!(get(&open_fetcher(), origin.url("/")).await.unwrap(), body);
    }
}

#[tokio::test]
async fn a_body_that_breaks_off_is_an_error() {
    let origin = Origin::fixed("HTTP/1.1 200 OK\r\ncontent-length: 100\r\nconnection: close\r\n\r\nhalf").await;
    let error = get(&open_fetcher(), origin.url("/")).await.unwrap_err();
    assert_eq!(error, MediaError::OriginFailed);
}

#[tokio::test]
async fn compressed_bodies_are_refused_unread() {
    for (encoding, expected) in [
        ("gzip", Err(MediaError::OriginEncoding)),
        ("identity, br", Err(MediaError::OriginEncoding)),
        ("identity\r\ncontent-encoding: gzip", Err(MediaError::OriginEncoding)),
        ("Identity", Ok(Bytes::from("raw"))),
        ("", Ok(Bytes::from("raw"))),
    ] {
        let head = format!("HTTP/1.1 200 OK\r\ncontent-encoding: {encoding}\r\ncontent-length: 3\r\n\r\n");
        let origin = Origin::fixed(head + "raw").await;
        assert_eq!(get(&open_fetcher(), origin.url("/")).await, expected, "{encoding}");
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
async fn every_hop_is_checked() {
    for (target, expected) in [
        ("http://127.0.0.2/", MediaError::AddressForbidden),
        ("http://[::1]/", MediaError::AddressForbidden),
        ("//0x7f000002/", MediaError::AddressForbidden),
        ("http://inside.test/", MediaError::AddressForbidden),
        ("http://user:secret@127.0.0.1/", MediaError::InvalidRedirect),
        ("file:///etc/passwd", MediaError::InvalidRedirect),
        ("ftp://127.0.0.1/", MediaError::InvalidRedirect),
        ("http://", MediaError::InvalidRedirect),
    ] {
        let origin = Origin::fixed(redirect(target)).await;
        let fetcher = guarded_fetcher(names(&[("inside.test", &["10.0.0.7", "127.0.0.2"])]));
        assert_eq!(get(&fetcher, origin.url("/")).await.unwrap_err(), expected, "{target}");
    }
}

#[tokio::test]
async fn names_are_bound_to_allowed_addresses() {
    let origin = Origin::fixed(ok("public")).await;
    let entries: &[(&str, &[&str])] = &[
        ("public.test", &["127.0.0.1"]),
        ("mixed.test", &["127.0.0.2", "127.0.0.1"]),
        ("private.test", &["127.0.0.2"]),
        ("empty.test", &[]),
    ];
    let fetcher = guarded_fetcher(names(entries));
    let from = |host: &str| get(&fetcher, Url::parse(&format!("http://{host}:{}/", origin.port)).unwrap());
    assert_eq!(from("public.test").await.unwrap(), "public");
    assert_eq!(from("mixed.test").await.unwrap(), "public");
    assert_eq!(origin.connections.load(Ordering::SeqCst), 2);
    let error = from("private.test").await.unwrap_err();
    assert_eq!(error, MediaError::AddressForbidden);
    assert!(!error.to_string().contains("127"));
    assert_eq!(from("empty.test").await.unwrap_err(), MediaError::OriginFailed);
    assert_eq!(from("unknown.test").await.unwrap_err(), MediaError::OriginFailed);
    assert_eq!(origin.connections.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn the_default_refuses_this_machine_under_every_name() {
    let origin = Origin::fixed(ok("secret")).await;
    let fetcher = fetcher(&MediaConfig { allowed_ports: Some(vec![origin.port]), ..MediaConfig::default() });
    for host in [
        "127.0.0.1",
        "localhost",
        "0.0.0.0",
        "127.0.0.1.",
        "127.1",
        "2130706433",
        "0177.0.0.1",
        "0x7f.1",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "169.254.169.254",
        "10.0.0.1",
    ] {
        let url = Url::parse(&format!("http://{host}:{}/", origin.port)).unwrap();
        assert_eq!(get(&fetcher, url).await.unwrap_err(), MediaError::AddressForbidden, "{host}");
    }
    assert_eq!(origin.connections.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn credentials_are_refused_and_not_repeated() {
    for url in ["http://user@127.0.0.1/", "http://:secret@127.0.0.1/", "https://user:secret@127.0.0.1/"] {
        let error = get(&open_fetcher(), Url::parse(url).unwrap()).await.unwrap_err();
        assert_eq!(error, MediaError::CredentialsInUrl);
        assert!(!error.to_string().contains("secret"));
    }
}

#[tokio::test]
async fn a_slow_origin_times_out_wherever_it_is_slow() {
    for answer in ["", "HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nslow"] {
        let origin = Origin::start(move |_, mut stream| async move {
            stream.write_all(answer.as_bytes()).await.unwrap();
            // Until the other side gives up.
            let _ = stream.read_u8().await;
        })
        .await;
        let limits = MediaConfig { total_timeout: Duration::from_millis(50), ..config() };
        let error = get(&fetcher(&limits), origin.url("/")).await.unwrap_err();
        assert_eq!(error, MediaError::OriginTimeout, "{answer:?}");
        assert_eq!(error.fault(), Fault::OriginTimeout);
    }
}

#[tokio::test]
async fn a_name_that_does_not_resolve_in_time_is_given_up() {
    let never: Lookup = Arc::new(|_| Box::pin(std::future::pending()));
    let limits = MediaConfig { connect_timeout: Duration::from_millis(50), ..config() };
    let fetcher = Fetcher::with(&limits, ByteBudget::new(0), Arc::new(|_| true), never, web_roots()).unwrap();
    let error = get(&fetcher, Url::parse("http://slow.test/").unwrap()).await.unwrap_err();
    assert_eq!(error, MediaError::OriginTimeout);
}

#[tokio::test]
async fn nobody_there_is_the_origins_fault() {
    let port = {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        listener.local_addr().unwrap().port()
    };
    let error = get(&open_fetcher(), Url::parse(&format!("http://127.0.0.1:{port}/")).unwrap()).await.unwrap_err();
    assert_eq!(error, MediaError::OriginFailed);
    assert!(!error.to_string().contains("127"));
}

#[tokio::test]
async fn a_tls_connection_that_fails_is_the_origins_fault() {
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
