//! What a frontend and an agent say to each other, counted between them: what TCP carries, TLS
//! included.

use std::error::Error;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Most bytes that are handed on at once.
const PIECE: usize = 64 << 10;

/// A listener whose connections lead to an agent.
pub(crate) struct Wire {
    pub(crate) address: SocketAddr,
    counters: [Arc<AtomicU64>; 2],
}

impl Wire {
    /// Hands on as long as this process lives.
    pub(crate) async fn to(agent: SocketAddr) -> Result<Self, Box<dyn Error>> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let wire = Self { address: listener.local_addr()?, counters: Default::default() };
        let counters = wire.counters.clone();
        tokio::spawn(async move {
            while let Ok((frontend, _)) = listener.accept().await {
                let Ok(agent) = TcpStream::connect(agent).await else { continue };
                let ((from_frontend, to_frontend), (from_agent, to_agent)) =
                    (frontend.into_split(), agent.into_split());
                let [there, back] = counters.clone();
                // A connection that ends is the matter of its ends.
                tokio::spawn(async move { drop(hand_on(from_frontend, to_agent, &there).await) });
                tokio::spawn(async move { drop(hand_on(from_agent, to_frontend, &back).await) });
            }
        });
        Ok(wire)
    }

    /// Bytes so far: to the agent, and from it.
    pub(crate) fn bytes(&self) -> [u64; 2] {
        [0, 1].map(|way| self.counters[way].load(Ordering::Relaxed))
    }
}

async fn hand_on(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    counter: &AtomicU64,
) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        let read = from.read(&mut piece).await?;
        if read == 0 {
            return to.shutdown().await;
        }
        counter.fetch_add(read as u64, Ordering::Relaxed);
        to.write_all(&piece[..read]).await?;
    }
}
