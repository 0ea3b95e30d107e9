//! Keeps following a server through its failures.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use crate::backoff::Backoff;
use crate::failure::Failure;
use crate::named::Following;

/// What is there now, by the account of a source.
pub(crate) trait Picture: Clone + Default + PartialEq + Send + Sync + 'static {
    /// What there is of it, for the log.
    const WHAT: &'static str;
    /// Whether the log says when it changes.
    const IS_TOLD: bool;

    /// Says whether the source answers; returns whether it was said before.
    fn set_current(&mut self, is_current: bool) -> bool;

    /// The number of things that it consists of.
    fn count(&self) -> usize;
}

/// The least time between two changes that followers are told of. A picture may be large, and a server may say many changes at once.
const TELL_EVERY: Duration = Duration::from_millis(50);

/// When followers are told of changes: of the first at once, of those that come close behind it together.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Whether there is one that has not been told.
    is_changed: bool,
    told: Option<Instant>,
}

impl Changes {
    /// What the server says next; none once a change is to be told before.
    pub(crate) async fn next<T>(&self, said: impl Future<Output = Result<T, Failure>>) -> Result<Option<T>, Failure> {
        match self.told {
            Some(told) if self.is_changed => timeout_at(told + TELL_EVERY, said).await.ok().transpose(),
            _ => said.await.map(Some),
        }
    }

    /// Something was said that may be a change.
    pub(crate) fn note(&mut self, is_change: bool) {
        self.is_changed |= is_change;
    }

    /// Whether a change is to be told now.
    pub(crate) fn take_due(&mut self) -> bool {
        let is_due = self.is_changed && self.told.is_none_or(|told| told.elapsed() >= TELL_EVERY);
        if is_due {
            (self.is_changed, self.told) = (false, Some(Instant::now()));
        }
        is_due
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
    /// The source has exactly this now.
    pub(crate) fn set(&mut self, mut picture: P) {
        self.since.get_or_insert_with(Instant::now);
        let (count, source, what) = (picture.count(), &self.name, P::WHAT);
        if std::mem::take(&mut self.is_told) {
            tracing::info!(%source, count, "{what} are discovered again");
        }
        picture.set_current(true);
        self.picture.send_if_modified(|known| {
            let was_current = known.set_current(true);
            let is_other = *known != picture;
            if is_other && P::IS_TOLD {
                tracing::info!(%source, count, "other {what} are named");
            }
            *known = picture;
            is_other || !was_current
        });
    }

    /// Ends a session, and says for how long it was fine.
    fn lost(&mut self, failure: &Failure) -> Duration {
        let source = &self.name;
        if matches!(failure, Failure::Outdated(_)) {
            // The server answers, so what it named is as good as it was.
            tracing::debug!(%source, %failure, "{} are listed again", P::WHAT);
        } else {
            match std::mem::replace(&mut self.is_told, true) {
                false => tracing::warn!(%source, %failure, "{} can't be discovered; those named last stay", P::WHAT),
                true => tracing::debug!(%source, %failure, "{} still can't be discovered", P::WHAT),
            }
            self.picture.send_if_modified(|picture| picture.set_current(false));
        }
        self.since.take().map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// The thread on which all servers are followed. What one says may take long to understand, and nobody else waits for that. `None` if
/// it could not be started.
fn thread() -> Option<&'static Runtime> {
    static THREAD: OnceLock<Option<Runtime>> = OnceLock::new();
    let start = || {
        let started = Builder::new_multi_thread().worker_threads(1).thread_name("discovery").enable_all().build();
        started.inspect_err(|error| tracing::warn!(%error, "discovery has no thread of its own")).ok()
    };
    THREAD.get_or_init(start).as_ref()
}

/// Follows `upstream` on a task of its own. Needs a Tokio runtime.
pub(crate) fn follow<U: Upstream>(mut upstream: U) -> Following<U::Picture> {
    let picture = watch::Sender::new(U::Picture::default());
    let mut view = View { picture: picture.clone(), name: upstream.name(), since: None, is_told: false };
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
        assert!(!changes.take_due());
        changes.note(true);
        assert!(changes.take_due());
        let begun = Instant::now();
        changes.note(true);
        changes.note(false);
        assert!(!changes.take_due());
        // What is said meanwhile is heard; where nothing is, the wait ends when the change is due.
        assert_eq!(changes.next(async { Ok(7) }).await.unwrap(), Some(7));
        assert_eq!(changes.next(std::future::pending::<Result<u8, Failure>>()).await.unwrap(), None);
        assert!(changes.take_due() && !changes.take_due());
        assert!(begun.elapsed() + Duration::from_millis(20) >= TELL_EVERY);
        let late = changes.next(async { Err::<u8, _>(Failure::Ended) }).await;
        assert!(matches!(late, Err(Failure::Ended)));
    }
}
