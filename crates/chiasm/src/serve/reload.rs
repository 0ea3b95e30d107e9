//! SIGHUP: certificates and keys are read again.

use std::sync::Arc;

use chiasm_server::{Certificate, Server};
use chiasm_upstream::UpstreamKey;

use crate::cli::AccessArgs;
use crate::signals::{Hangup, Hangups};

/// The files that are read again, and the parts that use them. A file that can't be used changes
/// nothing.
pub(super) struct Reload {
    pub(super) hangups: Hangups,
    pub(super) certificate: Option<Arc<Certificate>>,
    pub(super) access: AccessArgs,
    /// The keys for servers of `--upstream`.
    pub(super) upstream_keys: Vec<Arc<UpstreamKey>>,
    pub(super) server: Arc<Server>,
}

impl Reload {
    /// Reads the files at each SIGHUP. Returns when the terminal that the process was started at is
    /// gone.
    pub(super) async fn follow(mut self) {
        while self.hangups.next().await == Hangup::Reload {
            self.reload().await;
        }
    }

    async fn reload(&self) {
        tracing::info!("SIGHUP: certificates and keys are read again");
        if let Some(certificate) = &self.certificate
            && let Err(error) = certificate.reload().await
        {
            tracing::warn!(%error, "the new certificate is not taken, the old one stays");
        }
        let access = self.access.clone();
        let upstream_keys = self.upstream_keys.clone();
        let frontend = self.server.clone();
        // Blocking reads: a file system that hangs must not stall the runtime.
        let reload = move || reload_keys(&access, &upstream_keys, &frontend);
        if let Err(error) = tokio::task::spawn_blocking(reload).await {
            tracing::error!(%error, "the keys could not be read again");
        }
    }
}

/// Reads the API keys and the keys for servers again. A file that can't be used leaves its old
/// keys.
fn reload_keys(access: &AccessArgs, upstream_keys: &[Arc<UpstreamKey>], server: &Server) {
    if access.api_key_file.is_some() {
        match access.keys() {
            Ok(keys) => {
                server.keys().replace(keys);
                tracing::info!("the API keys have been read again");
            }
            Err(error) => {
                tracing::warn!(%error, "the new API keys are not taken, the old ones stay")
            }
        }
    }
    for key in upstream_keys {
        match key.reload() {
            Ok(()) => {
                tracing::info!(file = %key.path().display(), "the key for a server has been read again")
            }
            Err(error) => {
                tracing::warn!(%error, "the new key for a server is not taken, the old one stays")
            }
        }
    }
}
