//! The HTTP client, whose connections let others have their turn.
//!
//! What a server sends may cost far more than to read it: the size of a chunk may have any number of zeros before it, and as long as
//! more is there the HTTP client reads on, on the threads that serve everybody. Threads of its own would cost a request a fifth more CPU
//! time, and one that streams two thirds, as each piece of an answer would change threads.

use std::error::Error;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use hyper::Uri;
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use reqwest::Body;
use rustls::ClientConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tower_service::Service;

/// Bytes of a server behind which others have their turn: some take a hundred times as long to understand as to read.
const READ_IN_TURN: usize = 64 << 10;
/// Most bytes of a connection that come to nothing. Of HTTP/2 some megabytes are read ahead of who reads an answer.
const FOR_NOTHING: usize = 8 << 20;
/// What a connection may take to be made, TLS included.
const CONNECTED: Duration = Duration::from_secs(3);
/// Connections without a request that are kept, and for how long.
const IDLE: usize = 1024;
const IDLE_FOR: Duration = Duration::from_secs(90);
/// After so long without a sign of the other machine it is asked for one, so often and in such intervals; what was sent is to be heard so soon.
const ALIVE: Duration = Duration::from_secs(15);
const UNANSWERED: u32 = 3;
const UNHEARD: Duration = Duration::from_secs(30);

pub(crate) type Client = legacy::Client<Connector, Body>;

/// A client whose TLS is like this.
pub(crate) fn client(tls: ClientConfig) -> Client {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    // Tokens are small and wanted at once.
    http.set_nodelay(true);
    http.set_connect_timeout(Some(CONNECTED));
    http.set_keepalive(Some(ALIVE));
    http.set_keepalive_interval(Some(ALIVE));
    http.set_keepalive_retries(Some(UNANSWERED));
    #[cfg(target_os = "linux")]
    http.set_tcp_user_timeout(Some(UNHEARD));
    let https = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_all_versions();
    let connector = Connector(https.wrap_connector(Tcp(http)));
    let mut client = legacy::Client::builder(TokioExecutor::new());
    client.timer(TokioTimer::new()).pool_timer(TokioTimer::new());
    // It reads no more at once. The head of an answer may be as long.
    client.http1_max_buf_size(READ_IN_TURN);
    client.pool_idle_timeout(IDLE_FOR).pool_max_idle_per_host(IDLE);
    client.build(connector)
}

type BoxError = Box<dyn Error + Send + Sync>;
type Connecting<T> = Pin<Box<dyn Future<Output = Result<T, BoxError>> + Send>>;

/// Makes connections, in time.
#[derive(Clone)]
pub(crate) struct Connector(HttpsConnector<Tcp>);

impl Service<Uri> for Connector {
    type Response = MaybeHttpsStream<TokioIo<InTurns>>;
    type Error = BoxError;
    type Future = Connecting<Self::Response>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let connecting = self.0.call(to);
        Box::pin(async move { timeout(CONNECTED, connecting).await? })
    }
}

/// Makes those of TCP.
#[derive(Clone)]
pub(crate) struct Tcp(HttpConnector);

impl Service<Uri> for Tcp {
    type Response = TokioIo<InTurns>;
    type Error = BoxError;
    type Future = Connecting<Self::Response>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let connecting = self.0.call(to);
        Box::pin(async move {
            let stream = connecting.await?.into_inner();
            Ok(TokioIo::new(InTurns { stream, read: 0, for_nothing: ForNothing::default() }))
        })
    }
}

/// Bytes that a connection has read since the last piece of an answer that came of it. It is among the extensions of answers.
#[derive(Clone, Default)]
pub(crate) struct ForNothing(Arc<AtomicUsize>);

/// A stream that pauses now and then for as long as others have their turn, and fails when nothing comes of what it reads.
pub(crate) struct InTurns<S = TcpStream> {
    stream: S,
    /// Bytes since it has last paused, or waited for more.
    read: usize,
    for_nothing: ForNothing,
}

impl<S: AsyncRead + Unpin> AsyncRead for InTurns<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.read >= READ_IN_TURN {
            self.read = 0;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buf);
        let came = buf.filled().len() - before;
        self.read = if polled.is_pending() { 0 } else { self.read + came };
        if self.for_nothing.0.fetch_add(came, Relaxed) + came > FOR_NOTHING {
            return Poll::Ready(Err(io::Error::other("it sends more and more of which no answer comes")));
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for InTurns<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl Connection for InTurns {
    fn connected(&self) -> Connected {
        self.stream.connected().extra(self.for_nothing.clone())
    }
}

/// The body of an answer.
struct Heard {
    body: Incoming,
    for_nothing: ForNothing,
}

/// An answer whose head has come.
pub(crate) fn heard(answer: hyper::Response<Incoming>) -> reqwest::Response {
    let for_nothing = answer.extensions().get::<ForNothing>().cloned().unwrap_or_default();
    for_nothing.0.store(0, Relaxed);
    answer.map(|body| Body::wrap(Heard { body, for_nothing })).into()
}

impl http_body::Body for Heard {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if polled.is_ready() {
            self.for_nothing.0.store(0, Relaxed);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use tokio::io::AsyncReadExt;

    use super::*;

    #[tokio::test]
    async fn others_have_their_turn_behind_so_many_bytes() {
        let mut stream = InTurns { stream: tokio::io::repeat(b'0'), read: 0, for_nothing: ForNothing::default() };
        let mut piece = vec![0; READ_IN_TURN / 2];
        for _ in 0..3 {
            for _ in 0..2 {
                assert_eq!(stream.read(&mut piece).now_or_never().unwrap().unwrap(), piece.len());
            }
            assert!(stream.read(&mut piece).now_or_never().is_none());
        }
        // It is woken by itself, and ends where nothing comes of it.
        stream.read_exact(&mut vec![0; FOR_NOTHING / 2]).await.unwrap();
        stream.for_nothing.0.store(0, Relaxed);
        stream.read_exact(&mut vec![0; FOR_NOTHING]).await.unwrap();
        stream.read_exact(&mut vec![0; READ_IN_TURN]).await.unwrap_err();
    }
}
