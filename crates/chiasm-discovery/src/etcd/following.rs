//! Following of a prefix in etcd: a list, then its changes.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::sleep;

use super::Etcd;
use super::api::{EtcdClient, KeyCount, Watch};
use super::message::{Event, KeyValue};
use crate::failure::Failure;
use crate::http::{self, CALL_TIMEOUT};
use crate::publisher::{PublishThrottle, Publisher, Watcher};
use crate::skipped::Skipped;
use crate::snapshot::Snapshot;
use crate::{DiscoveryError, MAX_ADDRESSES, Tls};

/// The interval of liveness checks. A watch sends nothing while nothing changes, so the keys are
/// counted beside it. A silent server is noticed within this interval and [`CALL_TIMEOUT`].
const LIVENESS_INTERVAL: Duration = Duration::from_secs(2);

/// The keys below a prefix, according to the list and the watch.
pub(super) trait KeySet: Default + Send + 'static {
    /// The state that followers see.
    type Snapshot: Snapshot;

    /// Replaces all keys with those of a new list.
    fn replace(&mut self, listed: Vec<KeyValue>);

    /// Applies a change of one key.
    fn apply(&mut self, event: Event);

    /// Returns the number of keys, including malformed ones.
    fn len(&self) -> usize;

    /// Returns the current state.
    fn snapshot(&self) -> Self::Snapshot;

    /// Returns `true` if keys were left out for lack of room, and there is room again. Only a new
    /// list brings them back.
    fn has_room_again(&self) -> bool {
        false
    }

    /// Returns the counter of unusable keys.
    fn skipped(&mut self) -> &mut Skipped;
}

/// A watcher of one prefix in etcd.
#[derive(Debug)]
pub(super) struct EtcdWatcher<K> {
    etcd: Etcd,
    tls: Tls,
    /// The index of the current server. Grows with each failure.
    server_index: usize,
    keys: K,
}

impl<K: KeySet> EtcdWatcher<K> {
    pub(super) fn new(etcd: Etcd, tls: Tls) -> Result<Self, DiscoveryError> {
        // Reports unusable certificate files now. Each session reads the files again.
        http::build_client_blocking(&tls)?;
        Ok(Self { etcd, tls, server_index: 0, keys: K::default() })
    }

    /// Lists the prefix and follows its changes until the server fails.
    async fn run(&mut self, publisher: &mut Publisher<K::Snapshot>) -> Result<Infallible, Failure> {
        let client =
            EtcdClient::new(&self.etcd, self.server_index, &self.tls, CALL_TIMEOUT).await?;
        let prefix = &self.etcd.prefix;
        let listed = client.list(prefix).await?;
        let revision = listed.header.revision;
        self.keys.replace(listed.kvs);
        self.keys.skipped().log(&self.etcd);
        publisher.publish(self.keys.snapshot());
        // From the next revision on, so that no change between list and watch is lost.
        let watch = client.watch(prefix, revision + 1).await?;
        let progress = WatchProgress {
            keys: AtomicU64::new(self.keys.len() as u64),
            messages: AtomicU64::new(0),
        };
        let mut throttle = PublishThrottle::default();
        let changes =
            apply_changes(watch, &self.etcd, &mut self.keys, &mut throttle, publisher, &progress);
        let result = tokio::select! {
            result = changes => result,
            result = check_liveness(&client, prefix, revision, &progress) => result,
        };
        if throttle.is_pending() {
            // The throttle delays these changes, and no later change will publish them.
            publisher.publish(self.keys.snapshot());
        }
        result
    }
}

impl<K: KeySet> Watcher for EtcdWatcher<K> {
    type Snapshot = K::Snapshot;

    fn name(&self) -> String {
        self.etcd.to_string()
    }

    async fn session(&mut self, publisher: &mut Publisher<K::Snapshot>) -> Failure {
        let Err(failure) = self.run(publisher).await;
        if !matches!(failure, Failure::Outdated(_)) {
            self.server_index = self.server_index.wrapping_add(1);
        }
        failure
    }
}

/// The progress of a watch, which the liveness check compares with the server's counts.
#[derive(Debug)]
struct WatchProgress {
    keys: AtomicU64,
    messages: AtomicU64,
}

/// Applies and publishes the changes of a watch. Only returns on failure.
async fn apply_changes<K: KeySet>(
    mut watch: Watch,
    etcd: &Etcd,
    keys: &mut K,
    throttle: &mut PublishThrottle,
    publisher: &mut Publisher<K::Snapshot>,
    progress: &WatchProgress,
) -> Result<Infallible, Failure> {
    loop {
        if let Some(response) = throttle.next(watch.next()).await? {
            throttle.note(!response.events.is_empty());
            for event in response.events {
                keys.apply(event);
            }
            progress.keys.store(keys.len() as u64, Relaxed);
            progress.messages.fetch_add(1, Relaxed);
            keys.skipped().log(etcd);
        }
        if throttle.is_due() {
            throttle.published(publisher.publish(keys.snapshot()));
            if keys.has_room_again() {
                return Err(Failure::Outdated(
                    "there is room again for keys that were left out".to_owned(),
                ));
            }
        }
    }
}

/// Counts the keys at an interval. Only returns on failure: if the server does not answer, if its
/// revision falls, or if its count differs from that of the watch.
async fn check_liveness(
    client: &EtcdClient,
    prefix: &str,
    listed_at: i64,
    progress: &WatchProgress,
) -> Result<Infallible, Failure> {
    let mut newest = listed_at;
    let mut last_difference = None;
    loop {
        sleep(LIVENESS_INTERVAL).await;
        let KeyCount { revision, count } = client.count(prefix).await?;
        if revision < newest {
            return Err(Failure::Outdated(format!(
                "the revision fell from {newest} to {revision}"
            )));
        }
        newest = revision;
        // A single difference may be a change in flight. The watch is dead if the same difference
        // is found twice without a message in between.
        let keys = progress.keys.load(Relaxed);
        let messages = progress.messages.load(Relaxed);
        let count = u64::try_from(count).unwrap_or(0);
        let differs = count != keys && count.max(keys) <= MAX_ADDRESSES as u64;
        let difference = differs.then_some((count, keys, messages));
        if differs && difference == last_difference {
            return Err(Failure::Outdated(format!(
                "the server has {count} keys, the watch {keys}"
            )));
        }
        last_difference = difference;
    }
}
