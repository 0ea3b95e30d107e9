//! Keeps following a server through its failures.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::backoff::Backoff;
use crate::failure::Failure;
use crate::named::{Following, Named};

/// A server that names agents.
pub(crate) trait Upstream: Send + 'static {
    /// What it is, for people.
    fn name(&self) -> String;

    /// Lists the agents and tells `view` of them and of every change, until the server fails.
    fn session(&mut self, view: &mut View) -> impl Future<Output = Failure> + Send;
}

/// What the followers of an upstream see.
#[derive(Debug)]
pub(crate) struct View {
    named: watch::Sender<Named>,
    name: String,
    /// Since when the present session has a list.
    since: Option<Instant>,
    /// Whether the outage that goes on was logged.
    is_told: bool,
}

impl View {
    /// The source names exactly these now.
    pub(crate) fn set(&mut self, addresses: BTreeSet<String>) {
        self.since.get_or_insert_with(Instant::now);
        let (agents, source) = (addresses.len(), &self.name);
        if std::mem::take(&mut self.is_told) {
            tracing::info!(%source, agents, "agents are discovered again");
        }
        let named = Named { addresses, is_current: true };
        self.named.send_if_modified(|known| {
            let is_new = *known != named;
            if known.addresses != named.addresses {
                tracing::info!(%source, agents, "other agents are named");
            }
            *known = named;
            is_new
        });
    }

    /// Ends a session, and says for how long it was fine.
    fn lost(&mut self, failure: &Failure) -> Duration {
        let source = &self.name;
        if matches!(failure, Failure::Outdated(_)) {
            // The server answers, so what it named is as good as it was.
            tracing::debug!(%source, %failure, "agents are listed again");
        } else {
            match std::mem::replace(&mut self.is_told, true) {
                false => tracing::warn!(%source, %failure, "agents can't be discovered; those named last stay"),
                true => tracing::debug!(%source, %failure, "agents still can't be discovered"),
            }
            self.named.send_if_modified(|named| std::mem::replace(&mut named.is_current, false));
        }
        self.since.take().map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// Follows `upstream` on a task of its own. Needs a Tokio runtime.
pub(crate) fn follow(mut upstream: impl Upstream) -> Following {
    let named = watch::Sender::new(Named::default());
    let mut view = View { named: named.clone(), name: upstream.name(), since: None, is_told: false };
    let task = tokio::spawn(async move {
        let mut backoff = Backoff::new();
        loop {
            let failure = upstream.session(&mut view).await;
            let fine = view.lost(&failure);
            sleep(backoff.pause_after(fine)).await;
        }
    });
    Following::new(named, Some(task))
}
