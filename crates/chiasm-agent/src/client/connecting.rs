//! Connections to an agent's machine.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};

use futures_util::future::{BoxFuture, FutureExt};
use http::Uri;
use hyper_util::rt::TokioIo;
use rustls::InvalidMessage;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tower_service::Service;

use crate::tls::AgentTls;
use crate::wire::Wire;

/// The error if this side uses plain text and the agent requires TLS.
const AGENT_REQUIRES_TLS: &str = "the agent requires TLS, but this side uses plain text: \
                                  give this side --agent-certfile, --agent-keyfile and \
                                  --agent-ca-file";
/// The error if this side uses TLS and the agent plain text.
const AGENT_IS_PLAIN: &str = "the agent uses plain text, but this side uses TLS: \
                              give the agent --agent-certfile, --agent-keyfile and \
                              --agent-ca-file, too";

/// The connector of gRPC channels, with TLS or in plain text.
#[derive(Clone, Debug)]
pub(super) struct Dialer {
    tls: Option<Arc<AgentTls>>,
    /// `true` if the agent rejected the last plain connection because it requires TLS.
    requires_tls: Arc<AtomicBool>,
}

impl Dialer {
    pub(super) fn new(tls: Option<Arc<AgentTls>>) -> Self {
        Self { tls, requires_tls: Arc::default() }
    }

    /// Returns the error of the last connection if the agent requires TLS and this side uses plain
    /// text. The connection's own error says less.
    pub(super) fn tls_mismatch(&self) -> Option<&'static str> {
        self.requires_tls.load(Relaxed).then_some(AGENT_REQUIRES_TLS)
    }
}

impl Service<Uri> for Dialer {
    type Response = TokioIo<Wire>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<TokioIo<Wire>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let Self { tls, requires_tls } = self.clone();
        requires_tls.store(false, Relaxed);
        async move {
            let host = to.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
            let stream = TcpStream::connect((&*host, to.port_u16().unwrap_or_default())).await?;
            // Each token is a message of its own.
            stream.set_nodelay(true)?;
            let Some(tls) = tls else {
                return Ok(TokioIo::new(Wire::plain_to_agent(stream, requires_tls)));
            };
            let name = tls.server_name(&host)?;
            let stream = TlsConnector::from(tls.configs().await.client)
                .connect(name, stream)
                .await
                .map_err(explain_tls_error)?;
            Ok(TokioIo::new(Wire::encrypted(stream)))
        }
        .boxed()
    }
}

/// Returns the error of a failed handshake. If the agent's answer is not TLS, the error says what
/// to do.
fn explain_tls_error(error: io::Error) -> io::Error {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<rustls::Error>());
    match cause {
        Some(rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType)) => {
            io::Error::new(io::ErrorKind::InvalidData, AGENT_IS_PLAIN)
        }
        _ => error,
    }
}
