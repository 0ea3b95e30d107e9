//! Workers that come and go while the fleet runs.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use chiasm_backend::{Connector, Death};
use chiasm_types::WorkerId;
use tokio::sync::watch;

use crate::followed::Followed;
use crate::{Fleet, keeper, lock};

impl Fleet {
    /// Starts one more worker. `None` when the fleet is shut down.
    pub fn add(self: &Arc<Self>, connector: Box<dyn Connector>) -> Option<WorkerId> {
        let mut keepers = self.keepers();
        let keepers = keepers.as_mut()?;
        // Those that have ended since.
        while keepers.try_join_next().is_some() {}
        let id = WorkerId(self.added.fetch_add(1, Ordering::Relaxed));
        self.followed().insert(id, Followed::default());
        let (end, ends) = watch::channel(*self.shutdown.borrow());
        lock(&self.ends).insert(id, end);
        keepers.spawn(keeper::keep(self.clone(), id, connector, ends));
        Some(id)
    }

    /// Lets a worker go for good, as the shutdown of the fleet does with all: nothing is known of
    /// it from then on.
    pub fn remove(&self, id: WorkerId) {
        if let Some(end) = lock(&self.ends).remove(&id) {
            end.send_replace(true);
        }
        self.followed().remove(&id);
        lock(&self.unnamed).remove(&id);
    }

    /// Takes note of whether anything still names a worker that answers: it goes on either way.
    pub fn set_named(&self, id: WorkerId, named: bool) {
        let mut unnamed = lock(&self.unnamed);
        if named {
            unnamed.remove(&id);
        } else {
            unnamed.insert(id);
        }
    }

    /// The workers that nothing names any more.
    pub fn unnamed(&self) -> BTreeSet<WorkerId> {
        lock(&self.unnamed).clone()
    }

    /// Ends all keepers.
    fn end_all(&self) {
        self.shutdown.send_replace(true);
        for end in lock(&self.ends).values() {
            end.send_replace(true);
        }
    }

    /// Ends all requests in flight with an error, and takes no more. [`Fleet::shutdown`] is to
    /// follow.
    pub fn cut(&self, why: &str) {
        // Keepers tell their backends before they let go of them, which ends requests for another
        // reason.
        let _ = self.cut.set(Death::new(why));
        self.end_all();
    }

    /// Ends all backends and waits until they are gone. Requests in flight end with an error: drain
    /// first.
    pub async fn shutdown(&self) {
        let keepers = self.keepers().take();
        self.end_all();
        if let Some(mut keepers) = keepers {
            while keepers.join_next().await.is_some() {}
        }
    }
}
