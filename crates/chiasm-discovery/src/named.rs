//! The agents that a source names, and a handle to the task that follows a source.

use std::collections::BTreeSet;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::snapshot::Snapshot;

/// The agents that a source names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamedAgents {
    /// `host:port` of each agent, lower-case, IPv6 in brackets; at most
    /// [`MAX_ADDRESSES`](crate::MAX_ADDRESSES).
    pub addresses: BTreeSet<String>,
    /// `true` if the source answers. Otherwise the addresses are those of its last answer, or none
    /// if it has never answered.
    pub is_current: bool,
}

impl Snapshot for NamedAgents {
    const KIND: &'static str = "agents";
    const LOGS_CHANGES: bool = true;

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

/// A handle to a task that follows a source. Dropping the handle ends the task.
#[derive(Debug)]
pub struct SourceFollower<S = NamedAgents> {
    // Keeps the receivers open until the handle is dropped, even if the task ends.
    snapshot: watch::Sender<S>,
    task: Option<JoinHandle<()>>,
}

impl<S> SourceFollower<S> {
    pub(crate) fn new(snapshot: watch::Sender<S>, task: Option<JoinHandle<()>>) -> Self {
        Self { snapshot, task }
    }

    /// Returns a receiver of the current snapshot and each later one. Its `changed` fails once the
    /// handle is dropped.
    pub fn subscribe(&self) -> watch::Receiver<S> {
        self.snapshot.subscribe()
    }
}

impl<S> Drop for SourceFollower<S> {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}
