//! What HTTP is read from and written to: a client's socket as it is, or within TLS.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use chiasm_pipeline::cpu::{CpuBudget, CpuPool};
use rustls::ServerConfig;
use rustls::server::Acceptor;
use tokio::io::{AsyncBufRead, AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;

use super::socket::Socket;
use crate::connection::Connection;
use crate::connection_metrics::ConnectionMetrics;

/// The longest that a client may take for the handshake of TLS, which is two steps of a fraction of
/// a second each.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// What an answer to a client's hello costs: a key exchange and a signature, of which one by RSA
/// takes most of a millisecond.
const PRICE: Duration = Duration::from_millis(1);

/// The channel to a client.
pub(super) enum Channel {
    Plain(Socket),
    /// What TLS makes of the bytes goes through the socket like any others: it moves, is watched
    /// and fails as they do.
    Encrypted(Box<TlsStream<Socket>>),
}

impl Channel {
    /// As [`Socket`] does for a plain one: fails if the client has left whom an engine works for,
    /// and wakes the task when it leaves. A client takes leave within TLS, so what it sent has to
    /// be deciphered to see that.
    fn check_client(stream: &mut TlsStream<Socket>, cx: &mut Context<'_>) -> io::Result<()> {
        if !stream.get_ref().0.is_ended_by_client() {
            return Ok(());
        }
        match Pin::new(stream).poll_fill_buf(cx) {
            Poll::Ready(Ok([])) => Err(io::ErrorKind::ConnectionAborted.into()),
            Poll::Ready(Err(error)) => Err(error),
            Poll::Ready(Ok(_)) | Poll::Pending => Ok(()),
        }
    }

    /// Looks after the client when TLS can't write.
    fn watched<T>(
        stream: &mut TlsStream<Socket>,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_pending() {
            Self::check_client(stream, cx)?;
        }
        written
    }
}

impl AsyncRead for Channel {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_read(cx, buf),
            Self::Encrypted(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

// Not vectored: what frames an event of a stream, and the event, are some bytes each, which are
// faster copied together than told to the system one by one.
impl AsyncWrite for Channel {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_write(cx, bytes),
            Self::Encrypted(stream) => {
                let written = Pin::new(&mut *stream).poll_write(cx, bytes);
                Self::watched(stream, cx, written)
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_flush(cx),
            Self::Encrypted(stream) => {
                Self::check_client(stream, cx)?;
                Pin::new(stream).poll_flush(cx)
            }
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_shutdown(cx),
            Self::Encrypted(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

/// The handshake of TLS that a connection begins with.
pub(super) struct Handshake {
    pub(super) tls: Arc<ServerConfig>,
    pub(super) cpu: CpuPool,
    /// The time for the head of a request, which the handshake is given, too, but no more than
    /// [`HANDSHAKE`].
    pub(super) head_timeout: Duration,
    /// Its other end is dropped when the server goes down: until then nobody has asked for
    /// anything.
    pub(super) serving: watch::Receiver<()>,
    pub(super) metrics: ConnectionMetrics,
}

impl Handshake {
    /// The channel, if the client agrees on TLS in time. Else that is counted.
    pub(super) async fn shake(self, socket: Socket, connection: &Connection) -> Option<Channel> {
        let Self { tls, cpu, head_timeout, mut serving, metrics } = self;
        let accepted =
            tokio::time::timeout(head_timeout.min(HANDSHAKE), accept(tls, cpu, socket, connection));
        let accepted = tokio::select! {
            accepted = accepted => accepted,
            // Nothing is ever sent: this is its end.
            _ = serving.changed() => return None,
        };
        let failed = match accepted {
            Ok(Ok(stream)) => return Some(Channel::Encrypted(Box::new(stream))),
            Ok(Err(error)) => error.to_string(),
            Err(late) => late.to_string(),
        };
        metrics.closed_unencrypted();
        tracing::debug!(peer = %connection.peer(), error = failed, "a connection is closed: no TLS was agreed on");
        None
    }
}

/// Agrees with a client on TLS. A hello costs its sender nothing and us a signature, so these take
/// turns by who asks for them, like all work that costs: an address that says hello without end
/// delays others by one such answer.
async fn accept(
    tls: Arc<ServerConfig>,
    cpu: CpuPool,
    socket: Socket,
    connection: &Connection,
) -> io::Result<TlsStream<Socket>> {
    let hello = LazyConfigAcceptor::new(Acceptor::default(), socket).await?;
    let ticket = CpuBudget::new(connection.owner(), Duration::MAX)
        .ticket(PRICE)
        .map_err(io::Error::other)?;
    cpu.run(&ticket, move || hello.into_stream(tls)).await.map_err(io::Error::other)?.await
}
