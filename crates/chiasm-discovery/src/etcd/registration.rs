//! Registration of an agent: its key in etcd, under a lease that is kept alive.

use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::api::{EtcdClient, LeaseId};
use super::{Candidate, Etcd};
use crate::backoff::Backoff;
use crate::failure::Failure;
use crate::http::{self, CALL_TIMEOUT};
use crate::{DiscoveryError, Tls};

/// The timeout for revoking the lease.
const REVOKE_TIMEOUT: Duration = Duration::from_secs(2);

/// An agent's registration in etcd. The key is the prefix and the agent's address, the value is a
/// [`Candidate`].
///
/// Failures of etcd do not affect the agent: as soon as etcd answers again, the task replaces a
/// lost lease and a lost key. The key of a killed agent vanishes when the lease expires.
///
/// After this is dropped, a task revokes the lease within a few seconds; [`end`](Self::end) waits
/// for that task.
#[derive(Debug)]
pub struct Registration {
    /// Dropping the sender ends the task, which then revokes the lease.
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
    is_registered: watch::Receiver<bool>,
}

impl Registration {
    /// The default time to live of a lease that is not renewed.
    pub const DEFAULT_TTL: Duration = Duration::from_secs(10);

    /// Spawns a task that registers `agent` with a lease of `ttl` and renews it every third of that
    /// time.
    ///
    /// `ttl` is rounded down to whole seconds, at least one; etcd may extend it. `tls` is for
    /// `etcds://`.
    /// Requires a Tokio runtime.
    ///
    /// # Errors
    /// [`DiscoveryError::Certificates`] and [`DiscoveryError::Tls`] if the files of `tls` can't be
    /// used.
    pub fn start(
        etcd: Etcd,
        tls: Tls,
        agent: &Candidate,
        ttl: Duration,
    ) -> Result<Self, DiscoveryError> {
        // Reports unusable certificate files now. Each new client reads the files again.
        http::build_client_blocking(&tls)?;
        let (stop, stopped) = oneshot::channel();
        let (sender, is_registered) = watch::channel(false);
        let ttl_seconds = ttl.as_secs().max(1);
        let registrar = Registrar {
            key: format!("{}{}", etcd.prefix, agent.address()),
            value: serde_json::to_vec(agent).unwrap_or_default(),
            etcd,
            tls,
            ttl_seconds,
            // Allows for several attempts before the lease expires.
            call_timeout: CALL_TIMEOUT.min(Duration::from_secs(ttl_seconds) / 3),
            server_index: 0,
            client: None,
            lease: None,
            has_other_owner: false,
            is_registered: sender,
        };
        Ok(Self { stop, task: tokio::spawn(registrar.run(stopped)), is_registered })
    }

    /// Returns a receiver that holds `true` if etcd had the key at the last contact.
    pub fn is_registered(&self) -> watch::Receiver<bool> {
        self.is_registered.clone()
    }

    /// Removes the key. Gives up after a few seconds; the key then vanishes when the lease expires.
    pub async fn end(self) {
        drop(self.stop);
        // The task only fails if it panics or the runtime shuts down. Then there is nothing to wait
        // for.
        let _ = self.task.await;
    }
}

/// The state of a registration's task.
#[derive(Debug)]
struct Registrar {
    etcd: Etcd,
    tls: Tls,
    key: String,
    value: Vec<u8>,
    /// The lease's time to live.
    ttl_seconds: u64,
    call_timeout: Duration,
    /// The index of the current server. Grows with each failure.
    server_index: usize,
    client: Option<EtcdClient>,
    lease: Option<Lease>,
    /// `true` if the key was under another lease at the last check.
    has_other_owner: bool,
    is_registered: watch::Sender<bool>,
}

/// The last lease that was requested. etcd may not have it.
#[derive(Clone, Copy, Debug)]
struct Lease {
    id: LeaseId,
    /// `true` if the key was put under this lease.
    has_key: bool,
}

impl Registrar {
    async fn run(mut self, stopped: oneshot::Receiver<()>) {
        tokio::select! {
            // Nothing is ever sent: the sender is dropped.
            _ = stopped => {}
            () = self.keep_registered() => {}
        }
        self.revoke().await;
        self.is_registered.send_replace(false);
    }

    /// Renews the registration in an endless loop.
    async fn keep_registered(&mut self) {
        let mut backoff = Backoff::new();
        let renew_interval = Duration::from_secs(self.ttl_seconds) / 3;
        let mut outage_is_logged = false;
        loop {
            let renewed = self.renew().await;
            let etcd = &self.etcd;
            let pause = match renewed {
                Ok(()) => {
                    if std::mem::replace(&mut outage_is_logged, false)
                        || !*self.is_registered.borrow()
                    {
                        tracing::info!(%etcd, key = %self.key, "the agent is registered");
                    }
                    self.is_registered.send_if_modified(|is| !std::mem::replace(is, true));
                    backoff = Backoff::new();
                    renew_interval
                }
                Err(failure) => {
                    if std::mem::replace(&mut outage_is_logged, true) {
                        tracing::debug!(
                            %etcd,
                            key = %self.key,
                            %failure,
                            "the agent still can't be registered"
                        );
                    } else {
                        tracing::warn!(
                            %etcd,
                            key = %self.key,
                            %failure,
                            "the agent can't be registered; it keeps running"
                        );
                    }
                    self.is_registered.send_if_modified(|is| std::mem::replace(is, false));
                    self.client = None;
                    self.server_index = self.server_index.wrapping_add(1);
                    backoff.pause_after(Duration::ZERO).min(renew_interval)
                }
            };
            sleep(pause).await;
        }
    }

    /// Renews the lease and makes sure that etcd has the key.
    async fn renew(&mut self) -> Result<(), Failure> {
        let client = match self.client.take() {
            Some(client) => client,
            None => {
                EtcdClient::new(&self.etcd, self.server_index, &self.tls, self.call_timeout).await?
            }
        };
        let client = self.client.insert(client);
        let is_alive = match self.lease {
            Some(Lease { id, .. }) => client.keep_alive(id).await?,
            None => false,
        };
        let mut lease = match self.lease {
            Some(lease) if is_alive => lease,
            _ => {
                // The id is stored first, so that the lease is revoked even if the answer is lost.
                let lease = *self.lease.insert(Lease { id: LeaseId::random(), has_key: false });
                client.grant(lease.id, self.ttl_seconds).await?;
                lease
            }
        };
        if lease.has_key {
            // The key may have been deleted while the lease lived. If another lease holds the key,
            // it is left alone: it names the same address, and two processes would otherwise
            // overwrite each other's key forever.
            if let Some(owner) = client.key_lease(&self.key).await? {
                let had_other_owner =
                    std::mem::replace(&mut self.has_other_owner, !lease.id.matches(owner));
                if self.has_other_owner && !had_other_owner {
                    tracing::warn!(
                        key = %self.key,
                        "another process registers an agent at this address"
                    );
                }
                return Ok(());
            }
            tracing::warn!(key = %self.key, "the agent's key was deleted; putting it again");
        }
        client.put(&self.key, &self.value, lease.id).await?;
        lease.has_key = true;
        self.lease = Some(lease);
        Ok(())
    }

    /// Revokes the lease. Tries each server once.
    async fn revoke(&mut self) {
        let Some(Lease { id, .. }) = self.lease.take() else { return };
        for attempt in 0..self.etcd.endpoints.len() {
            let server_index = self.server_index.wrapping_add(attempt);
            let revoked = async {
                EtcdClient::new(&self.etcd, server_index, &self.tls, REVOKE_TIMEOUT)
                    .await?
                    .revoke(id)
                    .await
            };
            match revoked.await {
                Ok(()) => return,
                // The lease has ended already.
                Err(Failure::Refused { status: 404, .. }) => return,
                Err(failure) => {
                    tracing::debug!(key = %self.key, %failure, "the agent's lease can't be revoked")
                }
            }
        }
        tracing::warn!(
            key = %self.key,
            ttl_s = self.ttl_seconds,
            "the agent's lease can't be revoked; it will expire"
        );
    }
}
