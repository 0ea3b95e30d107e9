//! Connections of clients: HTTP/1.1, within TLS or not, as many as allowed, none that keeps others
//! out by saying nothing or reading nothing.

mod answer_body;
mod bulk;
mod channel;
mod lobby;
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
use chiasm_pipeline::cpu::CpuPool;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use self::answer_body::AnswerBody;
pub(crate) use self::bulk::{BulkThreads, LARGE};
use self::channel::{Channel, Handshake};
use self::lobby::Lobby;
use self::socket::Socket;
use self::table::Table;
use crate::connection::Connection;
use crate::connection_metrics::ConnectionMetrics;
use crate::layers::{self, RequestLayers};
use crate::poll_epoch::with_epochs;
use crate::settings::HttpLimits;
use crate::tls::Certificate;

/// What a connection reads into, and may keep while it is idle: hyper's own 400 kB would be
/// gigabytes for all connections. A head that does not end within what is read into it once is
/// refused.
const BUFFER: usize = 64 << 10;

/// After no connection could be accepted, mostly because the process has no file descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// Everything that connections need of the server.
pub(crate) struct ConnectionSettings {
    pub(crate) limits: HttpLimits,
    pub(crate) metrics: ConnectionMetrics,
    /// The threads on which handshakes are computed.
    pub(crate) cpu: CpuPool,
    pub(crate) bulk: Arc<BulkThreads>,
    /// The answers to requests.
    pub(crate) app: Router,
    pub(crate) layers: Arc<RequestLayers>,
}

/// Serves until `stop`, then lets requests in flight finish, as
/// [`Server::serve`](crate::Server::serve) says.
pub(crate) async fn serve(
    listener: TcpListener,
    certificate: Option<Arc<Certificate>>,
    settings: ConnectionSettings,
    stop: impl Future<Output = ()>,
) {
    let ConnectionSettings { limits, metrics, cpu, bulk, app, layers } = settings;
    let mut lobby = Lobby::before(Table::new(limits.connections, metrics.clone()));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .half_close(true)
        .max_buf_size(BUFFER);
    let graceful = GracefulShutdown::new();
    let (serving, _) = watch::channel(());
    let mut stop = std::pin::pin!(stop);
    loop {
        let entered = tokio::select! {
            (stream, peer) = accept(&listener) => lobby.arrive(stream, Arc::new(Connection::from_peer(peer))),
            entered = lobby.next() => Some(entered),
            () = &mut stop => break,
        };
        let Some((stream, place)) = entered else { continue };
        let connection = place.connection().clone();
        let socket = Socket::new(stream, connection.clone(), limits.write_timeout, metrics.clone());
        let service = service(app.clone(), layers.clone(), connection.clone());
        let handshake = certificate.as_ref().map(|certificate| Handshake {
            tls: certificate.current(),
            cpu: cpu.clone(),
            head_timeout: limits.head_timeout,
            serving: serving.subscribe(),
            metrics: metrics.clone(),
        });
        let (http, watcher) = (http.clone(), graceful.watcher());
        let served = async move {
            let channel = match handshake {
                None => Channel::Plain(socket),
                // Boxed, as connections that are not encrypted need not have its size.
                Some(handshake) => {
                    match Box::pin(handshake.shake(socket, place.connection())).await {
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
        let its = connection.clone();
        let task = tokio::spawn(async move { bulk.serve(its, with_epochs(served)).await });
        // Before another one arrives, for which it may have to be closed.
        connection.served_by(task.abort_handle());
    }
    drop((listener, serving));
    graceful.shutdown().await;
}

/// What answers the requests of a connection.
fn service(
    app: Router,
    layers: Arc<RequestLayers>,
    connection: Arc<Connection>,
) -> impl Service<Request<Incoming>, Response = Response<AnswerBody>, Error = Infallible, Future: Send>
+ Send {
    service_fn(move |request: Request<Incoming>| {
        // One with a body is not there before all of it is.
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
                // An answer is written in one piece, and so is each event of a stream.
                let _ = stream.set_nodelay(true);
                return (stream, peer.ip());
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                tracing::warn!(%error, "no connection can be accepted");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Whether only the connection that was to be accepted has failed.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

#[cfg(test)]
mod tests;
