//! The HTTP client, whose connections yield to other tasks.
//!
//! Some bytes of a server cost far more to parse than to read: the size of a chunk may have any
//! number of leading zeros. The HTTP client reads on as long as there is more, on the threads that
//! serve all requests. Threads of its own would cost a request a fifth more CPU time, and a
//! streamed one two thirds more, as each piece of an answer would change threads.

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

/// The number of bytes after which a connection yields: some take a hundred times as long to parse
/// as to read.
const READ_IN_TURN: usize = 64 << 10;
/// The maximum number of bytes without a piece of an answer. HTTP/2 reads some megabytes ahead of
/// the reader of an answer.
const FOR_NOTHING: usize = 8 << 20;
/// The deadline for a new connection, TLS included.
const CONNECTED: Duration = Duration::from_secs(3);
/// The maximum number of idle connections to a server.
const IDLE: usize = 1024;
/// The time for which an idle connection is kept. Uvicorn, which serves vLLM and SGLang, closes
/// idle connections after 5 s (`timeout_keep_alive`). A request that is sent at that moment is
/// lost.
const IDLE_FOR: Duration = Duration::from_secs(4);
/// The idle time before the first TCP keep-alive probe, and the interval between probes.
const ALIVE: Duration = Duration::from_secs(15);
/// The number of unanswered probes that end a connection.
const UNANSWERED: u32 = 3;
/// The deadline for the acknowledgement of sent bytes.
const UNHEARD: Duration = Duration::from_secs(30);

/// A client for one server. Clones share their connections.
#[derive(Clone)]
pub(crate) struct Client {
    pooled: legacy::Client<Connector, Body>,
    /// Opens a connection for each request.
    fresh: legacy::Client<Connector, Body>,
}

/// An error of a request that has no answer, with a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SendError {
    /// No byte of the request was sent: there was no connection.
    NotConnected(String),
    /// The connection ended before the head of an answer. The server may have begun.
    Lost(String),
}

/// Builds a client with this TLS configuration.
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
    let https =
        HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_all_versions();
    let connector = Connector(https.wrap_connector(Tcp(http)));
    let mut client = legacy::Client::builder(TokioExecutor::new());
    client.timer(TokioTimer::new()).pool_timer(TokioTimer::new());
    // The buffer for one read, and the limit for the head of an answer.
    client.http1_max_buf_size(READ_IN_TURN);
    client.pool_idle_timeout(IDLE_FOR).pool_max_idle_per_host(IDLE);
    let pooled = client.build(connector.clone());
    let fresh = client.pool_max_idle_per_host(0).build(connector);
    Client { pooled, fresh }
}

impl Client {
    /// Sends a request. Returns with the head of the answer.
    ///
    /// A reused connection may have been closed by the server before the request arrived. If it
    /// ends without a byte of an answer, the request is sent once more, on a fresh connection. The
    /// server may also have died of the request, so the failure of the second try is always
    /// [`SendError::Lost`].
    pub(crate) async fn send(
        &self,
        request: Request<Bytes>,
    ) -> Result<reqwest::Response, SendError> {
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

/// Returns `true` if a connection that had carried an answer before ended without a byte of this
/// one.
fn ended_before_an_answer(error: &legacy::Error) -> bool {
    let mut extras = Extensions::new();
    if let Some(connection) = error.connect_info() {
        connection.get_extras(&mut extras);
    }
    let connection = extras.get::<Reading>();
    connection.is_some_and(|reading| {
        reading.has_answered.load(Relaxed) && reading.for_nothing.load(Relaxed) == 0
    })
}

/// Joins the messages of an error and its causes.
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

/// Opens connections within a deadline.
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

/// Opens TCP connections.
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

/// The state of a connection's reading side, an extension of its answers and errors.
#[derive(Clone, Default)]
struct Reading(Arc<ReadingState>);

#[derive(Default)]
struct ReadingState {
    /// The bytes read since the last piece of an answer.
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

/// A stream that yields to other tasks after [`READ_IN_TURN`] bytes, and fails after
/// [`FOR_NOTHING`] bytes without a piece of an answer.
pub(crate) struct InTurns<S = TcpStream> {
    stream: S,
    /// The bytes read since it last yielded or waited.
    read: usize,
    reading: Reading,
}

impl<S: AsyncRead + Unpin> AsyncRead for InTurns<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
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
            return Poll::Ready(Err(io::Error::other(
                "it sends more and more of which no answer comes",
            )));
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for InTurns<S> {
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

impl Connection for InTurns {
    fn connected(&self) -> Connected {
        self.stream.connected().extra(self.reading.clone())
    }
}

/// The body of an answer, which resets the count of its connection.
struct Heard {
    body: Incoming,
    reading: Reading,
}

/// Wraps the body of an answer whose head has come.
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
