//! A link with delay and packet loss as programs see it over TCP: bytes arrive late, and later
//! still after a retransmission.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

/// The delay of each packet in one direction.
pub(crate) const DELAY: Duration = Duration::from_millis(100);
/// One packet in this many is lost.
const PACKETS_PER_LOSS: usize = 100;
/// The time until a sender retransmits a lost packet: the round trip and at least 200 ms that Linux
/// adds.
const RETRANSMIT_TIMEOUT: Duration = Duration::from_millis(400);
/// The payload of a packet, as on Ethernet.
const PACKET_BYTES: usize = 1460;
/// The maximum number of packets in flight in one direction.
const MAX_PACKETS_IN_FLIGHT: usize = 1024;

/// A listener that relays connections to a program on this machine. Accepts none once dropped.
pub(crate) struct Relay {
    address: SocketAddr,
    packets: Arc<AtomicUsize>,
    accepting: JoinHandle<()>,
}

impl Relay {
    /// Starts a relay to the program at `target`.
    pub(crate) async fn start(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let target = target.to_owned();
        let packets = Arc::new(AtomicUsize::new(0));
        let counter = packets.clone();
        let accepting = tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let Ok(far) = TcpStream::connect(&target).await else { continue };
                for stream in [&near, &far] {
                    stream.set_nodelay(true).expect("a socket");
                }
                let (from_near, to_near) = near.into_split();
                let (from_far, to_far) = far.into_split();
                tokio::spawn(relay(from_near, to_far, counter.clone()));
                tokio::spawn(relay(from_far, to_near, counter.clone()));
            }
        });
        Self { address, packets, accepting }
    }

    /// Returns `host:port`.
    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    /// Returns the number of packets relayed in both directions.
    pub(crate) fn packets(&self) -> usize {
        self.packets.load(Relaxed)
    }

    /// Returns the number of packets lost in both directions.
    pub(crate) fn lost_packets(&self) -> usize {
        self.packets.load(Relaxed) / PACKETS_PER_LOSS
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Relays one direction until either side closes. A lost packet delays all packets after it.
async fn relay(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin + Send + 'static,
    count: Arc<AtomicUsize>,
) {
    let (sender, mut packets) = mpsc::channel::<(Instant, Vec<u8>)>(MAX_PACKETS_IN_FLIGHT);
    tokio::spawn(async move {
        while let Some((arrival, packet)) = packets.recv().await {
            sleep_until(arrival).await;
            if to.write_all(&packet).await.is_err() {
                return;
            }
        }
    });
    let mut packet = [0; PACKET_BYTES];
    while let Ok(length @ 1..) = from.read(&mut packet).await {
        let is_lost = count.fetch_add(1, Relaxed) % PACKETS_PER_LOSS == PACKETS_PER_LOSS - 1;
        let delay = if is_lost { RETRANSMIT_TIMEOUT + DELAY } else { DELAY };
        if sender.send((Instant::now() + delay, packet[..length].to_vec())).await.is_err() {
            return;
        }
    }
}
