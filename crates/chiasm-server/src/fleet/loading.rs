//! LoRA adapters on workers.
//!
//! A worker has loaded every adapter before it takes its first request, and is asked again for one that it refused when that is
//! loaded anew. Requests with an adapter go to workers that have it.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chiasm_backend::{AdapterError, Backend};
use chiasm_types::WorkerId;
use futures_util::future::join_all;
use tokio::sync::{mpsc, watch};

use super::{Fleet, Worker};
use crate::adapters::{AdapterFiles, AdapterSource, Adapters, Leaving, LoadError, ServedAdapter};

/// The adapters that one backend has, and why it has not the others.
#[derive(Debug, Default)]
pub(super) struct Loaded(Mutex<BTreeMap<NonZeroU32, Result<(), AdapterError>>>);

impl Loaded {
    /// What became of an adapter; `None` if the backend was not asked yet.
    pub(super) fn of(&self, adapter: &ServedAdapter) -> Option<Result<(), AdapterError>> {
        self.known().get(&adapter.id()).cloned()
    }

    /// Loads an adapter unless it is loaded.
    async fn load(&self, backend: &dyn Backend, adapter: &ServedAdapter) -> Result<(), AdapterError> {
        if matches!(self.of(adapter), Some(Ok(()))) {
            return Ok(());
        }
        let loaded = backend.load_adapter(adapter.engine()).await;
        self.known().insert(adapter.id(), loaded.clone());
        loaded
    }

    /// Loads all adapters that the backend was not asked to load yet. What it refuses is logged: it does without.
    pub(super) async fn load_all(&self, id: WorkerId, backend: &dyn Backend, adapters: &Adapters) {
        for adapter in adapters.all() {
            if self.of(&adapter).is_some() {
                continue;
            }
            match self.load(backend, &adapter).await {
                Ok(()) => tracing::info!(worker = %id, adapter = adapter.name, "loaded a LoRA adapter"),
                Err(error) => {
                    tracing::error!(worker = %id, adapter = adapter.name, %error, "the engine does without a LoRA adapter");
                }
            }
        }
    }

    fn forget(&self, id: NonZeroU32) {
        self.known().remove(&id);
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<NonZeroU32, Result<(), AdapterError>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Worker {
    /// Whether the worker can be given requests with this adapter.
    pub(crate) fn has_adapter(&self, adapter: &ServedAdapter) -> bool {
        matches!(self.loaded.of(adapter), Some(Ok(())))
    }

    /// Why it can't.
    pub(crate) fn lacks_adapter(&self, adapter: &ServedAdapter) -> Option<AdapterError> {
        self.loaded.of(adapter).and_then(Result::err)
    }
}

impl Fleet {
    /// The adapters that requests may name.
    pub fn adapters(&self) -> &Arc<Adapters> {
        &self.adapters
    }

    /// Has all workers that take adapters load one, and serves it then. With `in_place` it takes the place of another of its name;
    /// requests in flight end with that one.
    ///
    /// # Errors
    /// [`LoadError`] says why not; nothing has changed then.
    pub async fn load_adapter(&self, source: AdapterSource, in_place: bool) -> Result<(), LoadError> {
        let _changing = self.adapters.changes.lock().await;
        let former = self.adapters.get(&source.name);
        if former.is_some() && !in_place {
            return Err(LoadError::IsLoaded(source.name));
        }
        let workers = self.workers();
        // An engine on another machine may have files that are not on this one, so it is not an error here that they are missing.
        let looking = source.clone();
        let files = tokio::task::spawn_blocking(move || AdapterFiles::look(&looking, true)).await;
        let files =
            files.map_err(|error| LoadError::Files { path: (&source.path).into(), problem: error.to_string() })??;
        let adapter = match former.filter(|former| former.is(&source, &files)) {
            Some(unchanged) => unchanged,
            None => self.adapters.make(&source, &files)?,
        };
        let takers: Vec<_> = workers.iter().filter(|worker| worker.backend.capabilities().max_loras > 0).collect();
        match (workers.is_empty(), takers.is_empty()) {
            (true, _) => return Err(LoadError::NoEngine),
            (false, true) => return Err(AdapterError::NotEnabled.into()),
            (false, false) => {}
        }
        let loading = takers.iter().map(|worker| worker.loaded.load(worker.backend.as_ref(), &adapter));
        let refused = join_all(loading).await.into_iter().filter_map(Result::err);
        // One that died meanwhile loads it at its next start.
        if let Some(error) = refused.into_iter().find(|error| !matches!(error, AdapterError::Gone(_))) {
            return Err(error.into());
        }
        self.adapters.insert(adapter.clone());
        tracing::info!(adapter = adapter.name, path = adapter.root, "serving a LoRA adapter");
        // Those that joined since were not asked.
        for worker in self.workers() {
            worker.loaded.load_all(worker.id, worker.backend.as_ref(), &self.adapters).await;
        }
        Ok(())
    }

    /// Serves an adapter no more. Requests in flight end with it.
    ///
    /// # Errors
    /// [`LoadError::NotLoaded`] if there is none of this name.
    pub async fn unload_adapter(&self, name: &str) -> Result<(), LoadError> {
        let _changing = self.adapters.changes.lock().await;
        self.adapters.remove(name).ok_or_else(|| LoadError::NotLoaded(name.to_owned()))?;
        tracing::info!(adapter = name, "a LoRA adapter is served no more");
        Ok(())
    }

    /// The workers that lack an adapter.
    ///
    /// # Errors
    /// Why one of them lacks it, if no other has it.
    pub(crate) fn workers_without(&self, adapter: &ServedAdapter) -> Result<Vec<WorkerId>, Option<AdapterError>> {
        let workers = self.workers();
        let lacking: Vec<_> = workers.iter().filter(|worker| !worker.has_adapter(adapter)).collect();
        if !workers.is_empty() && lacking.len() == workers.len() {
            return Err(lacking.iter().find_map(|worker| worker.lacks_adapter(adapter)));
        }
        Ok(lacking.into_iter().map(|worker| worker.id).collect())
    }
}

/// Tells workers of adapters that nobody needs any more, until the fleet is shut down.
pub(super) async fn forget_unused(
    fleet: Arc<Fleet>,
    mut leavings: mpsc::UnboundedReceiver<Leaving>,
    mut shutdown: watch::Receiver<bool>,
) {
    let forgetting = async {
        while let Some(leaving) = leavings.recv().await {
            let _changing = fleet.adapters.changes.lock().await;
            let workers = fleet.workers();
            let adapter = &leaving.adapter;
            // What was loaded again as it was has the same id, and is needed.
            if fleet.adapters.all().iter().any(|served| served.id() == adapter.id) {
                continue;
            }
            let takers = workers.iter().filter(|worker| worker.backend.capabilities().max_loras > 0);
            join_all(takers.map(async |worker| {
                worker.loaded.forget(adapter.id);
                worker.backend.unload_adapter(adapter).await;
            }))
            .await;
            tracing::debug!(adapter = adapter.name, "the engines were told to forget a LoRA adapter");
        }
    };
    tokio::select! {
        () = forgetting => {}
        _ = shutdown.wait_for(|&down| down) => {}
    }
}

#[cfg(test)]
mod tests;
