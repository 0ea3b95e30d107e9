//! Connections to an agent's machine.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::{BoxFuture, FutureExt};
use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tower_service::Service;

use crate::tls::AgentTls;
use crate::wire::Wire;

/// Makes connections, with TLS or in plain text.
#[derive(Clone)]
pub(super) struct Connecting {
    pub(super) tls: Option<Arc<AgentTls>>,
}

impl Service<Uri> for Connecting {
    type Response = TokioIo<Wire>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<TokioIo<Wire>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let tls = self.tls.clone();
        async move {
            let host = to.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
            let stream = TcpStream::connect((&*host, to.port_u16().unwrap_or_default())).await?;
            // Each token is a message of its own.
            stream.set_nodelay(true)?;
            let Some(tls) = tls else { return Ok(TokioIo::new(Wire::plain(stream))) };
            let name = tls.name_at(&host)?;
            let stream = TlsConnector::from(tls.sides().await.client).connect(name, stream).await?;
            Ok(TokioIo::new(Wire::encrypted(stream)))
        }
        .boxed()
    }
}
