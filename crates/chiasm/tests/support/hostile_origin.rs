//! A web server that serves pictures and misbehaves in every way that makes fetching them hard.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use chiasm::scenarios::{DAWN, NOON};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// The pause between two pieces of a slow response.
const DRIP_INTERVAL: Duration = Duration::from_millis(20);

/// The paths that misbehave, and the status with which `chiasm serve` answers for each when its
/// media timeout is short.
pub const HOSTILE: [(&str, u16); 24] = [
    ("/not-found", 404),
    ("/gone", 404),
    ("/broken", 502),
    ("/unasked-not-modified", 502),
    ("/unasked-part", 502),
    ("/garbage", 502),
    ("/silence", 502),
    ("/header-flood", 502),
    ("/long-header", 502),
    ("/bad-chunks", 502),
    ("/cut-off", 502),
    ("/too-long", 422),
    ("/gzip-bomb", 502),
    ("/circle", 502),
    ("/to-file", 502),
    ("/to-credentials", 502),
    ("/to-metadata", 403),
    ("/to-mapped", 403),
    ("/to-other-host", 403),
    ("/endless", 413),
    ("/announced", 413),
    ("/html", 415),
    ("/dripping-head", 504),
    ("/dripping-body", 504),
];

pub struct HostileOrigin {
    address: SocketAddr,
    requests: Arc<AtomicUsize>,
    open_connections: Arc<AtomicUsize>,
    released: watch::Sender<bool>,
}

impl HostileOrigin {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let requests = Arc::<AtomicUsize>::default();
        let open_connections = Arc::<AtomicUsize>::default();
        let counters = (requests.clone(), open_connections.clone());
        let released = watch::Sender::new(false);
        let gate = released.subscribe();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (requests, open_connections) = counters.clone();
                let mut gate = gate.clone();
                tokio::spawn(async move {
                    open_connections.fetch_add(1, Ordering::SeqCst);
                    // Clients are expected to disconnect early.
                    let _ = serve(stream, &requests, &mut gate).await;
                    open_connections.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { address, requests, open_connections, released }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Returns the number of requests so far.
    pub fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }

    /// Sends the answers for `/held`.
    pub fn release(&self) {
        self.released.send_replace(true);
    }

    /// Returns the number of open connections.
    pub fn connections(&self) -> usize {
        self.open_connections.load(Ordering::SeqCst)
    }
}

async fn serve(
    mut stream: TcpStream,
    requests: &AtomicUsize,
    gate: &mut watch::Receiver<bool>,
) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let number = requests.fetch_add(1, Ordering::SeqCst);
    let head = String::from_utf8_lossy(&head);
    let path =
        head.split(' ').nth(1).unwrap_or_default().split('?').next().unwrap_or_default().to_owned();
    match path.as_str() {
        "/good" => picture(&mut stream, "max-age=60", DAWN.jpeg).await,
        "/held" => {
            // Dropping the origin releases all requests.
            let _ = gate.wait_for(|released| *released).await;
            picture(&mut stream, "max-age=60", DAWN.jpeg).await
        }
        // Trailing bytes make a different file with the same pixels.
        "/distinct" => {
            picture(
                &mut stream,
                "no-store",
                &[NOON.jpeg, format!("{number:09}").as_bytes()].concat(),
            )
            .await
        }
        "/flapping" => match number % 3 {
            0 => answer(&mut stream, "404 Not Found", "cache-control: max-age=60", b"no").await,
            1 => answer(&mut stream, "500 Oops", "x: y", b"secret stack trace").await,
            _ => picture(&mut stream, "no-cache", DAWN.jpeg).await,
        },
        "/not-found" => answer(&mut stream, "404 Secret Reason", "x: y", b"secret body").await,
        "/gone" => answer(&mut stream, "410 Gone", "x: y", b"secret body").await,
        "/broken" => answer(&mut stream, "500 Oops", "x: y", b"secret stack trace").await,
        "/unasked-not-modified" => {
            answer(&mut stream, "304 Not Modified", "etag: \"1\"", b"").await
        }
        "/unasked-part" => {
            answer(&mut stream, "206 Partial", "content-range: bytes 0-3/9", b"part").await
        }
        "/garbage" => stream.write_all(&[0x00, 0xff, 0x16, 0x03, b'\r', b'\n', b'\r', b'\n']).await,
        "/silence" => Ok(()),
        "/header-flood" => {
            drip(&mut stream, "HTTP/1.1 200 OK\r\n", "x: yyyyyyyyyyyyyyyy\r\n", Duration::ZERO)
                .await
        }
        "/long-header" => {
            drip(&mut stream, "HTTP/1.1 200 OK\r\nx: ", "yyyyyyyyyyyyyyyy", Duration::ZERO).await
        }
        "/bad-chunks" => {
            stream
                .write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-3\r\nabc\r\n")
                .await
        }
        "/cut-off" => {
            let length = DAWN.jpeg.len();
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
            stream.write_all(head.as_bytes()).await?;
            stream.write_all(&DAWN.jpeg[..length / 2]).await
        }
        // The body is longer than the announced length, which ends inside the picture.
        "/too-long" => {
            let head = "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n";
            stream.write_all(head.as_bytes()).await?;
            stream.write_all(DAWN.jpeg).await
        }
        "/gzip-bomb" => {
            answer(&mut stream, "200 OK", "content-encoding: gzip", &[0x1f, 0x8b, 8, 0]).await
        }
        "/circle" => redirect(&mut stream, "/circle").await,
        "/to-file" => redirect(&mut stream, "file:///etc/passwd").await,
        "/to-credentials" => redirect(&mut stream, "http://user:secret@127.0.0.1/").await,
        "/to-metadata" => redirect(&mut stream, "http://169.254.169.254/latest/meta-data/").await,
        "/to-mapped" => redirect(&mut stream, "http://[::ffff:10.0.0.1]/").await,
        "/to-other-host" => redirect(&mut stream, "http://localhost:1/").await,
        "/endless" => {
            drip(&mut stream, "HTTP/1.1 200 OK\r\n\r\n", &"x".repeat(16 << 10), Duration::ZERO)
                .await
        }
        "/announced" => {
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n").await?;
            wait_for_hangup(&mut stream).await
        }
        "/html" => {
            answer(
                &mut stream,
                "200 OK",
                "content-type: image/jpeg",
                b"<!doctype html><p>secret</p>",
            )
            .await
        }
        "/dripping-head" => drip(&mut stream, "HTTP/1.1 200 OK\r\nx: ", "y", DRIP_INTERVAL).await,
        "/dripping-body" => {
            let head = "HTTP/1.1 200 OK\r\ncontent-length: 10000\r\n\r\n";
            drip(&mut stream, head, "y", DRIP_INTERVAL).await
        }
        other => panic!("unexpected request for {other}"),
    }
}

async fn answer(
    stream: &mut TcpStream,
    status: &str,
    header: &str,
    body: &[u8],
) -> std::io::Result<()> {
    let head = format!(
        "HTTP/1.1 {status}\r\n{header}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body).await
}

async fn picture(stream: &mut TcpStream, cache_control: &str, jpeg: &[u8]) -> std::io::Result<()> {
    answer(stream, "200 OK", &format!("cache-control: {cache_control}"), jpeg).await
}

async fn redirect(stream: &mut TcpStream, location: &str) -> std::io::Result<()> {
    answer(stream, "302 Found", &format!("location: {location}"), b"").await
}

/// Sends `head`, then `piece` every `interval` until the client disconnects.
async fn drip(
    stream: &mut TcpStream,
    head: &str,
    piece: &str,
    interval: Duration,
) -> std::io::Result<()> {
    stream.write_all(head.as_bytes()).await?;
    loop {
        stream.write_all(piece.as_bytes()).await?;
        if !interval.is_zero() {
            tokio::time::sleep(interval).await;
        }
    }
}

async fn wait_for_hangup(stream: &mut TcpStream) -> std::io::Result<()> {
    let mut rest = [0; 64];
    while stream.read(&mut rest).await? > 0 {}
    Ok(())
}
