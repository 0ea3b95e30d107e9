//! Following what is below a prefix: a list, then its changes.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::sleep;

use super::Etcd;
use super::api::{EtcdClient, Watch};
use super::message::{Event, KeyValue};
use crate::failure::Failure;
use crate::http::{self, CALL_WITHIN};
use crate::picture::Picture;
use crate::skipped::Skipped;
use crate::upstream::{Changes, Upstream, View};
use crate::{DiscoveryError, MOST_ADDRESSES, Tls};

/// A watch says nothing while nothing changes, so the server is asked for a sign of life beside it.
/// With [`CALL_WITHIN`] this is the time in which a silent server is noticed.
const ASK_EVERY: Duration = Duration::from_secs(2);

/// The keys below a prefix, as far as this process was told, and what they say.
pub(super) trait Below: Default + Send + 'static {
    /// What they say, all together.
    type Picture: Picture;

    /// These are there, and no others.
    fn replace(&mut self, listed: Vec<KeyValue>);

    /// One of them changed.
    fn apply(&mut self, event: Event);

    /// The number of keys, malformed ones too.
    fn len(&self) -> usize;

    /// What they say now.
    fn picture(&self) -> Self::Picture;

    /// Whether some were left out for lack of room, and there is room again: only a new list names
    /// them.
    fn has_room_again(&self) -> bool {
        false
    }

    /// Those that could not be used, until they are logged.
    fn skipped(&mut self) -> &mut Skipped;
}

/// What is below a prefix of one etcd, as a source.
#[derive(Debug)]
pub(super) struct EtcdUpstream<K> {
    etcd: Etcd,
    tls: Tls,
    /// Counts the sessions: each asks the next server.
    turn: usize,
    keys: K,
}

impl<K: Below> EtcdUpstream<K> {
    pub(super) fn new(etcd: Etcd, tls: Tls) -> Result<Self, DiscoveryError> {
        // Files that can't be used are an error now. Later they are read again for each session.
        http::client(&tls)?;
        Ok(Self { etcd, tls, turn: 0, keys: K::default() })
    }

    async fn run(&mut self, turn: usize, view: &mut View<K::Picture>) -> Result<(), Failure> {
        let client = EtcdClient::new(&self.etcd, turn, &self.tls, CALL_WITHIN).await?;
        let prefix = &self.etcd.prefix;
        let listed = client.list(prefix).await?;
        let revision = listed.header.revision;
        self.keys.replace(listed.kvs);
        self.keys.skipped().log(&self.etcd);
        view.set(self.keys.picture());
        // From the very next revision on, so that nothing between list and watch is lost.
        let watch = client.watch(prefix, revision + 1).await?;
        let seen =
            Seen { keys: AtomicU64::new(self.keys.len() as u64), messages: AtomicU64::new(0) };
        let mut changes = Changes::default();
        let failed = tokio::select! {
            failed = apply(watch, &self.etcd, &mut self.keys, &mut changes, view, &seen) => failed,
            failed = ask(&client, prefix, revision, &seen) => failed,
        };
        if changes.are_pending() {
            // They waited to be told together with later ones, and there are none.
            view.set(self.keys.picture());
        }
        failed
    }
}

impl<K: Below> Upstream for EtcdUpstream<K> {
    type Picture = K::Picture;

    fn name(&self) -> String {
        self.etcd.to_string()
    }

    async fn session(&mut self, view: &mut View<K::Picture>) -> Failure {
        let turn = self.turn;
        match self.run(turn, view).await {
            Err(failure @ Failure::Outdated(_)) => failure,
            Err(failure) => {
                self.turn = turn.wrapping_add(1);
                failure
            }
            Ok(()) => Failure::Ended,
        }
    }
}

/// What came over the watch, for who compares it with what the server says otherwise.
#[derive(Debug)]
struct Seen {
    keys: AtomicU64,
    messages: AtomicU64,
}

/// Applies what the watch tells. Ends only by failing.
async fn apply<K: Below>(
    mut watch: Watch,
    etcd: &Etcd,
    keys: &mut K,
    changes: &mut Changes,
    view: &mut View<K::Picture>,
    seen: &Seen,
) -> Result<(), Failure> {
    loop {
        if let Some(answer) = changes.next(watch.next()).await? {
            changes.note(!answer.events.is_empty());
            for event in answer.events {
                keys.apply(event);
            }
            seen.keys.store(keys.len() as u64, Relaxed);
            seen.messages.fetch_add(1, Relaxed);
            keys.skipped().log(etcd);
        }
        if changes.is_due() {
            changes.told(view.set(keys.picture()));
            if keys.has_room_again() {
                return Err(Failure::Outdated(
                    "there is room again for keys that were left out".to_owned(),
                ));
            }
        }
    }
}

/// Asks for signs of life. Ends only by failing: when there is none, and when the server has
/// something else than the watch told.
async fn ask(
    client: &EtcdClient,
    prefix: &str,
    listed_at: i64,
    seen: &Seen,
) -> Result<(), Failure> {
    let mut newest = listed_at;
    let mut differed_at = None;
    loop {
        sleep(ASK_EVERY).await;
        let (revision, count) = client.count(prefix).await?;
        if revision < newest {
            return Err(Failure::Outdated(format!(
                "it went back from revision {newest} to {revision}"
            )));
        }
        newest = revision;
        // A change may be on its way. Two times the same difference, and nothing came in between:
        // the watch is dead.
        let (keys, messages) = (seen.keys.load(Relaxed), seen.messages.load(Relaxed));
        let count = u64::try_from(count).unwrap_or(0);
        let differs = count != keys && count.max(keys) <= MOST_ADDRESSES as u64;
        let now = differs.then_some((count, keys, messages));
        if differs && now == differed_at {
            return Err(Failure::Outdated(format!(
                "there are {count} keys, and the watch told of {keys}"
            )));
        }
        differed_at = now;
    }
}
