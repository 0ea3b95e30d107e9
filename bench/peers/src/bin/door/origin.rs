//! The server from which images are fetched. Its answers say how long they may be cached.

use std::convert::Infallible;
use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, HeaderValue, IF_NONE_MATCH};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

const TAG: &str = "\"picture\"";

/// A server of one picture, on a thread that lives as long as this process.
pub(crate) struct Origin {
    /// The address. The server ignores the host of requests, so it can also be a proxy.
    pub(crate) address: SocketAddr,
    requests: Arc<AtomicU64>,
}

impl Origin {
    pub(crate) fn start(picture: Bytes) -> Result<Self, Box<dyn Error>> {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let requests = Arc::new(AtomicU64::new(0));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let counter = requests.clone();
        std::thread::spawn(move || runtime.block_on(serve(listener, picture, counter)));
        Ok(Self { address, requests })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/picture.jpg", self.address)
    }

    /// Returns the number of requests so far.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }
}

/// Serves until a connection can't be accepted, which shows as failed requests.
async fn serve(listener: std::net::TcpListener, picture: Bytes, requests: Arc<AtomicU64>) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    while let Ok((stream, _)) = listener.accept().await {
        let picture = picture.clone();
        let requests = requests.clone();
        tokio::spawn(async move {
            let service = service_fn(|request| {
                requests.fetch_add(1, Ordering::Relaxed);
                let response = respond(&request, &picture);
                async { Ok::<_, Infallible>(response) }
            });
            // A closed connection is no failure.
            drop(http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
        });
    }
}

fn respond<B>(request: &Request<B>, picture: &Bytes) -> Response<Full<Bytes>> {
    let is_cached = request.headers().get(IF_NONE_MATCH).is_some_and(|tag| tag == TAG);
    let body = if is_cached { Bytes::new() } else { picture.clone() };
    let mut response = Response::new(Full::new(body));
    if is_cached {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
    }
    for (name, value) in
        [(CACHE_CONTROL, "public, max-age=3600"), (ETAG, TAG), (CONTENT_TYPE, "image/jpeg")]
    {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}
