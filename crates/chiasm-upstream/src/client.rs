//! The HTTP client, whose connections let others have their turn.
//!
//! What a server sends may cost far more than to read it: the size of a chunk may have any number of zeros before it, and as long as
//! more is there the HTTP client reads on, on the threads that serve everybody. Threads of its own would cost a request a fifth more CPU
//! time, and one that streams two thirds, as each piece of an answer would change threads.

use std::error::Error;
use std::future::Future;
use std::io;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::http::Extensions;
use hyper::{Request, Uri};
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
/// The maximum number of idle connections to a server.
const IDLE: usize = 1024;
/// The time for which an idle connection is kept. Uvicorn, which serves vLLM and SGLang, closes
/// connections after 5 s (`timeout_keep_alive`), and a request that crosses that is lost.
const IDLE_FOR: Duration = Duration::from_secs(4);
/// After so long without a sign of the other machine it is asked for one, so often and in such intervals; what was sent is to be heard so soon.
const ALIVE: Duration = Duration::from_secs(15);
const UNANSWERED: u32 = 3;
const UNHEARD: Duration = Duration::from_secs(30);

/// A client for one server. Clones share their connections.
#[derive(Clone)]
pub(crate) struct Client {
    pooled: legacy::Client<Connector, Body>,
    /// Opens a connection for each request.
    fresh: legacy::Client<Connector, Body>,
}

/// Why a request has no answer, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SendError {
    /// No byte of the request was sent: there was no connection.
    NotConnected(String),
    /// The connection ended before the head of an answer. The server may have begun.
    Lost(String),
}

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
    let pooled = client.build(connector.clone());
    let fresh = client.pool_max_idle_per_host(0).build(connector);
    Client { pooled, fresh }
}

impl Client {
    /// Sends a request and returns its answer, of which the head has come.
    ///
    /// A reused connection may have been closed by the server before the request arrived. If it ends
    /// without a byte of an answer, the request is sent once more, on a fresh connection. The server may
    /// also have died of the request, so the failure of the second try is always [`SendError::Lost`].
    pub(crate) async fn send(&self, request: Request<Bytes>) -> Result<reqwest::Response, SendError> {
        let error = match self.pooled.request(request.clone().map(Body::from)).await {
            Ok(answer) => return Ok(heard(answer)),
            Err(error) => error,
        };
        if error.is_connect() || was_never_sent(&error) {
            return Err(SendError::NotConnected(words(&error)));
        }
        if !ended_before_an_answer(&error) {
            return Err(SendError::Lost(words(&error)));
        }
        let again = self.fresh.request(request.map(Body::from)).await;
        again.map(heard).map_err(|error| SendError::Lost(words(&error)))
    }
}

/// Returns `true` if the HTTP client gave up before it wrote a byte of the request.
fn was_never_sent(error: &legacy::Error) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<hyper::Error>());
    cause.is_some_and(hyper::Error::is_canceled)
}

/// Returns `true` if a connection that had carried an answer before ended without a byte of this one.
fn ended_before_an_answer(error: &legacy::Error) -> bool {
    let mut extras = Extensions::new();
    if let Some(connection) = error.connect_info() {
        connection.get_extras(&mut extras);
    }
    let connection = extras.get::<Reading>();
    connection.is_some_and(|reading| reading.has_answered.load(Relaxed) && reading.for_nothing.load(Relaxed) == 0)
}

/// Joins an error and its causes.
pub(crate) fn words(error: &dyn Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        words = format!("{words}: {error}");
        cause = error.source();
    }
    words
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
            Ok(TokioIo::new(InTurns { stream, read: 0, reading: Reading::default() }))
        })
    }
}

/// What was read from a connection; among the extensions of its answers and errors.
#[derive(Clone, Default)]
struct Reading(Arc<ReadingState>);

#[derive(Default)]
struct ReadingState {
    /// The bytes since the last piece of an answer that came of them.
    for_nothing: AtomicUsize,
    /// The head of an answer has come.
    has_answered: AtomicBool,
}

impl Deref for Reading {
    type Target = ReadingState;

    fn deref(&self) -> &ReadingState {
        &self.0
    }
}

/// A stream that pauses now and then for as long as others have their turn, and fails when nothing comes of what it reads.
pub(crate) struct InTurns<S = TcpStream> {
    stream: S,
    /// Bytes since it has last paused, or waited for more.
    read: usize,
    reading: Reading,
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
        if self.reading.for_nothing.fetch_add(came, Relaxed) + came > FOR_NOTHING {
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
        self.stream.connected().extra(self.reading.clone())
    }
}

/// The body of an answer.
struct Heard {
    body: Incoming,
    reading: Reading,
}

/// An answer whose head has come.
fn heard(answer: hyper::Response<Incoming>) -> reqwest::Response {
    let reading = answer.extensions().get::<Reading>().cloned().unwrap_or_default();
    reading.for_nothing.store(0, Relaxed);
    reading.has_answered.store(true, Relaxed);
    answer.map(|body| Body::wrap(Heard { body, reading })).into()
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
            self.reading.for_nothing.store(0, Relaxed);
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
mod tests;
