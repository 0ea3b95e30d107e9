//! Connections of clients: HTTP/1.1, as many as allowed, none that says nothing.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::frontend::Frontend;
use crate::{layers, routes};

/// After no connection could be accepted, mostly because the process has no file descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves until `stop`, then lets requests in flight finish.
///
/// Beyond [`Limits::connections`](crate::Limits::connections) new ones wait in the system's queue. One whose next request's
/// head does not arrive within [`Limits::head_timeout`](crate::Limits::head_timeout) is closed, also while nothing is asked.
pub async fn serve(listener: TcpListener, frontend: Arc<Frontend>, stop: impl Future<Output = ()>) {
    let limits = frontend.limits.clone();
    let places = Arc::new(Semaphore::new(limits.connections.clamp(1, Semaphore::MAX_PERMITS)));
    let app = routes::router(frontend.clone());
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head_timeout);
    let graceful = GracefulShutdown::new();
    let mut stop = std::pin::pin!(stop);
    loop {
        let next = async {
            let place = places.clone().acquire_owned().await;
            (place, accept(&listener).await)
        };
        let (place, stream) = tokio::select! {
            next = next => next,
            () = &mut stop => break,
        };
        let (app, frontend) = (app.clone(), frontend.clone());
        let service = service_fn(move |request: Request<Incoming>| {
            let answer = layers::answer(app.clone(), frontend.clone(), request.map(Body::new));
            async { Ok::<_, Infallible>(answer.await) }
        });
        let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            let _place = place;
            if let Err(error) = connection.await {
                tracing::trace!(%error, "a connection ended early");
            }
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // An answer is written in one piece, and so is each event of a stream.
                let _ = stream.set_nodelay(true);
                return stream;
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
