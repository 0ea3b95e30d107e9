//! Workers that come and go while the fleet runs.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use chiasm_backend::{Connector, DeathReason};
use chiasm_types::WorkerId;
use tokio::sync::watch;

use crate::followed::WorkerKvEvents;
use crate::{Fleet, keeper, lock};

impl Fleet {
    /// Starts another worker. Returns `None` if the fleet is shut down.
    pub fn add(self: &Arc<Self>, connector: Box<dyn Connector>) -> Option<WorkerId> {
        let mut keepers = self.keepers();
        let keepers = keepers.as_mut()?;
        // Reaps keepers that have ended.
        while keepers.try_join_next().is_some() {}
        let id = WorkerId(self.added.fetch_add(1, Ordering::Relaxed));
        self.worker_kv_events().insert(id, WorkerKvEvents::default());
        let (stop, stopped) = watch::channel(*self.shutdown.borrow());
        lock(&self.stops).insert(id, stop);
        keepers.spawn(keeper::keep(self.clone(), id, connector, stopped));
        Some(id)
    }

    /// Removes a worker for good, as [`shutdown`](Self::shutdown) does with all workers, and
    /// forgets everything about it.
    pub fn remove(&self, id: WorkerId) {
        if let Some(stop) = lock(&self.stops).remove(&id) {
            stop.send_replace(true);
        }
        self.worker_kv_events().remove(&id);
        lock(&self.unnamed).remove(&id);
    }

    /// Records if a list or discovery still names the worker's agent. The worker keeps running
    /// either way.
    pub fn set_named(&self, id: WorkerId, named: bool) {
        let mut unnamed = lock(&self.unnamed);
        if named {
            unnamed.remove(&id);
        } else {
            unnamed.insert(id);
        }
    }

    /// Returns the workers that no list or discovery names any more.
    pub fn unnamed(&self) -> BTreeSet<WorkerId> {
        lock(&self.unnamed).clone()
    }

    /// Stops all keepers.
    fn stop_all(&self) {
        self.shutdown.send_replace(true);
        for stop in lock(&self.stops).values() {
            stop.send_replace(true);
        }
    }

    /// Ends all requests in flight with an error, and accepts no more. Call [`Fleet::shutdown`]
    /// next.
    pub fn abort_requests(&self, why: &str) {
        // Keepers declare their backends dead for this reason before they release them. Releasing
        // alone would end the requests for another reason.
        let _ = self.abort_reason.set(DeathReason::new(why));
        self.stop_all();
    }

    /// Stops all workers and waits until their backends are released. Requests in flight end with
    /// an error, so drain first.
    pub async fn shutdown(&self) {
        let keepers = self.keepers().take();
        self.stop_all();
        if let Some(mut keepers) = keepers {
            while keepers.join_next().await.is_some() {}
        }
    }
}
