//! Keeps following a server through its failures.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use crate::backoff::Backoff;
use crate::failure::Failure;
use crate::named::Following;
use crate::picture::Picture;

/// The least time between two changes that followers are told of. A picture may be large, and a
/// server may say many changes at once.
const TELL_EVERY: Duration = Duration::from_millis(50);
/// How much longer that time is for each thing that came or went: followers have a task and
/// connections for each, so thousands that come and go on and on would leave no CPU time for
/// requests.
const TELL_LATER: Duration = Duration::from_micros(500);

/// When followers are told of changes: of the first at once, of those that come close behind it
/// together.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Whether there is one that has not been told.
    is_changed: bool,
    /// When the next one may be told.
    next: Option<Instant>,
}

impl Changes {
    /// What the server says next; none once a change is to be told before.
    pub(crate) async fn next<T>(
        &self,
        said: impl Future<Output = Result<T, Failure>>,
    ) -> Result<Option<T>, Failure> {
        match self.next {
            Some(next) if self.is_changed => timeout_at(next, said).await.ok().transpose(),
            _ => said.await.map(Some),
        }
    }

    /// Something was said that may be a change.
    pub(crate) fn note(&mut self, is_change: bool) {
        self.is_changed |= is_change;
    }

    /// Whether there is a change that followers were not told of.
    pub(crate) fn are_pending(&self) -> bool {
        self.is_changed
    }

    /// Whether a change is to be told now. Then [`told`](Self::told) has to follow.
    pub(crate) fn is_due(&self) -> bool {
        self.is_changed && self.next.is_none_or(|next| Instant::now() >= next)
    }

    /// All was told that there is, with so many things that came or went.
    pub(crate) fn told(&mut self, differences: usize) {
        let differences = u32::try_from(differences).unwrap_or(u32::MAX);
        (self.is_changed, self.next) =
            (false, Some(Instant::now() + TELL_EVERY.max(TELL_LATER * differences)));
    }
}

/// A server that names agents, or whatever else.
pub(crate) trait Upstream: Send + 'static {
    /// What its followers see.
    type Picture: Picture;

    /// What it is, for people.
    fn name(&self) -> String;

    /// Lists what is there and tells `view` of it and of every change, until the server fails.
    fn session(&mut self, view: &mut View<Self::Picture>) -> impl Future<Output = Failure> + Send;
}

/// What the followers of an upstream see.
#[derive(Debug)]
pub(crate) struct View<P> {
    picture: watch::Sender<P>,
    name: String,
    /// Since when the present session has a list.
    since: Option<Instant>,
    /// Whether the outage that goes on was logged.
    is_told: bool,
}

impl<P: Picture> View<P> {
    /// The source has exactly this now. Returns how many things came or went.
    pub(crate) fn set(&mut self, mut picture: P) -> usize {
        self.since.get_or_insert_with(Instant::now);
        let (count, source, what) = (picture.count(), &self.name, P::WHAT);
        if std::mem::take(&mut self.is_told) {
            tracing::info!(%source, count, "{what} are discovered again");
        }
        picture.set_current(true);
        let mut differences = 0;
        self.picture.send_if_modified(|known| {
            differences = picture.differences(known);
            let was_current = known.set_current(true);
            let is_other = *known != picture;
            if is_other && P::IS_TOLD {
                tracing::info!(%source, count, "other {what} are named");
            }
            *known = picture;
            is_other || !was_current
        });
        differences
    }

    /// Ends a session, and says for how long it was fine.
    fn lost(&mut self, failure: &Failure) -> Duration {
        let source = &self.name;
        if matches!(failure, Failure::Outdated(_)) {
            // The server answers, so what it named is as good as it was.
            tracing::debug!(%source, %failure, "{} are listed again", P::WHAT);
        } else {
            match std::mem::replace(&mut self.is_told, true) {
                false => {
                    tracing::warn!(%source, %failure, "{} can't be discovered; those named last stay", P::WHAT)
                }
                true => tracing::debug!(%source, %failure, "{} still can't be discovered", P::WHAT),
            }
            self.picture.send_if_modified(|picture| picture.set_current(false));
        }
        self.since.take().map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// The thread on which all servers are followed. What one says may take long to understand, and
/// nobody else waits for that. `None` if it could not be started.
fn thread() -> Option<&'static Runtime> {
    static THREAD: OnceLock<Option<Runtime>> = OnceLock::new();
    let start = || {
        let started = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("discovery")
            .enable_all()
            .build();
        started
            .inspect_err(|error| tracing::warn!(%error, "discovery has no thread of its own"))
            .ok()
    };
    THREAD.get_or_init(start).as_ref()
}

/// Follows `upstream` on a task of its own. Needs a Tokio runtime.
pub(crate) fn follow<U: Upstream>(mut upstream: U) -> Following<U::Picture> {
    let picture = watch::Sender::new(U::Picture::default());
    let mut view =
        View { picture: picture.clone(), name: upstream.name(), since: None, is_told: false };
    let following = async move {
        let mut backoff = Backoff::new();
        loop {
            let failure = upstream.session(&mut view).await;
            let fine = view.lost(&failure);
            sleep(backoff.pause_after(fine)).await;
        }
    };
    let task = match thread() {
        Some(thread) => thread.spawn(following),
        None => tokio::spawn(following),
    };
    Following::new(picture, Some(task))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_change_is_told_at_once_and_those_close_behind_it_together() {
        let mut changes = Changes::default();
        changes.note(false);
        assert!(!changes.is_due());
        changes.note(true);
        assert!(changes.is_due());
        changes.told(1);
        let begun = Instant::now();
        changes.note(true);
        changes.note(false);
        assert!(!changes.is_due());
        // What is said meanwhile is heard; where nothing is, the wait ends when the change is due.
        assert_eq!(changes.next(async { Ok(7) }).await.unwrap(), Some(7));
        assert_eq!(
            changes.next(std::future::pending::<Result<u8, Failure>>()).await.unwrap(),
            None
        );
        assert!(changes.is_due());
        assert!(begun.elapsed() + Duration::from_millis(20) >= TELL_EVERY);
        changes.told(1);
        assert!(!changes.is_due());
        let late = changes.next(async { Err::<u8, _>(Failure::Ended) }).await;
        assert!(matches!(late, Err(Failure::Ended)));
    }

    #[tokio::test(start_paused = true)]
    async fn after_thousands_that_came_or_went_the_next_change_waits_longer() {
        let mut changes = Changes::default();
        changes.told(5000);
        changes.note(true);
        tokio::time::advance(Duration::from_millis(2490)).await;
        assert!(!changes.is_due());
        tokio::time::advance(Duration::from_millis(20)).await;
        assert!(changes.is_due());
    }
}
