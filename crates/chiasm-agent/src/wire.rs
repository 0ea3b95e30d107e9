//! The byte stream under gRPC: a socket, plain or with TLS.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};
use tokio_rustls::TlsStream;
use tonic::transport::server::Connected;

use crate::peer::Peer;
use crate::server::ShareGuard;

/// The first byte of a TLS alert. An HTTP/2 frame that begins with this byte would be longer than
/// any that may be sent.
const ALERT: u8 = 0x15;

/// The time that frontends have to read the last messages and to disconnect. It is longer than the
/// time until a silent frontend counts as gone.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// A connection between a frontend and an agent.
pub(crate) struct Wire {
    socket: Socket,
    /// Set by the frontend's side when the first byte from the agent shows whether it requires TLS.
    /// `None` after that, and at the agent.
    requires_tls: Option<Arc<AtomicBool>>,
    /// Bytes that were read from the socket already and are returned first.
    replay: &'static [u8],
    peer: Peer,
    /// The connection's share of the agent's connections; `None` at a frontend.
    slot: Option<ShareGuard>,
    /// The timer for reading what the frontend still sends after the last write.
    closing: Option<Pin<Box<Sleep>>>,
}

enum Socket {
    Plain(TcpStream),
    Encrypted(Box<TlsStream<TcpStream>>),
}

impl Wire {
    pub(crate) fn plain(stream: TcpStream) -> Self {
        Self::new(Socket::Plain(stream))
    }

    pub(crate) fn encrypted(stream: impl Into<TlsStream<TcpStream>>) -> Self {
        Self::new(Socket::Encrypted(Box::new(stream.into())))
    }

    /// Creates a plain connection to an agent. `requires_tls` is set once the agent has answered.
    pub(crate) fn plain_to_agent(stream: TcpStream, requires_tls: Arc<AtomicBool>) -> Self {
        Self { requires_tls: Some(requires_tls), ..Self::plain(stream) }
    }

    fn new(socket: Socket) -> Self {
        Self {
            socket,
            requires_tls: None,
            replay: &[],
            peer: Peer::default(),
            slot: None,
            closing: None,
        }
    }

    /// Returns the connection as one from `peer`. Reads return `replay` first, and `slot` is
    /// released when the connection is closed.
    pub(crate) fn with_peer(self, peer: Peer, replay: &'static [u8], slot: ShareGuard) -> Self {
        Self { peer, replay, slot: Some(slot), ..self }
    }

    /// Reads and discards what a frontend still sends until it disconnects.
    ///
    /// A socket that is closed with unread bytes is reset, and the frontend loses what it has not
    /// read by then.
    fn poll_peer_closed(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let closing = self.closing.get_or_insert_with(|| Box::pin(sleep(CLOSE_TIMEOUT)));
        if closing.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        let stream = match &mut self.socket {
            Socket::Plain(stream) => stream,
            Socket::Encrypted(stream) => stream.get_mut().0,
        };
        let mut unread = [0; 1024];
        loop {
            let mut unread = ReadBuf::new(&mut unread);
            match ready!(Pin::new(&mut *stream).poll_read(cx, &mut unread)) {
                Ok(()) if !unread.filled().is_empty() => {}
                Ok(()) | Err(_) => return Poll::Ready(()),
            }
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.replay.is_empty() {
            let (now, later) = this.replay.split_at(this.replay.len().min(buf.remaining()));
            buf.put_slice(now);
            this.replay = later;
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        match &mut this.socket {
            Socket::Plain(stream) => ready!(Pin::new(stream).poll_read(cx, buf))?,
            Socket::Encrypted(stream) => return Pin::new(stream).poll_read(cx, buf),
        }
        if let (Some(&first), Some(requires_tls)) =
            (buf.filled().get(before), this.requires_tls.take())
        {
            requires_tls.store(first == ALERT, Relaxed);
            if first == ALERT {
                return Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the agent requires TLS",
                )));
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().socket {
            Socket::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Socket::Encrypted(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().socket {
            Socket::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, pieces),
            Socket::Encrypted(stream) => Pin::new(stream).poll_write_vectored(cx, pieces),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.socket {
            Socket::Plain(stream) => stream.is_write_vectored(),
            Socket::Encrypted(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().socket {
            Socket::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Socket::Encrypted(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.closing.is_none() {
            ready!(match &mut this.socket {
                Socket::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
                Socket::Encrypted(stream) => Pin::new(stream).poll_shutdown(cx),
            })?;
        }
        if this.slot.is_some() {
            return this.poll_peer_closed(cx).map(Ok);
        }
        Poll::Ready(Ok(()))
    }
}

impl Connected for Wire {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer
    }
}
