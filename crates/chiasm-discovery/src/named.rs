//! Which agents are named now, and following a source of them or of something else.

use std::collections::BTreeSet;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::picture::Picture;

/// The agents that a source names, and whether it answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Named {
    /// `host:port` of each agent, lower-case, IPv6 in brackets; at most
    /// [`MOST_ADDRESSES`](crate::MOST_ADDRESSES).
    pub addresses: BTreeSet<String>,
    /// Whether the source answers. Otherwise the addresses are those that it named last; none if it
    /// has never answered.
    pub is_current: bool,
}

impl Picture for Named {
    const WHAT: &'static str = "agents";
    const IS_TOLD: bool = true;

    fn set_current(&mut self, is_current: bool) -> bool {
        std::mem::replace(&mut self.is_current, is_current)
    }

    fn count(&self) -> usize {
        self.addresses.len()
    }

    fn differences(&self, other: &Self) -> usize {
        self.addresses.symmetric_difference(&other.addresses).count()
    }
}

/// A source that is followed by a task of its own, until this is dropped.
#[derive(Debug)]
pub struct Following<P = Named> {
    // Keeps the receivers open for as long as anybody follows, whatever becomes of the task.
    picture: watch::Sender<P>,
    task: Option<JoinHandle<()>>,
}

impl<P> Following<P> {
    pub(crate) fn new(picture: watch::Sender<P>, task: Option<JoinHandle<()>>) -> Self {
        Self { picture, task }
    }

    /// Tells of what is named, now and after each change. Its `changed` fails once the following is
    /// dropped.
    pub fn named(&self) -> watch::Receiver<P> {
        self.picture.subscribe()
    }
}

impl<P> Drop for Following<P> {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}
