//! LoRA adapters that requests may name in place of the model.
//!
//! Clients and engines use different names for an adapter. The engines' name is the clients' name
//! followed by a stamp of the adapter's content (`found`). An adapter that is reloaded with other
//! content therefore shares no KV blocks with its predecessor, and engines never confuse the two.
//! The stamp of the same content is the same after a restart of this process, so engines that
//! outlive this process keep adapter and blocks.
//!
//! Agents report adapters that are preloaded in their engines. Requests may name these while an
//! agent has them. If agents have different contents under one name, the name keeps its content
//! while any agent has it.
//!
//! Engines unload an adapter only when the last request with it has ended. An engine that needs an
//! unloaded adapter reads it again within a step, and dies if it can't.

mod found;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard};

use chiasm_backend::{Adapter, AdapterError, PreloadedAdapter, adapter_engine_name};
use chiasm_types::WorkerId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

pub use found::{AdapterFiles, StampSource};

/// An adapter's name and folder, as configured or requested.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdapterSource {
    /// The name in requests.
    pub name: String,
    /// The folder, as it was given.
    pub path: String,
}

/// An error while an adapter is loaded or unloaded.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LoadError {
    /// A required field is empty.
    #[error("'{0}' must not be empty")]
    Empty(&'static str),
    /// The model has this name.
    #[error("the name '{0}' is that of the model")]
    IsModel(String),
    /// Another adapter has this name.
    #[error("the adapter '{0}' is loaded already; 'load_inplace' replaces it")]
    IsLoaded(String),
    /// No adapter has this name.
    #[error("the adapter '{0}' is not loaded")]
    NotLoaded(String),
    /// The adapter is preloaded by agents, which alone may load and unload it.
    #[error(
        "the adapter '{0}' belongs to agents; change the --lora-modules of their 'chiasm agent'"
    )]
    OwnedByAgents(String),
    /// The maximum number of adapters is reached. Unloaded adapters count until their last request
    /// has ended.
    #[error("the maximum of {0} adapters is reached (--max-lora-adapters)")]
    Full(usize),
    /// The adapter's files are invalid.
    #[error("{path}: {problem}")]
    Files {
        /// The file or folder with the problem.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// An engine refuses the adapter.
    #[error("{0}")]
    Engine(#[from] AdapterError),
    /// No engine is ready to load the adapter.
    #[error("no engine is ready yet")]
    NoEngine,
}

/// An adapter that requests may name. The engines keep it loaded while there is a reference to it.
#[derive(Debug)]
pub struct ServedAdapter {
    /// The name in requests.
    pub name: String,
    /// The folder, as it was given.
    pub root: String,
    engine: Arc<Adapter>,
    stamp: [u8; 8],
    /// `true` if workers have the adapter preloaded. No other worker can load it then.
    pub is_preloaded: bool,
    /// Sent when the last reference to the adapter is dropped.
    on_drop: Option<UnusedAdapter>,
    unused: mpsc::UnboundedSender<UnusedAdapter>,
}

impl ServedAdapter {
    /// Returns the adapter in the form that engines load.
    pub fn engine(&self) -> &Arc<Adapter> {
        &self.engine
    }

    /// Returns `true` if this adapter has the name of `source` and the content of `files`.
    pub fn matches(&self, source: &AdapterSource, files: &AdapterFiles) -> bool {
        self.engine.name == adapter_engine_name(&source.name, files.stamp)
    }

    /// Returns the stamp of the adapter's content.
    pub fn stamp(&self) -> [u8; 8] {
        self.stamp
    }

    /// Returns the adapter's id in engines.
    pub fn id(&self) -> NonZeroU32 {
        self.engine.id
    }
}

impl Drop for ServedAdapter {
    fn drop(&mut self) {
        if let Some(adapter) = self.on_drop.take() {
            // Fails if the fleet no longer exists.
            let _ = self.unused.send(adapter);
        }
    }
}

/// An adapter without references. It counts against the maximum number of adapters until it is
/// dropped, which should be after the engines have unloaded it.
#[derive(Debug)]
pub struct UnusedAdapter {
    /// The adapter in the form that engines know.
    pub adapter: Arc<Adapter>,
    /// `true` if workers had the adapter preloaded.
    pub was_preloaded: bool,
    _permit: OwnedSemaphorePermit,
}

/// All served adapters, by name.
#[derive(Debug)]
pub struct Adapters {
    served: RwLock<BTreeMap<String, Arc<ServedAdapter>>>,
    /// The adapters that each worker last reported as preloaded.
    preloaded: Mutex<BTreeMap<WorkerId, Vec<PreloadedAdapter>>>,
    /// The model's name, which no adapter can have.
    model: String,
    stamp_source: StampSource,
    limit: usize,
    permits: Arc<Semaphore>,
    unused: mpsc::UnboundedSender<UnusedAdapter>,
    /// `None` once the task that unloads adapters has taken the receiver.
    unused_receiver: Mutex<Option<mpsc::UnboundedReceiver<UnusedAdapter>>>,
    /// Serializes loading and unloading.
    pub changes: tokio::sync::Mutex<()>,
}

impl Default for Adapters {
    fn default() -> Self {
        Self::new(0)
    }
}

impl Adapters {
    /// Creates an empty set for at most `limit` adapters.
    pub fn new(limit: usize) -> Self {
        let (unused, unused_receiver) = mpsc::unbounded_channel();
        let limit = limit.min(Semaphore::MAX_PERMITS);
        Self {
            served: RwLock::default(),
            preloaded: Mutex::default(),
            model: String::new(),
            stamp_source: StampSource::default(),
            limit,
            permits: Arc::new(Semaphore::new(limit)),
            unused,
            unused_receiver: Mutex::new(Some(unused_receiver)),
            changes: tokio::sync::Mutex::default(),
        }
    }

    /// Sets the model's name, which no adapter can have.
    #[must_use]
    pub fn with_model(self, model: &str) -> Self {
        Self { model: model.to_owned(), ..self }
    }

    /// Sets the source of the adapters' stamps.
    #[must_use]
    pub fn with_stamp_source(self, stamp_source: StampSource) -> Self {
        Self { stamp_source, ..self }
    }

    /// Returns the source of the adapters' stamps.
    pub fn stamp_source(&self) -> StampSource {
        self.stamp_source
    }

    /// Serves an adapter before there are engines, which load it when they connect.
    ///
    /// # Errors
    /// Returns an error if the name is taken, or the maximum number of adapters is reached.
    pub fn serve(&self, source: &AdapterSource, files: &AdapterFiles) -> Result<(), LoadError> {
        if self.get(&source.name).is_some() {
            return Err(LoadError::IsLoaded(source.name.clone()));
        }
        self.insert(self.build(source, files)?);
        Ok(())
    }

    /// Replaces the adapters that a worker reports as preloaded.
    pub fn set_preloaded(&self, worker: WorkerId, adapters: Vec<PreloadedAdapter>) {
        let mut preloaded = self.preloaded();
        if adapters.is_empty() {
            preloaded.remove(&worker);
        } else {
            preloaded.insert(worker, adapters);
        }
        self.reconcile(&preloaded);
    }

    /// Serves the preloaded adapters, one content per name, and drops served ones that no worker
    /// has preloaded any more.
    fn reconcile(&self, preloaded: &BTreeMap<WorkerId, Vec<PreloadedAdapter>>) {
        let all_preloaded = || preloaded.values().flatten();
        let is_present = |served: &ServedAdapter| {
            all_preloaded()
                .any(|adapter| adapter.stamp == served.stamp && adapter.name == served.name)
        };
        self.write().retain(|_, served| !served.is_preloaded || is_present(served));
        for adapter in all_preloaded() {
            let name = &adapter.name;
            if *name == self.model {
                tracing::warn!(
                    adapter = name,
                    "a LoRA adapter of an agent has the model's name; requests can't select it"
                );
                continue;
            }
            if self.get(name).is_some() {
                continue;
            }
            match self.build_preloaded(adapter) {
                Ok(adapter) => {
                    tracing::info!(adapter = name, "serving a LoRA adapter of agents");
                    // An adapter that was loaded here at the same moment stays.
                    self.write().entry(name.clone()).or_insert(adapter);
                }
                Err(error) => {
                    tracing::warn!(
                        adapter = name, %error,
                        "can't serve a LoRA adapter of an agent"
                    );
                }
            }
        }
    }

    fn build_preloaded(&self, adapter: &PreloadedAdapter) -> Result<Arc<ServedAdapter>, LoadError> {
        let source = AdapterSource { name: adapter.name.clone(), path: adapter.root.clone() };
        let files = AdapterFiles { path: adapter.root.clone(), rank: None, stamp: adapter.stamp };
        self.build_with(&source, &files, true)
    }

    /// Returns the served adapter with this name.
    pub fn get(&self, name: &str) -> Option<Arc<ServedAdapter>> {
        self.served.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// Returns all served adapters, ordered by name.
    pub fn all(&self) -> Vec<Arc<ServedAdapter>> {
        self.served.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Creates an adapter that is not served yet.
    ///
    /// # Errors
    /// Returns [`LoadError::Full`] if the maximum number of adapters is reached.
    pub fn build(
        &self,
        source: &AdapterSource,
        files: &AdapterFiles,
    ) -> Result<Arc<ServedAdapter>, LoadError> {
        self.build_with(source, files, false)
    }

    fn build_with(
        &self,
        source: &AdapterSource,
        files: &AdapterFiles,
        is_preloaded: bool,
    ) -> Result<Arc<ServedAdapter>, LoadError> {
        let permit =
            self.permits.clone().try_acquire_owned().map_err(|_| LoadError::Full(self.limit))?;
        let engine = Arc::new(Adapter {
            id: self.free_id(files.id()),
            name: adapter_engine_name(&source.name, files.stamp),
            path: files.path.clone(),
        });
        let on_drop =
            UnusedAdapter { adapter: engine.clone(), was_preloaded: is_preloaded, _permit: permit };
        Ok(Arc::new(ServedAdapter {
            name: source.name.clone(),
            root: source.path.clone(),
            engine,
            stamp: files.stamp,
            is_preloaded,
            on_drop: Some(on_drop),
            unused: self.unused.clone(),
        }))
    }

    /// Serves an adapter. Returns the adapter that had its name before.
    pub fn insert(&self, adapter: Arc<ServedAdapter>) -> Option<Arc<ServedAdapter>> {
        self.write().insert(adapter.name.clone(), adapter)
    }

    /// Removes an adapter and returns it. Requests may still use the name if workers have an
    /// adapter of this name preloaded.
    pub fn remove(&self, name: &str) -> Option<Arc<ServedAdapter>> {
        let preloaded = self.preloaded();
        let removed = self.write().remove(name);
        self.reconcile(&preloaded);
        removed
    }

    /// Returns the receiver of adapters without references. Returns `None` from the second call on.
    pub fn take_unused(&self) -> Option<mpsc::UnboundedReceiver<UnusedAdapter>> {
        self.unused_receiver.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn preloaded(&self) -> MutexGuard<'_, BTreeMap<WorkerId, Vec<PreloadedAdapter>>> {
        self.preloaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<String, Arc<ServedAdapter>>> {
        self.served.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the first id from `id` on that no served adapter has.
    fn free_id(&self, mut id: NonZeroU32) -> NonZeroU32 {
        let served = self.served.read().unwrap_or_else(PoisonError::into_inner);
        while served.values().any(|other| other.id() == id) {
            id = found::next_id(id);
        }
        id
    }
}

#[cfg(test)]
mod tests;
