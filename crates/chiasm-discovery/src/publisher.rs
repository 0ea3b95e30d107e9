//! The loop that follows a server, reconnects after failures and publishes snapshots.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use crate::backoff::Backoff;
use crate::failure::Failure;
use crate::named::SourceFollower;
use crate::snapshot::Snapshot;

/// The minimum interval between two published snapshots. A snapshot may be large, and a server may
/// send many changes at once.
const MIN_PUBLISH_INTERVAL: Duration = Duration::from_millis(50);
/// The minimum interval after a snapshot, per entry that appeared or vanished in it. Followers have
/// a task and connections for each entry, so thousands of continuous changes would take all CPU
/// time from requests.
const PUBLISH_INTERVAL_PER_CHANGE: Duration = Duration::from_micros(500);

/// A throttle for snapshots. The first change is published at once, and the changes that follow
/// within an interval are published together.
#[derive(Debug, Default)]
pub(crate) struct PublishThrottle {
    /// `true` if there is an unpublished change.
    is_pending: bool,
    /// The earliest time for the next snapshot. `None` before the first one.
    next_at: Option<Instant>,
}

impl PublishThrottle {
    /// Waits for the server's next message. Returns `None` if a pending change becomes due first.
    pub(crate) async fn next<T>(
        &self,
        message: impl Future<Output = Result<T, Failure>>,
    ) -> Result<Option<T>, Failure> {
        match self.next_at {
            Some(next_at) if self.is_pending => timeout_at(next_at, message).await.ok().transpose(),
            _ => message.await.map(Some),
        }
    }

    /// Records a message of the server, which may be a change.
    pub(crate) fn note(&mut self, is_change: bool) {
        self.is_pending |= is_change;
    }

    /// Returns `true` if there is an unpublished change.
    pub(crate) fn is_pending(&self) -> bool {
        self.is_pending
    }

    /// Returns `true` if a change has to be published now. The caller then calls
    /// [`published`](Self::published).
    pub(crate) fn is_due(&self) -> bool {
        self.is_pending && self.next_at.is_none_or(|next_at| Instant::now() >= next_at)
    }

    /// Records that a snapshot was published in which `differences` entries appeared or vanished.
    pub(crate) fn published(&mut self, differences: usize) {
        let differences = u32::try_from(differences).unwrap_or(u32::MAX);
        let interval = MIN_PUBLISH_INTERVAL.max(PUBLISH_INTERVAL_PER_CHANGE * differences);
        self.is_pending = false;
        self.next_at = Some(Instant::now() + interval);
    }
}

/// A client that follows the entries of one server, such as the agents named in etcd.
pub(crate) trait Watcher: Send + 'static {
    /// The state that followers see.
    type Snapshot: Snapshot;

    /// Returns the server's name for the log.
    fn name(&self) -> String;

    /// Lists all entries, publishes them and every later change, and returns when the server fails.
    fn session(
        &mut self,
        publisher: &mut Publisher<Self::Snapshot>,
    ) -> impl Future<Output = Failure> + Send;
}

/// The sending side of a watcher's snapshots.
#[derive(Debug)]
pub(crate) struct Publisher<S> {
    snapshot: watch::Sender<S>,
    name: String,
    /// The time of the current session's first snapshot.
    since: Option<Instant>,
    /// `true` if the current outage was logged.
    outage_is_logged: bool,
}

impl<S: Snapshot> Publisher<S> {
    /// Publishes the current snapshot. Returns the number of entries that appeared or vanished.
    pub(crate) fn publish(&mut self, mut snapshot: S) -> usize {
        self.since.get_or_insert_with(Instant::now);
        let count = snapshot.count();
        let source = &self.name;
        let kind = S::KIND;
        if std::mem::take(&mut self.outage_is_logged) {
            tracing::info!(%source, count, "{kind} are discovered again");
        }
        snapshot.set_current(true);
        let mut differences = 0;
        self.snapshot.send_if_modified(|known| {
            differences = snapshot.differences(known);
            let was_current = known.set_current(true);
            let is_changed = *known != snapshot;
            if is_changed && S::LOGS_CHANGES {
                tracing::info!(%source, count, "the discovered {kind} have changed");
            }
            *known = snapshot;
            is_changed || !was_current
        });
        differences
    }

    /// Ends a session. Returns the time for which it had a list.
    fn end_session(&mut self, failure: &Failure) -> Duration {
        let source = &self.name;
        let kind = S::KIND;
        if matches!(failure, Failure::Outdated(_)) {
            // The server answers, so the last snapshot still counts as current.
            tracing::debug!(%source, %failure, "listing {kind} again");
        } else {
            if std::mem::replace(&mut self.outage_is_logged, true) {
                tracing::debug!(%source, %failure, "{kind} still can't be discovered");
            } else {
                tracing::warn!(
                    %source,
                    %failure,
                    "{kind} can't be discovered; the last known {kind} stay"
                );
            }
            self.snapshot.send_if_modified(|snapshot| snapshot.set_current(false));
        }
        self.since.take().map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// Returns the runtime that watches all etcd and Kubernetes servers; `None` if it could not be
/// started. It has one thread, so that parsing large messages delays no requests.
fn runtime() -> Option<&'static Runtime> {
    static RUNTIME: OnceLock<Option<Runtime>> = OnceLock::new();
    let start = || {
        let started = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("discovery")
            .enable_all()
            .build();
        started
            .inspect_err(|error| tracing::warn!(%error, "discovery could not start its own thread"))
            .ok()
    };
    RUNTIME.get_or_init(start).as_ref()
}

/// Spawns a task that runs `watcher` and starts it again after failures. Requires a Tokio runtime.
pub(crate) fn follow<W: Watcher>(mut watcher: W) -> SourceFollower<W::Snapshot> {
    let snapshot = watch::Sender::new(W::Snapshot::default());
    let mut publisher = Publisher {
        snapshot: snapshot.clone(),
        name: watcher.name(),
        since: None,
        outage_is_logged: false,
    };
    let sessions = async move {
        let mut backoff = Backoff::new();
        loop {
            let failure = watcher.session(&mut publisher).await;
            let uptime = publisher.end_session(&failure);
            sleep(backoff.pause_after(uptime)).await;
        }
    };
    let task = match runtime() {
        Some(runtime) => runtime.spawn(sessions),
        None => tokio::spawn(sessions),
    };
    SourceFollower::new(snapshot, Some(task))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn first_change_is_due_at_once_but_later_ones_wait() {
        let mut throttle = PublishThrottle::default();
        throttle.note(false);
        assert!(!throttle.is_due());
        throttle.note(true);
        assert!(throttle.is_due());
        throttle.published(1);
        let start = Instant::now();
        throttle.note(true);
        throttle.note(false);
        assert!(!throttle.is_due());
        // A message ends the wait. Without one, the wait ends when the change becomes due.
        assert_eq!(throttle.next(async { Ok(7) }).await.unwrap(), Some(7));
        assert_eq!(
            throttle.next(std::future::pending::<Result<u8, Failure>>()).await.unwrap(),
            None
        );
        assert!(throttle.is_due());
        assert!(start.elapsed() + Duration::from_millis(20) >= MIN_PUBLISH_INTERVAL);
        throttle.published(1);
        assert!(!throttle.is_due());
        let late = throttle.next(async { Err::<u8, _>(Failure::Ended) }).await;
        assert!(matches!(late, Err(Failure::Ended)));
    }

    #[tokio::test(start_paused = true)]
    async fn change_after_thousands_of_differences_waits_longer() {
        let mut throttle = PublishThrottle::default();
        throttle.published(5000);
        throttle.note(true);
        tokio::time::advance(Duration::from_millis(2490)).await;
        assert!(!throttle.is_due());
        tokio::time::advance(Duration::from_millis(20)).await;
        assert!(throttle.is_due());
    }
}
