//! An agent's own key in etcd, under a lease that is kept alive.

use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::api::{EtcdClient, LeaseId};
use super::{Candidate, Etcd};
use crate::backoff::Backoff;
use crate::failure::Failure;
use crate::http::{self, CALL_WITHIN};
use crate::{DiscoveryError, Tls};

/// How long a server may take for the last call.
const REVOKE_WITHIN: Duration = Duration::from_secs(2);

/// Names an agent in etcd for as long as it runs: the key is the prefix and the agent's address,
/// the value a [`Candidate`].
///
/// Whatever becomes of etcd, the agent is left alone: a lost lease is granted anew, a lost key put
/// again, as soon as etcd answers. An agent that is killed vanishes from etcd when the lease's time
/// is over. Once this is dropped, the lease is revoked by a task that runs on for some seconds at
/// most; [`end`](Self::end) waits for it.
#[derive(Debug)]
pub struct Registration {
    /// Dropping it ends the task in good order.
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
    is_registered: watch::Receiver<bool>,
}

impl Registration {
    /// What an agent's lease lasts without a sign of life from it.
    pub const DEFAULT_TTL: Duration = Duration::from_secs(10);

    /// Registers `agent`, on a task of its own, with a lease of `ttl` (whole seconds, at least one;
    /// etcd may make it longer) that is kept alive every third of it. `tls` is for `etcds://`.
    /// Needs a Tokio runtime.
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
        http::client(&tls)?;
        let (stop, stopped) = oneshot::channel();
        let (sender, is_registered) = watch::channel(false);
        let ttl = ttl.as_secs().max(1);
        let registrar = Registrar {
            key: format!("{}{}", etcd.prefix, agent.address()),
            value: serde_json::to_vec(agent).unwrap_or_default(),
            etcd,
            tls,
            ttl,
            // So that more than one try fits into the lease's time.
            within: CALL_WITHIN.min(Duration::from_secs(ttl) / 3),
            turn: 0,
            client: None,
            lease: None,
            is_taken: false,
            is_registered: sender,
        };
        Ok(Self { stop, task: tokio::spawn(registrar.run(stopped)), is_registered })
    }

    /// Whether etcd had the key when it was last asked, now and after each change.
    pub fn is_registered(&self) -> watch::Receiver<bool> {
        self.is_registered.clone()
    }

    /// Removes the key, or gives up after a few seconds and leaves that to the lease's time.
    pub async fn end(self) {
        drop(self.stop);
        // Fails only with a runtime that is going down, or by a panic, and then nothing is left to
        // wait for.
        let _ = self.task.await;
    }
}

/// What the task of a registration owns.
#[derive(Debug)]
struct Registrar {
    etcd: Etcd,
    tls: Tls,
    key: String,
    value: Vec<u8>,
    /// In seconds.
    ttl: u64,
    within: Duration,
    /// Counts failures: after each, the next server is asked.
    turn: usize,
    client: Option<EtcdClient>,
    lease: Option<Lease>,
    /// Whether the key was under another lease when it was last looked at.
    is_taken: bool,
    is_registered: watch::Sender<bool>,
}

/// The lease that was asked for last; etcd may not have it.
#[derive(Clone, Copy, Debug)]
struct Lease {
    id: LeaseId,
    /// Whether the key was put under it.
    is_put: bool,
}

impl Registrar {
    async fn run(mut self, stopped: oneshot::Receiver<()>) {
        tokio::select! {
            // The sender sends nothing: it is dropped.
            _ = stopped => {}
            () = self.hold() => {}
        }
        self.revoke().await;
        self.is_registered.send_replace(false);
    }

    /// Renews for ever.
    async fn hold(&mut self) {
        let mut backoff = Backoff::new();
        let third = Duration::from_secs(self.ttl) / 3;
        let mut is_told = false;
        loop {
            let renewed = self.renew().await;
            let etcd = &self.etcd;
            let pause = match renewed {
                Ok(()) => {
                    if std::mem::replace(&mut is_told, false) || !*self.is_registered.borrow() {
                        tracing::info!(%etcd, key = %self.key, "the agent is registered");
                    }
                    self.is_registered.send_if_modified(|is| !std::mem::replace(is, true));
                    backoff = Backoff::new();
                    third
                }
                Err(failure) => {
                    match std::mem::replace(&mut is_told, true) {
                        false => {
                            tracing::warn!(%etcd, key = %self.key, %failure, "the agent can't be registered; it runs on")
                        }
                        true => {
                            tracing::debug!(%etcd, key = %self.key, %failure, "the agent still can't be registered")
                        }
                    }
                    self.is_registered.send_if_modified(|is| std::mem::replace(is, false));
                    self.client = None;
                    self.turn = self.turn.wrapping_add(1);
                    backoff.pause_after(Duration::ZERO).min(third)
                }
            };
            sleep(pause).await;
        }
    }

    /// Leaves etcd with the lease and the key.
    async fn renew(&mut self) -> Result<(), Failure> {
        let client = match self.client.take() {
            Some(client) => client,
            None => EtcdClient::new(&self.etcd, self.turn, &self.tls, self.within).await?,
        };
        let client = self.client.insert(client);
        let is_alive = match self.lease {
            Some(Lease { id, .. }) => client.keep_alive(id).await?,
            None => false,
        };
        let mut lease = match self.lease {
            Some(lease) if is_alive => lease,
            _ => {
                // Known before it is asked for, so that it is revoked even if the answer never
                // comes.
                let lease = *self.lease.insert(Lease { id: LeaseId::random(), is_put: false });
                client.grant(lease.id, self.ttl).await?;
                lease
            }
        };
        if lease.is_put {
            // The key may have been deleted while the lease lived. One under another lease is left
            // to its owner: whoever it is names the same agent, and two that take it from each
            // other would never end.
            if let Some(owner) = client.lease_of(&self.key).await? {
                let was_taken = std::mem::replace(&mut self.is_taken, !lease.id.is(owner));
                if self.is_taken && !was_taken {
                    tracing::warn!(key = %self.key, "another process registers an agent at this address");
                }
                return Ok(());
            }
            tracing::warn!(key = %self.key, "the agent's key was gone; it is put again");
        }
        client.put(&self.key, &self.value, lease.id).await?;
        lease.is_put = true;
        self.lease = Some(lease);
        Ok(())
    }

    /// Asks each server once, until one has revoked the lease.
    async fn revoke(&mut self) {
        let Some(Lease { id, .. }) = self.lease.take() else { return };
        for tried in 0..self.etcd.endpoints.len() {
            let turn = self.turn.wrapping_add(tried);
            let revoked = async {
                EtcdClient::new(&self.etcd, turn, &self.tls, REVOKE_WITHIN).await?.revoke(id).await
            };
            match revoked.await {
                Ok(()) => return,
                // There is none any more.
                Err(Failure::Refused { status: 404, .. }) => return,
                Err(failure) => {
                    tracing::debug!(key = %self.key, %failure, "the agent's lease can't be revoked")
                }
            }
        }
        tracing::warn!(key = %self.key, ttl_s = self.ttl, "the agent's lease can't be revoked; it ends by itself");
    }
}
