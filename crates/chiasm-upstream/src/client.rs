//! The HTTP client. Its connections yield to other tasks. `server`, `events`, `chunk` and `pieces`
//! limit the size of answers.
//!
//! Some input costs far more to parse than to read: in HTTP/1 chunked encoding, a chunk size may
//! have any number of leading zeros. The HTTP client reads for as long as data is available, on the
//! threads that serve all requests. Dedicated threads would cost a request a fifth more CPU time,
//! and a streamed request two thirds more, because each piece of an answer would change threads.

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

/// The number of bytes after which a connection yields. Some input takes a hundred times as long to
/// parse as to read.
const READ_QUOTA_BYTES: usize = 64 << 10;
/// The maximum number of bytes read between two pieces of an answer. HTTP/2 buffers megabytes that
/// nobody has read yet.
const MAX_UNPRODUCTIVE_BYTES: usize = 8 << 20;
/// The deadline for a new connection, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// The maximum number of idle connections to a server.
const MAX_IDLE_CONNECTIONS: usize = 1024;
/// The time for which an idle connection is kept. Uvicorn, which serves vLLM and SGLang, closes
/// idle connections after 5 s (`timeout_keep_alive`) and loses a request that is sent at that
/// moment.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// The idle time before the first TCP keep-alive probe, and the interval between probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// The number of unanswered probes that end a connection.
const MAX_UNANSWERED_PROBES: u32 = 3;
/// The deadline for the acknowledgement of sent bytes.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(30);

/// A client for one server. Clones share their connections.
#[derive(Clone)]
pub(crate) struct Client {
    pooled: legacy::Client<Connector, Body>,
    /// Opens a connection for each request.
    fresh: legacy::Client<Connector, Body>,
}

/// The reason why a request got no answer. Holds a message for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SendError {
    /// No byte of the request was sent because there was no connection.
    NotConnected(String),
    /// The connection ended before the head of an answer. The server may have begun to work.
    Lost(String),
}

/// Builds a client with the given TLS configuration.
pub(crate) fn build_client(tls: ClientConfig) -> Client {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    // Tokens are small and should arrive without delay.
    http.set_nodelay(true);
    http.set_connect_timeout(Some(CONNECT_TIMEOUT));
    http.set_keepalive(Some(KEEPALIVE_INTERVAL));
    http.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    http.set_keepalive_retries(Some(MAX_UNANSWERED_PROBES));
    #[cfg(target_os = "linux")]
    http.set_tcp_user_timeout(Some(TCP_USER_TIMEOUT));
    let https =
        HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_all_versions();
    let connector = Connector(https.wrap_connector(Tcp(http)));
    let mut client = legacy::Client::builder(TokioExecutor::new());
    client.timer(TokioTimer::new()).pool_timer(TokioTimer::new());
    // The buffer for one read, and the limit for the head of an answer.
    client.http1_max_buf_size(READ_QUOTA_BYTES);
    client.pool_idle_timeout(IDLE_TIMEOUT).pool_max_idle_per_host(MAX_IDLE_CONNECTIONS);
    let pooled = client.build(connector.clone());
    let fresh = client.pool_max_idle_per_host(0).build(connector);
    Client { pooled, fresh }
}

impl Client {
    /// Sends a request and returns the head of the answer.
    ///
    /// The server may have closed a reused connection before the request arrived. If such a
    /// connection ends without a byte of an answer, the request is sent once more, on a fresh
    /// connection. The request may also have crashed the server, so a failure of the second try is
    /// always [`SendError::Lost`].
    pub(crate) async fn send(
        &self,
        request: Request<Bytes>,
    ) -> Result<reqwest::Response, SendError> {
        let error = match self.pooled.request(request.clone().map(Body::from)).await {
            Ok(answer) => return Ok(wrap_answer(answer)),
            Err(error) => error,
        };
        if error.is_connect() || was_never_sent(&error) {
            return Err(SendError::NotConnected(error_chain(&error)));
        }
        if !ended_before_an_answer(&error) {
            return Err(SendError::Lost(error_chain(&error)));
        }
        let again = self.fresh.request(request.map(Body::from)).await;
        again.map(wrap_answer).map_err(|error| SendError::Lost(error_chain(&error)))
    }
}

/// Returns `true` if the HTTP client gave up before it wrote a byte of the request.
fn was_never_sent(error: &legacy::Error) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<hyper::Error>());
    cause.is_some_and(hyper::Error::is_canceled)
}

/// Returns `true` if a connection had carried an earlier answer and ended without a byte of this
/// one.
fn ended_before_an_answer(error: &legacy::Error) -> bool {
    let mut extras = Extensions::new();
    if let Some(connection) = error.connect_info() {
        connection.get_extras(&mut extras);
    }
    let progress = extras.get::<ReadProgress>();
    progress.is_some_and(|progress| {
        progress.has_answered.load(Relaxed) && progress.unproductive_bytes.load(Relaxed) == 0
    })
}

/// Joins the messages of an error and its causes.
pub(crate) fn error_chain(error: &dyn Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        message = format!("{message}: {error}");
        cause = error.source();
    }
    message
}

type BoxError = Box<dyn Error + Send + Sync>;
type Connecting<T> = Pin<Box<dyn Future<Output = Result<T, BoxError>> + Send>>;

/// Opens TCP or TLS connections within [`CONNECT_TIMEOUT`].
#[derive(Clone)]
pub(crate) struct Connector(HttpsConnector<Tcp>);

impl Service<Uri> for Connector {
    type Response = MaybeHttpsStream<TokioIo<YieldingStream>>;
    type Error = BoxError;
    type Future = Connecting<Self::Response>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let connecting = self.0.call(to);
        Box::pin(async move { timeout(CONNECT_TIMEOUT, connecting).await? })
    }
}

/// Opens TCP connections.
#[derive(Clone)]
pub(crate) struct Tcp(HttpConnector);

impl Service<Uri> for Tcp {
    type Response = TokioIo<YieldingStream>;
    type Error = BoxError;
    type Future = Connecting<Self::Response>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let connecting = self.0.call(to);
        Box::pin(async move {
            let stream = connecting.await?.into_inner();
            Ok(TokioIo::new(YieldingStream { stream, read: 0, progress: ReadProgress::default() }))
        })
    }
}

/// The reading state of a connection, stored as an extension of its answers and errors.
#[derive(Clone, Default)]
struct ReadProgress(Arc<ReadProgressState>);

#[derive(Default)]
struct ReadProgressState {
    /// The bytes read since the last piece of an answer.
    unproductive_bytes: AtomicUsize,
    /// `true` once the head of an answer has arrived.
    has_answered: AtomicBool,
}

impl Deref for ReadProgress {
    type Target = ReadProgressState;

    fn deref(&self) -> &ReadProgressState {
        &self.0
    }
}

/// A stream that yields to other tasks after [`READ_QUOTA_BYTES`] bytes, and fails after
/// [`MAX_UNPRODUCTIVE_BYTES`] bytes without a piece of an answer.
pub(crate) struct YieldingStream<S = TcpStream> {
    stream: S,
    /// The bytes read since the stream last yielded or waited.
    read: usize,
    progress: ReadProgress,
}

impl<S: AsyncRead + Unpin> AsyncRead for YieldingStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.read >= READ_QUOTA_BYTES {
            self.read = 0;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buf);
        let count = buf.filled().len() - before;
        self.read = if polled.is_pending() { 0 } else { self.read + count };
        let unproductive = &self.progress.unproductive_bytes;
        if unproductive.fetch_add(count, Relaxed) + count > MAX_UNPRODUCTIVE_BYTES {
            return Poll::Ready(Err(io::Error::other("the server sends bytes without an answer")));
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for YieldingStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
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

impl Connection for YieldingStream {
    fn connected(&self) -> Connected {
        self.stream.connected().extra(self.progress.clone())
    }
}

/// The body of an answer. Each piece resets the byte count of the connection.
struct CountedBody {
    body: Incoming,
    progress: ReadProgress,
}

/// Wraps the body of an answer whose head has arrived.
fn wrap_answer(answer: hyper::Response<Incoming>) -> reqwest::Response {
    let progress = answer.extensions().get::<ReadProgress>().cloned().unwrap_or_default();
    progress.unproductive_bytes.store(0, Relaxed);
    progress.has_answered.store(true, Relaxed);
    answer.map(|body| Body::wrap(CountedBody { body, progress })).into()
}

impl http_body::Body for CountedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if polled.is_ready() {
            self.progress.unproductive_bytes.store(0, Relaxed);
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
