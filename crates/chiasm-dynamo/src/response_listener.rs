//! Receives the connections over which workers send their answers. A worker opens one connection
//! per answer and names the request first.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::BytesMut;
use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::frame::{Bounds, TwoPart};

/// The deadline for the greeting of a new connection, which names its request.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum number of connections without a greeting; further connections wait.
const MAX_PENDING_CONNECTIONS: usize = 1024;
/// The maximum size of a greeting: a subject from this process, and little else.
const GREETING_BOUNDS: Bounds = Bounds { header: 4096, body: 0 };
/// The message that tells a worker to stop an answer.
pub(crate) const KILL: &[u8] = br#""kill""#;
/// The maximum number of addresses with a listener: one for each network with workers.
const MAX_LISTEN_ADDRESSES: usize = 64;
/// The pause after a failed accept, which is usually caused by too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Listens for the answers of workers, at one address for all workers or at each address of this
/// machine from which a worker is reached. Clones share their listeners.
#[derive(Clone, Debug)]
pub struct ResponseListener {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    listen: Option<SocketAddr>,
    announce: Option<SocketAddr>,
    listeners: tokio::sync::Mutex<Listeners>,
    pending: Arc<PendingResponses>,
}

#[derive(Debug, Default)]
struct Listeners {
    /// The bound addresses, by the address of this machine from which workers are reached.
    bound: HashMap<IpAddr, SocketAddr>,
    /// The accepting tasks, which end with the listener.
    tasks: JoinSet<()>,
}

/// The expected subjects, and the receivers of their connections.
type PendingResponses = Mutex<HashMap<String, oneshot::Sender<ResponseConnection>>>;

/// A worker's connection after its greeting, and the bytes that were read after the greeting.
#[derive(Debug)]
pub(crate) struct ResponseConnection {
    pub(crate) stream: TcpStream,
    pub(crate) buffer: BytesMut,
}

/// An expected connection. It is no longer expected once this is dropped.
#[derive(Debug)]
pub(crate) struct ExpectedResponse {
    /// The subject that the worker has to name.
    pub(crate) subject: String,
    /// The address that the worker has to connect to.
    pub(crate) address: SocketAddr,
    connection: oneshot::Receiver<ResponseConnection>,
    pending: Arc<PendingResponses>,
}

impl ResponseListener {
    /// Creates a listener. It binds nothing before the first request.
    ///
    /// With `listen` it binds that address, which workers reach as `announce` if given. Without
    /// `listen` it binds a free port at each address of this machine from which a worker is
    /// reached.
    pub fn new(listen: Option<SocketAddr>, announce: Option<SocketAddr>) -> Self {
        let inner =
            Inner { listen, announce, listeners: Default::default(), pending: Arc::default() };
        Self { inner: Arc::new(inner) }
    }

    /// Expects a connection from a worker that is reached from the local address `from`.
    ///
    /// # Errors
    /// Returns the error of binding the address.
    pub(crate) async fn expect(&self, from: IpAddr) -> io::Result<ExpectedResponse> {
        let address = self.bind(from).await?;
        let subject = format!("{:032x}", rand::random::<u128>());
        let (sender, connection) = oneshot::channel();
        lock(&self.inner.pending).insert(subject.clone(), sender);
        Ok(ExpectedResponse { subject, address, connection, pending: self.inner.pending.clone() })
    }

    /// Returns the address for workers that are reached from `from`, and binds it if necessary.
    async fn bind(&self, from: IpAddr) -> io::Result<SocketAddr> {
        let Inner { listen, announce, listeners, pending } = &*self.inner;
        let mut listeners = listeners.lock().await;
        // One listener is enough if the address is configured.
        let local = listen.map_or(from, |listen| listen.ip());
        let bound = match listeners.bound.get(&local) {
            Some(bound) => *bound,
            None if listeners.bound.len() == MAX_LISTEN_ADDRESSES => {
                return Err(io::Error::other("too many addresses of this machine reach workers"));
            }
            None => {
                let listener =
                    TcpListener::bind(listen.unwrap_or(SocketAddr::new(from, 0))).await?;
                let bound = listener.local_addr()?;
                listeners.tasks.spawn(accept(listener, pending.clone()));
                listeners.bound.insert(local, bound);
                bound
            }
        };
        Ok(match announce {
            Some(announce) => *announce,
            None if bound.ip().is_unspecified() => SocketAddr::new(from, bound.port()),
            None => bound,
        })
    }
}

impl ExpectedResponse {
    /// Waits for the worker's connection. Cancel-safe.
    pub(crate) async fn connection(&mut self) -> Option<ResponseConnection> {
        (&mut self.connection).await.ok()
    }
}

impl Drop for ExpectedResponse {
    fn drop(&mut self) {
        lock(&self.pending).remove(&self.subject);
    }
}

fn lock(
    pending: &PendingResponses,
) -> std::sync::MutexGuard<'_, HashMap<String, oneshot::Sender<ResponseConnection>>> {
    pending.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn accept(listener: TcpListener, pending: Arc<PendingResponses>) {
    let greetings = Arc::new(Semaphore::new(MAX_PENDING_CONNECTIONS));
    loop {
        // The semaphore is never closed.
        let Ok(permit) = greetings.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let pending = pending.clone();
                tokio::spawn(async move {
                    let _permit = permit;
                    // A connection without a valid greeting is closed.
                    let _ = timeout(GREETING_TIMEOUT, greet(stream, &pending)).await;
                });
            }
            Err(error) => {
                tracing::warn!(%error, "accepting a worker's connection failed");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Reads the greeting of a connection and passes the connection to the receiver of its request.
async fn greet(mut stream: TcpStream, pending: &PendingResponses) -> io::Result<()> {
    #[derive(Deserialize)]
    struct Greeting {
        subject: String,
    }
    stream.set_nodelay(true)?;
    let mut buffer = BytesMut::with_capacity(512);
    let message = loop {
        match TwoPart::decode(&mut buffer, GREETING_BOUNDS).map_err(io::Error::other)? {
            Some(message) => break message,
            None if stream.read_buf(&mut buffer).await? == 0 => return Ok(()),
            None => {}
        }
    };
    let Greeting { subject } = serde_json::from_slice(&message.header)?;
    let receiver = lock(pending).remove(&subject);
    match receiver {
        // The receiver may just have been dropped; that closes the connection.
        Some(receiver) => drop(receiver.send(ResponseConnection { stream, buffer })),
        // The request has already been dropped.
        None => stream.write_all(&TwoPart::encode(KILL, b"")).await?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    async fn connect(address: SocketAddr, greeting: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(greeting).await.unwrap();
        stream
    }

    async fn rest(mut stream: TcpStream) -> Vec<u8> {
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
        rest
    }

    #[tokio::test]
    async fn connection_goes_to_the_receiver_of_its_subject() {
        let listener = ResponseListener::new(None, None);
        let mut expected = listener.expect(HERE).await.unwrap();
        let unused = listener.expect(HERE).await.unwrap();
        assert_eq!(expected.address, unused.address);
        let greeting = |subject: &str| {
            TwoPart::encode(format!(r#"{{"subject":"{subject}"}}"#).as_bytes(), b"")
        };
        let mut stranger = connect(expected.address, &greeting("0123")).await;
        let mut killed = vec![0; TwoPart::encode(KILL, b"").len()];
        stranger.read_exact(&mut killed).await.unwrap();
        assert_eq!(killed, TwoPart::encode(KILL, b""));
        let more = [&greeting(&expected.subject)[..], b"more"].concat();
        let _worker = connect(expected.address, &more).await;
        let connection = expected.connection().await.unwrap();
        assert!(b"more".starts_with(&connection.buffer));
        let again = connect(expected.address, &greeting(&expected.subject)).await;
        assert_eq!(rest(again).await, TwoPart::encode(KILL, b""), "a subject is used once");
        drop(unused);
        assert!(lock(&listener.inner.pending).is_empty(), "no connection is expected any more");
    }

    #[tokio::test]
    async fn connection_with_invalid_greeting_is_closed() {
        let listener = ResponseListener::new(None, None);
        let expected = listener.expect(HERE).await.unwrap();
        let long = TwoPart::encode(&[b' '; 5000], b"");
        let body = TwoPart::encode(br#"{"subject":"x"}"#, b"body");
        for greeting in [
            b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
            &long[..],
            &body[..],
            &TwoPart::encode(b"{}", b""),
        ] {
            let stream = connect(expected.address, greeting).await;
            assert!(rest(stream).await.is_empty());
        }
    }

    #[tokio::test]
    async fn configured_address_is_bound_or_announced() {
        let listen: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let announced: SocketAddr = "10.0.0.1:7".parse().unwrap();
        let worker: IpAddr = "127.0.0.2".parse().unwrap();
        let listener = ResponseListener::new(Some(listen), Some(announced));
        assert_eq!(listener.expect(worker).await.unwrap().address, announced);
        let listener = ResponseListener::new(Some("0.0.0.0:0".parse().unwrap()), None);
        let expected = listener.expect(worker).await.unwrap();
        assert_eq!(expected.address.ip(), worker);
    }
}
