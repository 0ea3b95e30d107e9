//! The socket of a connection: it limits reads, times out stalled writes and detects clients that
//! disconnect.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

use crate::connection::Connection;
use crate::connection_metrics::ConnectionMetrics;
use crate::poll_epoch::PollEpoch;

/// The maximum number of bytes read from a client before other tasks run.
///
/// Some bytes take longer to parse than to read, and hyper reads on while there are more: a chunk's
/// size may begin with any number of zeros.
const MAX_READ_PER_POLL: usize = 256 << 10;

/// A client's socket. Writing fails if the system has taken nothing for `write_timeout`.
///
/// hyper would either cancel a request as soon as the client closes its sending side, even if the
/// answer is ready, or never check for that. So hyper is configured never to check (`half_close`).
/// This socket checks instead while an engine works for the client, whenever hyper writes or
/// flushes, which is each time that it is woken.
pub(super) struct Socket {
    /// Always `Some` between two polls.
    stream: Option<TcpStream>,
    /// `true` if the stream is registered with the bulk threads' runtime.
    is_bulk: bool,
    connection: Arc<Connection>,
    write_timeout: Duration,
    metrics: ConnectionMetrics,
    /// The timer that runs while the system takes nothing more.
    stalled: Option<Pin<Box<Sleep>>>,
    /// The epoch of the last read, and the bytes read in it.
    epoch: Option<PollEpoch>,
    read_in_epoch: usize,
}

impl Socket {
    pub(super) fn new(
        stream: TcpStream,
        connection: Arc<Connection>,
        write_timeout: Duration,
        metrics: ConnectionMetrics,
    ) -> Self {
        Self {
            stream: Some(stream),
            is_bulk: false,
            connection,
            write_timeout,
            metrics,
            stalled: None,
            epoch: None,
            read_in_epoch: 0,
        }
    }

    /// Returns `true` if a disconnect of the client cancels the current request.
    pub(super) fn cancels_on_disconnect(&self) -> bool {
        self.connection.cancels_on_disconnect()
    }

    /// Returns the stream, registered with the runtime that serves the connection now. Otherwise
    /// the other runtime would be woken for each piece.
    fn stream(&mut self) -> io::Result<Pin<&mut TcpStream>> {
        if self.is_bulk != self.connection.is_bulk() {
            self.is_bulk = !self.is_bulk;
            self.stream = match self.stream.take() {
                Some(stream) => Some(TcpStream::from_std(stream.into_std()?)?),
                None => None,
            };
        }
        self.stream.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Handles the result of a write: checks the client and the write timeout if nothing was
    /// written.
    fn check_after_write(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        self.check_client(cx)?;
        let timer = self.stalled.get_or_insert_with(|| {
            if !self.connection.cancels_on_disconnect() {
                self.connection.start_waiting();
            }
            Box::pin(tokio::time::sleep(self.write_timeout))
        });
        ready!(timer.as_mut().poll(cx));
        self.metrics.count_closed_unread();
        tracing::debug!(
            peer = %self.connection.peer(),
            "a connection is closed: its client does not read (--write-timeout)"
        );
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    /// Fails if the client has disconnected while an engine works for it, and wakes the task on a
    /// disconnect. A disconnect can't be seen while a pipelined request is unread.
    fn check_client(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if !self.connection.cancels_on_disconnect() {
            return Ok(());
        }
        let mut next = [0];
        match self.stream()?.poll_peek(cx, &mut ReadBuf::new(&mut next)) {
            Poll::Ready(Ok(0)) => Err(io::ErrorKind::ConnectionAborted.into()),
            Poll::Ready(Err(error)) => Err(error),
            Poll::Ready(Ok(_)) | Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let epoch = PollEpoch::current();
        if epoch.is_none() || epoch != self.epoch {
            self.epoch = epoch;
            self.read_in_epoch = 0;
        }
        if self.read_in_epoch >= MAX_READ_PER_POLL {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buf.filled().len();
        let read = self.stream()?.poll_read(cx, buf);
        self.read_in_epoch += buf.filled().len() - before;
        read
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = self.stream()?.poll_write(cx, bytes);
        self.check_after_write(cx, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_client(cx)?;
        self.stream()?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::poll_epoch::with_epochs;

    #[tokio::test]
    async fn endless_sender_lets_other_tasks_run() {
        const SENT: usize = 4 * MAX_READ_PER_POLL;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, peer) = listener.accept().await.unwrap();
        let connection = Arc::new(Connection::from_peer(peer.ip()));
        let mut socket =
            Socket::new(stream, connection, Duration::from_secs(60), ConnectionMetrics::default());
        let sending = tokio::spawn(async move { client.write_all(&vec![b'0'; SENT]).await });
        let read = with_epochs(async move {
            let mut epoch = None;
            let mut in_epoch = 0;
            let mut all = 0;
            let mut buffer = [0; 4096];
            while all < SENT {
                let read = socket.read(&mut buffer).await.unwrap();
                assert_ne!(read, 0);
                in_epoch = if epoch == PollEpoch::current() { in_epoch + read } else { read };
                epoch = PollEpoch::current();
                assert!(in_epoch < MAX_READ_PER_POLL + buffer.len(), "{in_epoch}");
                all += read;
            }
            all
        });
        assert_eq!(tokio::time::timeout(Duration::from_secs(30), read).await.unwrap(), SENT);
        sending.await.unwrap().unwrap();
    }
}
