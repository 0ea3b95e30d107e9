//! Where workers call back: each answer comes over a connection that the worker makes, and names
//! the request that it is of.

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

/// How long who has connected may take to say which request it answers.
const NAMED_WITHIN: Duration = Duration::from_secs(5);
/// How many may have connected and not said it yet; more wait.
const MOST_UNNAMED: usize = 1024;
/// What says it: a subject of ours, and little else.
const GREETING: Bounds = Bounds { header: 4096, body: 0 };
/// Tells a worker that nobody wants the answer.
pub(crate) const KILL: &[u8] = br#""kill""#;
/// Addresses of this machine that are listened at: as many as there are networks to workers.
const MOST_ADDRESSES: usize = 64;
/// How long nobody is accepted after that has failed, as when this process has too many files open.
const PAUSE: Duration = Duration::from_millis(50);

/// Takes the calls of workers, at one address for all of them or at each of this machine's that
/// leads to some. Clones are the same.
#[derive(Clone, Debug)]
pub struct CallHome {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    listen: Option<SocketAddr>,
    announce: Option<SocketAddr>,
    listening: tokio::sync::Mutex<Listening>,
    waiting: Arc<Waiting>,
}

#[derive(Debug, Default)]
struct Listening {
    /// Where is listened for those who are reached from an address.
    at: HashMap<IpAddr, SocketAddr>,
    /// They end with this.
    tasks: JoinSet<()>,
}

/// The subjects that are waited for, and by whom.
type Waiting = Mutex<HashMap<String, oneshot::Sender<Called>>>;

/// A worker's connection, once it has named its request, and what it has sent beyond that.
#[derive(Debug)]
pub(crate) struct Called {
    pub(crate) stream: TcpStream,
    pub(crate) came: BytesMut,
}

/// A call that is waited for until this is dropped.
#[derive(Debug)]
pub(crate) struct Expected {
    /// What the worker has to name.
    pub(crate) subject: String,
    /// Where it has to call.
    pub(crate) address: SocketAddr,
    called: oneshot::Receiver<Called>,
    waiting: Arc<Waiting>,
}

impl CallHome {
    /// Takes calls at `listen`, which workers reach as `announce` or, without that, as it is; or,
    /// without `listen`, at a free port of whichever address of this machine a worker is reached
    /// from. Nothing is listened at before the first request.
    pub fn new(listen: Option<SocketAddr>, announce: Option<SocketAddr>) -> Self {
        let inner =
            Inner { listen, announce, listening: Default::default(), waiting: Arc::default() };
        Self { inner: Arc::new(inner) }
    }

    /// Waits for a call from now on, by a worker that is reached from the address `from`.
    ///
    /// # Errors
    /// The address can't be listened at.
    pub(crate) async fn expect(&self, from: IpAddr) -> io::Result<Expected> {
        let address = self.listening(from).await?;
        let subject = format!("{:032x}", rand::random::<u128>());
        let (sender, called) = oneshot::channel();
        lock(&self.inner.waiting).insert(subject.clone(), sender);
        Ok(Expected { subject, address, called, waiting: self.inner.waiting.clone() })
    }

    /// Where workers call that are reached from an address.
    async fn listening(&self, from: IpAddr) -> io::Result<SocketAddr> {
        let Inner { listen, announce, listening, waiting } = &*self.inner;
        let mut listening = listening.lock().await;
        // One listener is enough where an address is given.
        let at = listen.map_or(from, |listen| listen.ip());
        let bound = match listening.at.get(&at) {
            Some(bound) => *bound,
            None if listening.at.len() == MOST_ADDRESSES => {
                return Err(io::Error::other(
                    "workers are reached from too many addresses of this machine",
                ));
            }
            None => {
                let listener =
                    TcpListener::bind(listen.unwrap_or(SocketAddr::new(from, 0))).await?;
                let bound = listener.local_addr()?;
                listening.tasks.spawn(accept(listener, waiting.clone()));
                listening.at.insert(at, bound);
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

impl Expected {
    /// The worker's connection, when it calls. Cancel safe.
    pub(crate) async fn called(&mut self) -> Option<Called> {
        (&mut self.called).await.ok()
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        lock(&self.waiting).remove(&self.subject);
    }
}

fn lock(waiting: &Waiting) -> std::sync::MutexGuard<'_, HashMap<String, oneshot::Sender<Called>>> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn accept(listener: TcpListener, waiting: Arc<Waiting>) {
    let unnamed = Arc::new(Semaphore::new(MOST_UNNAMED));
    loop {
        // Never closed.
        let Ok(permit) = unnamed.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let waiting = waiting.clone();
                tokio::spawn(async move {
                    let _permit = permit;
                    // Whoever says nothing, or something else, is nobody that is waited for.
                    let _ = timeout(NAMED_WITHIN, greet(stream, &waiting)).await;
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a worker's call can't be taken");
                sleep(PAUSE).await;
            }
        }
    }
}

/// Hears which request a connection is about, and gives it to who waits for it.
async fn greet(mut stream: TcpStream, waiting: &Waiting) -> io::Result<()> {
    #[derive(Deserialize)]
    struct Greeting {
        subject: String,
    }
    stream.set_nodelay(true)?;
    let mut came = BytesMut::with_capacity(512);
    let message = loop {
        match TwoPart::decode(&mut came, GREETING).map_err(io::Error::other)? {
            Some(message) => break message,
            None if stream.read_buf(&mut came).await? == 0 => return Ok(()),
            None => {}
        }
    };
    let Greeting { subject } = serde_json::from_slice(&message.header)?;
    let expected = lock(waiting).remove(&subject);
    match expected {
        // It may have gone in this moment, and then ends the connection by that.
        Some(expected) => drop(expected.send(Called { stream, came })),
        // Who asked is gone.
        None => stream.write_all(&TwoPart::encode(KILL, b"")).await?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    async fn call(address: SocketAddr, greeting: &[u8]) -> TcpStream {
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
    async fn a_call_comes_to_who_waits_for_its_subject_and_to_nobody_else() {
        let home = CallHome::new(None, None);
        let (mut one, other) = (home.expect(HERE).await.unwrap(), home.expect(HERE).await.unwrap());
        assert_eq!(one.address, other.address);
        let greeting = |subject: &str| {
            TwoPart::encode(format!(r#"{{"subject":"{subject}"}}"#).as_bytes(), b"")
        };
        let mut stranger = call(one.address, &greeting("0123")).await;
        let mut killed = vec![0; TwoPart::encode(KILL, b"").len()];
        stranger.read_exact(&mut killed).await.unwrap();
        assert_eq!(killed, TwoPart::encode(KILL, b""));
        let more = [&greeting(&one.subject)[..], b"more"].concat();
        let _worker = call(one.address, &more).await;
        let called = one.called().await.unwrap();
        assert!(b"more".starts_with(&called.came));
        let again = call(one.address, &greeting(&one.subject)).await;
        assert_eq!(rest(again).await, TwoPart::encode(KILL, b""), "each is called once");
        drop(other);
        assert!(lock(&home.inner.waiting).is_empty(), "nobody is waited for any more");
    }

    #[tokio::test]
    async fn who_speaks_nonsense_is_let_go() {
        let home = CallHome::new(None, None);
        let expected = home.expect(HERE).await.unwrap();
        let long = TwoPart::encode(&[b' '; 5000], b"");
        let body = TwoPart::encode(br#"{"subject":"x"}"#, b"body");
        for nonsense in [
            b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
            &long[..],
            &body[..],
            &TwoPart::encode(b"{}", b""),
        ] {
            let stream = call(expected.address, nonsense).await;
            assert!(rest(stream).await.is_empty());
        }
    }

    #[tokio::test]
    async fn a_given_address_is_listened_at_and_another_announced() {
        let listen: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let announced: SocketAddr = "10.0.0.1:7".parse().unwrap();
        let home = CallHome::new(Some(listen), Some(announced));
        assert_eq!(home.expect("127.0.0.2".parse().unwrap()).await.unwrap().address, announced);
        let home = CallHome::new(Some("0.0.0.0:0".parse().unwrap()), None);
        let expected = home.expect("127.0.0.2".parse().unwrap()).await.unwrap();
        assert_eq!(expected.address.ip(), "127.0.0.2".parse::<IpAddr>().unwrap());
    }
}
