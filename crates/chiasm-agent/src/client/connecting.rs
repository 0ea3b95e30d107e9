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

/// What is wrong where this side speaks in plain text and the agent wants TLS.
const IS_TLS: &str = "it has certificates and wants to see one, and this side speaks in plain text: give this side --agent-certfile, \
                      --agent-keyfile and --agent-ca-file";
/// What is wrong where this side wants TLS and the agent speaks in plain text.
const IS_PLAIN: &str = "it speaks in plain text, and this side has certificates: give the agent --agent-certfile, --agent-keyfile and \
                        --agent-ca-file too";

/// Makes connections, with TLS or in plain text.
#[derive(Clone, Debug)]
pub(super) struct Connecting {
    tls: Option<Arc<AgentTls>>,
    wants_tls: Arc<AtomicBool>,
}

impl Connecting {
    pub(super) fn new(tls: Option<Arc<AgentTls>>) -> Self {
        Self { tls, wants_tls: Arc::default() }
    }

    /// What was wrong with the last connection, if the agent wants TLS and this side speaks in
    /// plain text. What has failed with the connection says less.
    pub(super) fn mistake(&self) -> Option<&'static str> {
        self.wants_tls.load(Relaxed).then_some(IS_TLS)
    }
}

impl Service<Uri> for Connecting {
    type Response = TokioIo<Wire>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<TokioIo<Wire>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let Self { tls, wants_tls } = self.clone();
        wants_tls.store(false, Relaxed);
        async move {
            let host = to.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
            let stream = TcpStream::connect((&*host, to.port_u16().unwrap_or_default())).await?;
            // Each token is a message of its own.
            stream.set_nodelay(true)?;
            let Some(tls) = tls else {
                return Ok(TokioIo::new(Wire::plain_to_agent(stream, wants_tls)));
            };
            let name = tls.name_at(&host)?;
            let stream = TlsConnector::from(tls.sides().await.client)
                .connect(name, stream)
                .await
                .map_err(in_words)?;
            Ok(TokioIo::new(Wire::encrypted(stream)))
        }
        .boxed()
    }
}

/// Why TLS was not agreed on. What the agent has said may be no TLS at all.
fn in_words(error: io::Error) -> io::Error {
    let why = error.get_ref().and_then(|why| why.downcast_ref::<rustls::Error>());
    match why {
        Some(rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType)) => {
            io::Error::new(io::ErrorKind::InvalidData, IS_PLAIN)
        }
        _ => error,
    }
}
