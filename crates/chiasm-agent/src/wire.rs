//! What gRPC is read from and written to: a socket as it is, or within TLS.

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
use crate::server::Held;

/// The first byte of what TLS says when it can't go on. A frame of HTTP/2 that begins so would be
/// longer than any that may be sent.
const ALERT: u8 = 0x15;

/// How long frontends may take to read what they are told last, and to hang up. Longer than a
/// silent one is taken for gone.
pub(crate) const LAST_WORDS: Duration = Duration::from_secs(3);

/// One connection.
pub(crate) struct Wire {
    socket: Socket,
    /// Whether an agent wants TLS is noted there when the first byte of it is read. `None` from
    /// then on, and at the agent itself.
    unheard: Option<Arc<AtomicBool>>,
    /// Was read already, and is read again first.
    again: &'static [u8],
    peer: Peer,
    /// Its place among those that there may be, at an agent.
    place: Option<Held>,
    /// How long what else is sent is read, once the last is written.
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

    /// A connection to an agent, which may want TLS: `wants_tls` says so once it has answered.
    pub(crate) fn plain_to_agent(stream: TcpStream, wants_tls: Arc<AtomicBool>) -> Self {
        Self { unheard: Some(wants_tls), ..Self::plain(stream) }
    }

    fn new(socket: Socket) -> Self {
        Self {
            socket,
            unheard: None,
            again: &[],
            peer: Peer::default(),
            place: None,
            closing: None,
        }
    }

    /// The same, which comes from there, of which these bytes were read and are read again, and
    /// which gives its place back when it is closed.
    pub(crate) fn placed(self, peer: Peer, again: &'static [u8], place: Held) -> Self {
        Self { peer, again, place: Some(place), ..self }
    }

    /// Reads what a frontend still sends until it hangs up. A socket that is closed with something
    /// in it that was not read is reset, and what the frontend has not read by then is lost to it.
    fn poll_hung_up(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let closing = self.closing.get_or_insert_with(|| Box::pin(sleep(LAST_WORDS)));
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
        if !this.again.is_empty() {
            let (now, later) = this.again.split_at(this.again.len().min(buf.remaining()));
            buf.put_slice(now);
            this.again = later;
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        match &mut this.socket {
            Socket::Plain(stream) => ready!(Pin::new(stream).poll_read(cx, buf))?,
            Socket::Encrypted(stream) => return Pin::new(stream).poll_read(cx, buf),
        }
        if let (Some(&first), Some(wants_tls)) = (buf.filled().get(before), this.unheard.take()) {
            wants_tls.store(first == ALERT, Relaxed);
            if first == ALERT {
                return Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "it wants TLS",
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
        match this.place {
            Some(_) => this.poll_hung_up(cx).map(Ok),
            None => Poll::Ready(Ok(())),
        }
    }
}

impl Connected for Wire {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer
    }
}
