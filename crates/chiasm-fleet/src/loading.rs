//! Loading and unloading of LoRA adapters on workers.
//!
//! A worker loads every adapter before it takes its first request. It retries an adapter that it
//! refused when a client loads that adapter again. Workers of agents have preloaded adapters, which
//! no other worker can load. Requests with an adapter go to workers that have it.

use std::sync::Arc;

use chiasm_backend::{AdapterError, PreloadedAdapter};
use chiasm_types::WorkerId;
use futures_util::future::join_all;
use tokio::sync::{mpsc, watch};

use crate::adapters::{
    AdapterFiles, AdapterSource, Adapters, LoadError, ServedAdapter, UnusedAdapter,
};
use crate::{Fleet, Worker};

impl Worker {
    /// Returns `true` if the worker accepts requests with this adapter.
    pub fn has_adapter(&self, adapter: &ServedAdapter) -> bool {
        matches!(self.adapter_result(adapter), Some(Ok(())))
    }

    /// Returns the error with which the worker refused this adapter.
    pub fn adapter_error(&self, adapter: &ServedAdapter) -> Option<AdapterError> {
        self.adapter_result(adapter).and_then(Result::err)
    }

    /// Returns the result of loading an adapter, or `None` before the first attempt.
    fn adapter_result(&self, adapter: &ServedAdapter) -> Option<Result<(), AdapterError>> {
        let preloaded = &self.backend.capabilities().adapters;
        match preloaded.get(&adapter.engine().name) {
            Some(PreloadedAdapter { refused: None, .. }) => Some(Ok(())),
            Some(PreloadedAdapter { refused: Some(why), .. }) => {
                Some(Err(AdapterError::Refused(why.clone())))
            }
            None if preloaded.values().any(|other| other.name == adapter.name) => Some(Err(
                AdapterError::Refused("the agent has another adapter of this name".to_owned()),
            )),
            None if adapter.is_preloaded => Some(Err(AdapterError::NotPreloaded)),
            None => self.loaded.result(adapter),
        }
    }

    /// Returns the adapters of this worker for frontends, to which they are preloaded.
    pub fn adapter_reports(&self, adapters: &Adapters) -> Vec<PreloadedAdapter> {
        let report = |adapter: Arc<ServedAdapter>| {
            let refused = self.adapter_result(&adapter)?.err().map(|error| error.to_string());
            let name = adapter.name.clone();
            let root = adapter.root.clone();
            Some(PreloadedAdapter { name, root, stamp: adapter.stamp(), refused })
        };
        adapters.all().into_iter().filter_map(report).collect()
    }
}

impl Fleet {
    /// Returns the adapters that requests may name.
    pub fn adapters(&self) -> &Arc<Adapters> {
        &self.adapters
    }

    /// Loads an adapter on all workers that support adapters, then serves it. With `in_place` it
    /// replaces the adapter of the same name; requests in flight finish with the old one.
    ///
    /// # Errors
    /// Returns an error, and changes nothing, if the name, the files or a worker do not allow it.
    pub async fn load_adapter(
        &self,
        source: AdapterSource,
        in_place: bool,
    ) -> Result<(), LoadError> {
        let _changing = self.adapters.changes.lock().await;
        let former = self.adapters.get(&source.name);
        if former.as_ref().is_some_and(|former| former.is_preloaded) {
            return Err(LoadError::OwnedByAgents(source.name));
        }
        if former.is_some() && !in_place {
            return Err(LoadError::IsLoaded(source.name));
        }
        let workers = self.workers();
        // Missing files are allowed, because an engine on another machine may have them.
        let inspected = source.clone();
        let stamp_source = self.adapters.stamp_source();
        let inspect = move || AdapterFiles::inspect(&inspected, true, stamp_source);
        let files = tokio::task::spawn_blocking(inspect).await.map_err(|error| {
            LoadError::Files { path: (&source.path).into(), problem: error.to_string() }
        })??;
        let adapter = match former.filter(|former| former.matches(&source, &files)) {
            Some(unchanged) => unchanged,
            None => self.adapters.build(&source, &files)?,
        };
        if workers.is_empty() {
            return Err(LoadError::NoEngine);
        }
        let supporting: Vec<_> =
            workers.iter().filter(|worker| worker.backend.capabilities().max_loras > 0).collect();
        if supporting.is_empty() {
            return Err(AdapterError::NotEnabled.into());
        }
        let loading =
            supporting.iter().map(|worker| worker.loaded.load(worker.backend.as_ref(), &adapter));
        let mut errors = join_all(loading).await.into_iter().filter_map(Result::err);
        // A worker that died meanwhile loads the adapter when it reconnects.
        if let Some(error) = errors.find(|error| !matches!(error, AdapterError::Gone(_))) {
            return Err(error.into());
        }
        self.adapters.insert(adapter.clone());
        tracing::info!(adapter = adapter.name, path = adapter.root, "serving a LoRA adapter");
        // Workers may have joined since the loading began.
        for worker in self.workers() {
            worker.loaded.load_all(worker.id, worker.backend.as_ref(), &self.adapters).await;
        }
        Ok(())
    }

    /// Stops serving an adapter. Requests in flight finish with it.
    ///
    /// # Errors
    /// Returns [`LoadError::NotLoaded`] if no adapter has this name, or
    /// [`LoadError::OwnedByAgents`] if agents have preloaded it.
    pub async fn unload_adapter(&self, name: &str) -> Result<(), LoadError> {
        let _changing = self.adapters.changes.lock().await;
        if self.adapters.get(name).is_some_and(|adapter| adapter.is_preloaded) {
            return Err(LoadError::OwnedByAgents(name.to_owned()));
        }
        self.adapters.remove(name).ok_or_else(|| LoadError::NotLoaded(name.to_owned()))?;
        tracing::info!(adapter = name, "a LoRA adapter is no longer served");
        Ok(())
    }

    /// Returns the adapter that engines know by `engine_name`, if `worker` has it.
    pub fn adapter_by_engine_name(
        &self,
        worker: &Worker,
        engine_name: &str,
    ) -> Option<Arc<ServedAdapter>> {
        let (name, _) = engine_name.rsplit_once('@')?;
        self.adapters
            .get(name)
            .filter(|adapter| adapter.engine().name == engine_name && worker.has_adapter(adapter))
    }

    /// Returns the workers that lack an adapter.
    ///
    /// # Errors
    /// Returns a worker's error, if one is known, if all workers lack the adapter.
    pub fn workers_without(
        &self,
        adapter: &ServedAdapter,
    ) -> Result<Vec<WorkerId>, Option<AdapterError>> {
        let workers = self.workers();
        let lacking: Vec<_> =
            workers.iter().filter(|worker| !worker.has_adapter(adapter)).collect();
        if !workers.is_empty() && lacking.len() == workers.len() {
            let errors = || lacking.iter().filter_map(|worker| worker.adapter_error(adapter));
            // Other errors are more informative than `NotPreloaded`.
            return Err(errors()
                .find(|error| !matches!(error, AdapterError::NotPreloaded))
                .or_else(|| errors().next()));
        }
        Ok(lacking.into_iter().map(|worker| worker.id).collect())
    }
}

/// Unloads adapters without references from workers, until the fleet is shut down.
pub(crate) async fn unload_unused(
    fleet: Arc<Fleet>,
    mut unused_adapters: mpsc::UnboundedReceiver<UnusedAdapter>,
    mut shutdown: watch::Receiver<bool>,
) {
    let unload_all = async {
        while let Some(unused) = unused_adapters.recv().await {
            let _changing = fleet.adapters.changes.lock().await;
            let workers = fleet.workers();
            let adapter = &unused.adapter;
            if unused.was_preloaded {
                continue;
            }
            // An adapter that was loaded again unchanged has the same id and is in use.
            if fleet.adapters.all().iter().any(|served| served.id() == adapter.id) {
                continue;
            }
            let supporting =
                workers.iter().filter(|worker| worker.backend.capabilities().max_loras > 0);
            join_all(supporting.map(async |worker| {
                worker.loaded.forget(adapter.id);
                worker.backend.unload_adapter(adapter).await;
            }))
            .await;
            tracing::debug!(adapter = adapter.name, "unloaded a LoRA adapter from the engines");
        }
    };
    tokio::select! {
        () = unload_all => {}
        _ = shutdown.wait_for(|&down| down) => {}
    }
}

#[cfg(test)]
mod tests;
