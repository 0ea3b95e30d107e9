//! Which agents are named now.

use std::collections::BTreeSet;

use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The agents that a source names, and whether it answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Named {
    /// `host:port` of each agent, lower-case, IPv6 in brackets; at most [`MOST_ADDRESSES`](crate::MOST_ADDRESSES).
    pub addresses: BTreeSet<String>,
    /// Whether the source answers. Otherwise the addresses are those that it named last; none if it has never answered.
    pub is_current: bool,
}

/// A source that is followed by a task of its own, until this is dropped.
#[derive(Debug)]
pub struct Following {
    // Keeps the receivers open for as long as anybody follows, whatever becomes of the task.
    named: watch::Sender<Named>,
    task: Option<JoinHandle<()>>,
}

impl Following {
    pub(crate) fn new(named: watch::Sender<Named>, task: Option<JoinHandle<()>>) -> Self {
        Self { named, task }
    }

    /// Tells of the agents that are named, now and after each change. Its `changed` fails once the following is dropped.
    pub fn named(&self) -> watch::Receiver<Named> {
        self.named.subscribe()
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}
