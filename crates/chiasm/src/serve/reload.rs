//! SIGHUP: reloads certificates and keys.

use std::sync::Arc;

use chiasm_server::{Certificate, Server};
use chiasm_upstream::UpstreamKey;

use crate::cli::AccessArgs;
use crate::signals::{Hangup, Hangups};

/// The files to reload and their users. An invalid file changes nothing.
pub(super) struct Reload {
    pub(super) hangups: Hangups,
    pub(super) certificate: Option<Arc<Certificate>>,
    pub(super) access: AccessArgs,
    /// The keys of the servers of `--upstream`.
    pub(super) upstream_keys: Vec<Arc<UpstreamKey>>,
    pub(super) server: Arc<Server>,
}

impl Reload {
    /// Reloads the files at each SIGHUP. Returns when the process's terminal is gone.
    pub(super) async fn run(mut self) {
        while self.hangups.next().await == Hangup::Reload {
            self.reload().await;
        }
    }

    async fn reload(&self) {
        tracing::info!("SIGHUP: reloading certificates and keys");
        if let Some(certificate) = &self.certificate
            && let Err(error) = certificate.reload().await
        {
            tracing::warn!(%error, "the new certificate can't be used; the old one stays in use");
        }
        let access = self.access.clone();
        let upstream_keys = self.upstream_keys.clone();
        let server = self.server.clone();
        // The reads block, and a hanging file system must not stall the runtime.
        let reload = move || reload_keys(&access, &upstream_keys, &server);
        if let Err(error) = tokio::task::spawn_blocking(reload).await {
            tracing::error!(%error, "the task that reloads keys failed");
        }
    }
}

/// Reloads the API keys and the keys of upstream servers. An invalid file leaves the old keys in
/// use.
fn reload_keys(access: &AccessArgs, upstream_keys: &[Arc<UpstreamKey>], server: &Server) {
    if access.api_key_file.is_some() {
        match access.keys() {
            Ok(keys) => {
                server.keys().replace(keys);
                tracing::info!("the API keys were reloaded");
            }
            Err(error) => {
                tracing::warn!(%error, "the new API keys can't be used; the old ones stay in use")
            }
        }
    }
    for key in upstream_keys {
        match key.reload() {
            Ok(()) => {
                let file = key.path().display();
                tracing::info!(%file, "the key of an upstream server was reloaded")
            }
            Err(error) => {
                tracing::warn!(
                    %error,
                    "the new key of an upstream server can't be used; the old one stays in use"
                )
            }
        }
    }
}
