//! The byte stream under HTTP: a client's socket, plain or with TLS.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use chiasm_cpu::{CpuBudget, CpuPool};
use rustls::ServerConfig;
use rustls::server::Acceptor;
use tokio::io::{AsyncBufRead, AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;

use super::socket::Socket;
use crate::connection::Connection;
use crate::connection_metrics::ConnectionMetrics;

/// The maximum time for a TLS handshake, which is two steps of a fraction of a second each.
const MAX_HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// The CPU time that answering a ClientHello is charged: a key exchange and a signature, of which
/// an RSA signature takes most of a millisecond.
const HELLO_COST: Duration = Duration::from_millis(1);

/// The byte stream to a client.
pub(super) enum Channel {
    Plain(Socket),
    /// TLS over the socket. Its ciphertext passes through the socket like plain bytes: it moves
    /// between threads, is watched and fails in the same way.
    Encrypted(Box<TlsStream<Socket>>),
}

impl Channel {
    /// Does for TLS what [`Socket`] does for plain connections: fails if the client has
    /// disconnected while an engine works for it, and wakes the task on a disconnect.
    ///
    /// With TLS a client may disconnect by an alert, so received bytes have to be decrypted to see
    /// it.
    fn check_client(stream: &mut TlsStream<Socket>, cx: &mut Context<'_>) -> io::Result<()> {
        if !stream.get_ref().0.cancels_on_disconnect() {
            return Ok(());
        }
        match Pin::new(stream).poll_fill_buf(cx) {
            Poll::Ready(Ok([])) => Err(io::ErrorKind::ConnectionAborted.into()),
            Poll::Ready(Err(error)) => Err(error),
            Poll::Ready(Ok(_)) | Poll::Pending => Ok(()),
        }
    }

    /// Checks the client if TLS could not write.
    fn check_after_write<T>(
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

// Writes are not vectored: an event of a stream and its framing are a few bytes each. Copying them
// together is faster than passing them to the system separately.
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
                Self::check_after_write(stream, cx, written)
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

/// The TLS handshake at the start of a connection.
pub(super) struct Handshake {
    pub(super) tls: Arc<ServerConfig>,
    pub(super) cpu: CpuPool,
    /// The timeout for a request head, which is also that of the handshake, capped at
    /// [`MAX_HANDSHAKE_TIME`].
    pub(super) head_timeout: Duration,
    /// Closed when the server shuts down. A client in a handshake has sent no request yet, so the
    /// connection ends then.
    pub(super) serving: watch::Receiver<()>,
    pub(super) metrics: ConnectionMetrics,
}

impl Handshake {
    /// Performs the handshake. Returns `None` and counts the failure if it fails or takes too long.
    pub(super) async fn perform(self, socket: Socket, connection: &Connection) -> Option<Channel> {
        let Self { tls, cpu, head_timeout, mut serving, metrics } = self;
        let timeout = head_timeout.min(MAX_HANDSHAKE_TIME);
        let accepted = tokio::time::timeout(timeout, accept(tls, cpu, socket, connection));
        let accepted = tokio::select! {
            accepted = accepted => accepted,
            // Nothing is ever sent, so this means that the sender was dropped.
            _ = serving.changed() => return None,
        };
        let error = match accepted {
            Ok(Ok(stream)) => return Some(Channel::Encrypted(Box::new(stream))),
            Ok(Err(error)) => error.to_string(),
            Err(elapsed) => elapsed.to_string(),
        };
        metrics.count_failed_handshake();
        tracing::debug!(
            peer = %connection.peer(),
            error,
            "a connection is closed: the TLS handshake failed"
        );
        None
    }
}

/// Performs the server side of a TLS handshake.
///
/// A ClientHello costs its sender nothing and the server a signature, so handshakes are queued
/// fairly by owner like all CPU work: an address that sends hellos without end delays others by one
/// signature.
async fn accept(
    tls: Arc<ServerConfig>,
    cpu: CpuPool,
    socket: Socket,
    connection: &Connection,
) -> io::Result<TlsStream<Socket>> {
    let hello = LazyConfigAcceptor::new(Acceptor::default(), socket).await?;
    let ticket = CpuBudget::new(connection.owner(), Duration::MAX)
        .ticket(HELLO_COST)
        .map_err(io::Error::other)?;
    cpu.run(&ticket, move || hello.into_stream(tls)).await.map_err(io::Error::other)?.await
}
