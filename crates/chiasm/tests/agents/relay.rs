//! A link with delay and loss, as TCP shows it to programs: bytes come late, and later where a
//! packet had to be sent again.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

/// How long each packet takes, either way.
pub(crate) const DELAY: Duration = Duration::from_millis(100);
/// One of so many packets is lost.
const LOST: usize = 100;
/// How long a sender waits for a sign of a packet before it sends it again: the time both ways, and
/// the 200 ms that Linux adds at least.
const SENT_AGAIN: Duration = Duration::from_millis(400);
/// Bytes of a packet, as on Ethernet.
const PACKET: usize = 1460;
/// Packets that are under way.
const MOST_UNDER_WAY: usize = 1024;

/// Takes connections to a program on this machine. None is taken after this is dropped.
pub(crate) struct Relay {
    address: SocketAddr,
    packets: Arc<AtomicUsize>,
    accepting: JoinHandle<()>,
}

impl Relay {
    /// A way to the program at `to`.
    pub(crate) async fn to(to: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (to, packets) = (to.to_owned(), Arc::new(AtomicUsize::new(0)));
        let counted = packets.clone();
        let accepting = tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let Ok(far) = TcpStream::connect(&to).await else { continue };
                for stream in [&near, &far] {
                    stream.set_nodelay(true).expect("a socket");
                }
                let ((from_near, to_near), (from_far, to_far)) =
                    (near.into_split(), far.into_split());
                tokio::spawn(carry(from_near, to_far, counted.clone()));
                tokio::spawn(carry(from_far, to_near, counted.clone()));
            }
        });
        Self { address, packets, accepting }
    }

    /// `host:port`
    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    /// How many packets were carried, both ways.
    pub(crate) fn carried(&self) -> usize {
        self.packets.load(Relaxed)
    }

    /// How many packets were lost, both ways.
    pub(crate) fn lost(&self) -> usize {
        self.packets.load(Relaxed) / LOST
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Carries what comes until either side closes. What comes after a packet that was lost waits for
/// it.
async fn carry(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin + Send + 'static,
    count: Arc<AtomicUsize>,
) {
    let (sender, mut packets) = mpsc::channel::<(Instant, Vec<u8>)>(MOST_UNDER_WAY);
    tokio::spawn(async move {
        while let Some((arrives, packet)) = packets.recv().await {
            sleep_until(arrives).await;
            if to.write_all(&packet).await.is_err() {
                return;
            }
        }
    });
    let mut packet = [0; PACKET];
    while let Ok(length @ 1..) = from.read(&mut packet).await {
        let is_lost = count.fetch_add(1, Relaxed) % LOST == LOST - 1;
        let takes = if is_lost { SENT_AGAIN + DELAY } else { DELAY };
        if sender.send((Instant::now() + takes, packet[..length].to_vec())).await.is_err() {
            return;
        }
    }
}
