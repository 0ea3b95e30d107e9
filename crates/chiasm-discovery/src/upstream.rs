//! Keeps following a server through its failures.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

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

/// Follows `upstream` on a task of its own. Needs a Tokio runtime.
pub(crate) fn follow<U: Upstream>(mut upstream: U) -> Following<U::Picture> {
    let picture = watch::Sender::new(U::Picture::default());
    let mut view = View { picture: picture.clone(), name: upstream.name(), since: None, is_told: false };
    let task = tokio::spawn(async move {
        let mut backoff = Backoff::new();
        loop {
            let failure = upstream.session(&mut view).await;
            let fine = view.lost(&failure);
            sleep(backoff.pause_after(fine)).await;
        }
    });
    Following::new(picture, Some(task))
}
