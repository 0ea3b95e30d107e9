//! LoRA adapters on workers.
//!
//! A worker has loaded every adapter before it takes its first request, and is asked again for one
//! that it refused when that is loaded anew. Those of agents have adapters by themselves, and no
//! other can be made to load these. Requests with an adapter go to workers that have it.

use std::sync::Arc;

use chiasm_backend::{AdapterError, OwnAdapter};
use chiasm_types::WorkerId;
use futures_util::future::join_all;
use tokio::sync::{mpsc, watch};

use crate::adapters::{AdapterFiles, AdapterSource, Adapters, Leaving, LoadError, ServedAdapter};
use crate::{Fleet, Worker};

impl Worker {
    /// Whether the worker can be given requests with this adapter.
    pub fn has_adapter(&self, adapter: &ServedAdapter) -> bool {
        matches!(self.adapter(adapter), Some(Ok(())))
    }

    /// Why it can't.
    pub fn lacks_adapter(&self, adapter: &ServedAdapter) -> Option<AdapterError> {
        self.adapter(adapter).and_then(Result::err)
    }

    /// What became of an adapter here; `None` if the backend was not asked yet.
    fn adapter(&self, adapter: &ServedAdapter) -> Option<Result<(), AdapterError>> {
        let own = &self.backend.capabilities().adapters;
        match own.get(&adapter.engine().name) {
            Some(OwnAdapter { refused: None, .. }) => Some(Ok(())),
            Some(OwnAdapter { refused: Some(why), .. }) => {
                Some(Err(AdapterError::Refused(why.clone())))
            }
            None if own.values().any(|own| own.name == adapter.name) => Some(Err(
                AdapterError::Refused("its agent has another one of this name".to_owned()),
            )),
            None if adapter.is_offered => Some(Err(AdapterError::NotOwn)),
            None => self.loaded.of(adapter),
        }
    }

    /// What an agent tells of its adapters on this worker.
    pub fn own_adapters(&self, adapters: &Adapters) -> Vec<OwnAdapter> {
        let of = |adapter: Arc<ServedAdapter>| {
            let refused = self.adapter(&adapter)?.err().map(|error| error.to_string());
            let (name, root) = (adapter.name.clone(), adapter.root.clone());
            Some(OwnAdapter { name, root, stamp: adapter.stamp(), refused })
        };
        adapters.all().into_iter().filter_map(of).collect()
    }
}

impl Fleet {
    /// The adapters that requests may name.
    pub fn adapters(&self) -> &Arc<Adapters> {
        &self.adapters
    }

    /// Has all workers that take adapters load one, and serves it then. With `in_place` it takes
    /// the place of another of its name; requests in flight end with that one.
    ///
    /// # Errors
    /// [`LoadError`] says why not; nothing has changed then.
    pub async fn load_adapter(
        &self,
        source: AdapterSource,
        in_place: bool,
    ) -> Result<(), LoadError> {
        let _changing = self.adapters.changes.lock().await;
        let former = self.adapters.get(&source.name);
        if former.as_ref().is_some_and(|former| former.is_offered) {
            return Err(LoadError::OfAgents(source.name));
        }
        if former.is_some() && !in_place {
            return Err(LoadError::IsLoaded(source.name));
        }
        let workers = self.workers();
        // An engine on another machine may have files that are not on this one, so it is not an
        // error here that they are missing.
        let (looking, stamps) = (source.clone(), self.adapters.stamps());
        let files =
            tokio::task::spawn_blocking(move || AdapterFiles::look(&looking, true, stamps)).await;
        let files = files.map_err(|error| LoadError::Files {
            path: (&source.path).into(),
            problem: error.to_string(),
        })??;
        let adapter = match former.filter(|former| former.is(&source, &files)) {
            Some(unchanged) => unchanged,
            None => self.adapters.make(&source, &files)?,
        };
        let takers: Vec<_> =
            workers.iter().filter(|worker| worker.backend.capabilities().max_loras > 0).collect();
        match (workers.is_empty(), takers.is_empty()) {
            (true, _) => return Err(LoadError::NoEngine),
            (false, true) => return Err(AdapterError::NotEnabled.into()),
            (false, false) => {}
        }
        let loading =
            takers.iter().map(|worker| worker.loaded.load(worker.backend.as_ref(), &adapter));
        let refused = join_all(loading).await.into_iter().filter_map(Result::err);
        // One that died meanwhile loads it at its next start.
        if let Some(error) =
            refused.into_iter().find(|error| !matches!(error, AdapterError::Gone(_)))
        {
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
        if self.adapters.get(name).is_some_and(|adapter| adapter.is_offered) {
            return Err(LoadError::OfAgents(name.to_owned()));
        }
        self.adapters.remove(name).ok_or_else(|| LoadError::NotLoaded(name.to_owned()))?;
        tracing::info!(adapter = name, "a LoRA adapter is served no more");
        Ok(())
    }

    /// The adapter that engines know by this name, if a worker has it.
    pub fn adapter_of(&self, worker: &Worker, engine_name: &str) -> Option<Arc<ServedAdapter>> {
        let (name, _) = engine_name.rsplit_once('@')?;
        self.adapters
            .get(name)
            .filter(|found| found.engine().name == engine_name && worker.has_adapter(found))
    }

    /// The workers that lack an adapter.
    ///
    /// # Errors
    /// Why one of them lacks it, if no other has it.
    pub fn workers_without(
        &self,
        adapter: &ServedAdapter,
    ) -> Result<Vec<WorkerId>, Option<AdapterError>> {
        let workers = self.workers();
        let lacking: Vec<_> =
            workers.iter().filter(|worker| !worker.has_adapter(adapter)).collect();
        if !workers.is_empty() && lacking.len() == workers.len() {
            let why = || lacking.iter().filter_map(|worker| worker.lacks_adapter(adapter));
            // One that has it, and can't use it, says more than those that do not have it.
            return Err(why()
                .find(|why| !matches!(why, AdapterError::NotOwn))
                .or_else(|| why().next()));
        }
        Ok(lacking.into_iter().map(|worker| worker.id).collect())
    }
}

/// Tells workers of adapters that nobody needs any more, until the fleet is shut down.
pub(crate) async fn forget_unused(
    fleet: Arc<Fleet>,
    mut leavings: mpsc::UnboundedReceiver<Leaving>,
    mut shutdown: watch::Receiver<bool>,
) {
    let forgetting = async {
        while let Some(leaving) = leavings.recv().await {
            let _changing = fleet.adapters.changes.lock().await;
            let workers = fleet.workers();
            let adapter = &leaving.adapter;
            if leaving.was_offered {
                continue;
            }
            // What was loaded again as it was has the same id, and is needed.
            if fleet.adapters.all().iter().any(|served| served.id() == adapter.id) {
                continue;
            }
            let takers =
                workers.iter().filter(|worker| worker.backend.capabilities().max_loras > 0);
            join_all(takers.map(async |worker| {
                worker.loaded.forget(adapter.id);
                worker.backend.unload_adapter(adapter).await;
            }))
            .await;
            tracing::debug!(
                adapter = adapter.name,
                "the engines were told to forget a LoRA adapter"
            );
        }
    };
    tokio::select! {
        () = forgetting => {}
        _ = shutdown.wait_for(|&down| down) => {}
    }
}

#[cfg(test)]
mod tests;
