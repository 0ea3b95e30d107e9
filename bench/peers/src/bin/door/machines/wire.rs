//! A proxy between frontend and agent that counts bytes: what TCP carries, including TLS.

use std::error::Error;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// The maximum number of bytes that are copied at once.
const MAX_PIECE_BYTES: usize = 64 << 10;

/// A listener whose connections lead to an agent, as long as this process lives.
pub(crate) struct Wire {
    pub(crate) address: SocketAddr,
    counters: [Arc<AtomicU64>; 2],
}

impl Wire {
    pub(crate) async fn to(agent: SocketAddr) -> Result<Self, Box<dyn Error>> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let wire = Self { address: listener.local_addr()?, counters: Default::default() };
        let counters = wire.counters.clone();
        tokio::spawn(async move {
            while let Ok((frontend, _)) = listener.accept().await {
                let Ok(agent) = TcpStream::connect(agent).await else { continue };
                let (from_frontend, to_frontend) = frontend.into_split();
                let (from_agent, to_agent) = agent.into_split();
                let [sent, received] = counters.clone();
                // A broken connection fails the frontend's request.
                tokio::spawn(async move { drop(copy(from_frontend, to_agent, &sent).await) });
                tokio::spawn(async move { drop(copy(from_agent, to_frontend, &received).await) });
            }
        });
        Ok(wire)
    }

    /// Returns the numbers of bytes so far: to the agent, and from the agent.
    pub(crate) fn bytes(&self) -> [u64; 2] {
        [0, 1].map(|way| self.counters[way].load(Ordering::Relaxed))
    }
}

async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    counter: &AtomicU64,
) -> io::Result<()> {
    let mut piece = vec![0; MAX_PIECE_BYTES];
    loop {
        let read = from.read(&mut piece).await?;
        if read == 0 {
            return to.shutdown().await;
        }
        counter.fetch_add(read as u64, Ordering::Relaxed);
        to.write_all(&piece[..read]).await?;
    }
}
