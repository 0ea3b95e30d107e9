//! Client connections: HTTP/1.1, with or without TLS. Their number is limited, and connections that
//! send or read nothing can't keep others out.

mod answer_body;
mod bulk;
mod channel;
mod pending;
mod socket;
mod table;

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody};
use chiasm_cpu::CpuPool;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use self::answer_body::AnswerBody;
pub(crate) use self::bulk::{BulkThreads, LARGE_BODY_BYTES};
use self::channel::{Channel, Handshake};
use self::pending::PendingConnections;
use self::socket::Socket;
use self::table::ConnectionTable;
use crate::connection::Connection;
use crate::connection_metrics::ConnectionMetrics;
use crate::http_rules::MAX_HEAD_BYTES;
use crate::layers::{self, RequestLayers};
use crate::poll_epoch::with_epochs;
use crate::settings::HttpLimits;
use crate::tls::Certificate;

/// The size of a connection's read buffer, which it may keep while it is idle. hyper's own 400 kB
/// would be gigabytes for all connections. hyper refuses a request head of over twice the size;
/// [`http_rules::check`](crate::http_rules::check) is exact.
const READ_BUFFER_BYTES: usize = MAX_HEAD_BYTES;

/// The pause after a failed accept, which is usually caused by a lack of file descriptors.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The parts of the server that connections use.
pub(crate) struct ConnectionSettings {
    pub(crate) limits: HttpLimits,
    pub(crate) metrics: ConnectionMetrics,
    /// The threads on which handshakes are computed.
    pub(crate) cpu: CpuPool,
    pub(crate) bulk: Arc<BulkThreads>,
    /// The routes that answer requests.
    pub(crate) app: Router,
    pub(crate) layers: Arc<RequestLayers>,
}

/// Serves until `stop`, then lets requests in flight finish. See
/// [`Server::serve`](crate::Server::serve).
pub(crate) async fn serve(
    listener: TcpListener,
    certificate: Option<Arc<Certificate>>,
    settings: ConnectionSettings,
    stop: impl Future<Output = ()>,
) {
    let ConnectionSettings { limits, metrics, cpu, bulk, app, layers } = settings;
    let table = ConnectionTable::new(limits.connections, metrics.clone());
    let mut pending = PendingConnections::new(table);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .half_close(true)
        .max_buf_size(READ_BUFFER_BYTES);
    let graceful = GracefulShutdown::new();
    let (serving, _) = watch::channel(());
    let mut stop = std::pin::pin!(stop);
    loop {
        let entered = tokio::select! {
            (stream, peer) = accept(&listener) => {
                pending.enter_or_wait(stream, Arc::new(Connection::from_peer(peer)))
            }
            entered = pending.next() => Some(entered),
            () = &mut stop => break,
        };
        let Some((stream, slot)) = entered else { continue };
        let connection = slot.connection().clone();
        let socket = Socket::new(stream, connection.clone(), limits.write_timeout, metrics.clone());
        let service = service(app.clone(), layers.clone(), connection.clone());
        let handshake = certificate.as_ref().map(|certificate| Handshake {
            tls: certificate.current(),
            cpu: cpu.clone(),
            head_timeout: limits.head_timeout,
            serving: serving.subscribe(),
            metrics: metrics.clone(),
        });
        let http = http.clone();
        let watcher = graceful.watcher();
        let serve = async move {
            let channel = match handshake {
                None => Channel::Plain(socket),
                // Boxed, so that connections without TLS don't pay for its size.
                Some(handshake) => {
                    match Box::pin(handshake.perform(socket, slot.connection())).await {
                        Some(channel) => channel,
                        None => return,
                    }
                }
            };
            if let Err(error) =
                watcher.watch(http.serve_connection(TokioIo::new(channel), service)).await
            {
                tracing::trace!(%error, "a connection ended early");
            }
        };
        let bulk = bulk.clone();
        let served = connection.clone();
        let task = tokio::spawn(async move { bulk.serve(served, with_epochs(serve)).await });
        // Set before the next connection arrives, which may have this one closed.
        connection.set_task(task.abort_handle());
    }
    drop((listener, serving));
    graceful.shutdown().await;
}

/// The response to a request.
type Answer = Response<AnswerBody>;

/// Returns the service that answers the requests of a connection.
fn service(
    app: Router,
    layers: Arc<RequestLayers>,
    connection: Arc<Connection>,
) -> impl Service<Request<Incoming>, Response = Answer, Error = Infallible, Future: Send> + Send {
    service_fn(move |request: Request<Incoming>| {
        // A request with a body is only complete once its body has been read.
        if request.body().is_end_stream() {
            connection.engage();
        }
        let connection = connection.clone();
        let answer =
            layers::answer(app.clone(), layers.clone(), connection.clone(), request.map(Body::new));
        async { Ok(answer.await.map(|body| AnswerBody::new(body, connection))) }
    })
}

async fn accept(listener: &TcpListener) -> (TcpStream, IpAddr) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                // An answer is written in one piece, and so is each event of a stream, so Nagle's
                // algorithm would only delay them.
                let _ = stream.set_nodelay(true);
                return (stream, peer.ip());
            }
            Err(error) if affects_one_connection(&error) => {}
            Err(error) => {
                tracing::warn!(%error, "no connection can be accepted");
                tokio::time::sleep(ACCEPT_RETRY_PAUSE).await;
            }
        }
    }
}

/// Returns `true` if the error concerns only the connection that was to be accepted.
fn affects_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

#[cfg(test)]
mod tests;
