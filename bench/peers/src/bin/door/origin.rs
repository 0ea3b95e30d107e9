//! The server that images are fetched from. As origins do, it says how long its answers stay good.

use std::convert::Infallible;
use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, IF_NONE_MATCH};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

const TAG: &str = "\"picture\"";

/// Serves one picture, on a thread of its own, as long as this process lives.
pub(crate) struct Origin {
    address: SocketAddr,
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

    /// It answers alike whatever host a request names, so it can be a proxy too.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/picture.jpg", self.address)
    }

    /// How often it was asked so far.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }
}

/// Answers every connection. Ends when one can't be accepted, which shows as failed requests.
async fn serve(listener: std::net::TcpListener, picture: Bytes, requests: Arc<AtomicU64>) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    while let Ok((stream, _)) = listener.accept().await {
        let (picture, requests) = (picture.clone(), requests.clone());
        tokio::spawn(async move {
            let answer = service_fn(|request| {
                requests.fetch_add(1, Ordering::Relaxed);
                let answer = answer(&request, &picture);
                async { answer }
            });
            // A side that closes a connection is no failure.
            drop(http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await);
        });
    }
}

fn answer<B>(request: &Request<B>, picture: &Bytes) -> Result<Response<Full<Bytes>>, Infallible> {
    let known = request.headers().get(IF_NONE_MATCH).is_some_and(|tag| tag == TAG);
    let (status, body) =
        if known { (StatusCode::NOT_MODIFIED, Bytes::new()) } else { (StatusCode::OK, picture.clone()) };
    let mut answer = Response::new(Full::new(body));
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    for (name, value) in [(CACHE_CONTROL, "public, max-age=3600"), (ETAG, TAG), (CONTENT_TYPE, "image/jpeg")] {
        headers.insert(name, hyper::header::HeaderValue::from_static(value));
    }
    Ok(answer)
}
