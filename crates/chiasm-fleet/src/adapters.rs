//! LoRA adapters that requests may name in place of the model.
//!
//! What clients call an adapter is not what engines call it: there its name has the stamp of its
//! content behind it (`found`), so that an adapter which is loaded again under a name, or was
//! changed where it lies, shares no block of any KV cache with the one before, and no engine takes
//! one for the other. The same content has the same stamp after a restart of this process, and
//! engines that outlive it keep adapter and blocks.
//!
//! Agents have adapters of their own, which they tell of: requests may name them for as long as an
//! agent has them. Which of several contents a name stands for is not changed while any agent has
//! it.
//!
//! An adapter that was unloaded is forgotten by the engines when the last request with it has
//! ended: an engine that is made to forget one it needs reads it again within a step, and dies if
//! it can't.

mod found;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard};

use chiasm_backend::{Adapter, AdapterError, OwnAdapter, adapter_engine_name};
use chiasm_types::WorkerId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

pub use found::{AdapterFiles, Stamps};

/// What clients call an adapter, and where it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdapterSource {
    /// The name in requests.
    pub name: String,
    /// Its folder, as it was given.
    pub path: String,
}

/// Why an adapter can't be loaded, or unloaded.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LoadError {
    /// A field that is needed is empty.
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
    /// Agents have it: it is theirs to load and unload.
    #[error(
        "the adapter '{0}' is one of agents, which load what chiasm agent is given (--lora-modules)"
    )]
    OfAgents(String),
    /// There are as many as there may be. Those that were unloaded count until their last request
    /// has ended.
    #[error("there are {0} adapters, as many as allowed (--max-lora-adapters)")]
    Full(usize),
    /// Its files are not what they should be.
    #[error("{path}: {problem}")]
    Files {
        /// Where it was looked for.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// An engine does not take it.
    #[error("{0}")]
    Engine(#[from] AdapterError),
    /// No engine is there to take it.
    #[error("no engine is ready yet")]
    NoEngine,
}

/// An adapter that requests may name. Whoever needs it in an engine holds on to it.
#[derive(Debug)]
pub struct ServedAdapter {
    /// The name in requests.
    pub name: String,
    /// Its folder, as it was given.
    pub root: String,
    engine: Arc<Adapter>,
    stamp: [u8; 8],
    /// Whether workers have it by themselves. No other can be made to load it.
    pub is_offered: bool,
    /// Taken when the adapter goes.
    leaving: Option<Leaving>,
    left: mpsc::UnboundedSender<Leaving>,
}

impl ServedAdapter {
    /// What engines know it by.
    pub fn engine(&self) -> &Arc<Adapter> {
        &self.engine
    }

    /// Whether this is what was found at a source.
    pub fn is(&self, source: &AdapterSource, files: &AdapterFiles) -> bool {
        self.engine.name == adapter_engine_name(&source.name, files.stamp)
    }

    /// What tells its content from others.
    pub fn stamp(&self) -> [u8; 8] {
        self.stamp
    }

    /// The id that engines know it by.
    pub fn id(&self) -> NonZeroU32 {
        self.engine.id
    }
}

impl Drop for ServedAdapter {
    fn drop(&mut self) {
        if let Some(leaving) = self.leaving.take() {
            // Nobody listens once the fleet is gone.
            let _ = self.left.send(leaving);
        }
    }
}

/// An adapter that nobody needs any more; its place is free when engines have forgotten it.
#[derive(Debug)]
pub struct Leaving {
    /// The adapter, by the name that engines have for it.
    pub adapter: Arc<Adapter>,
    /// Whether workers had it by themselves.
    pub was_offered: bool,
    _place: OwnedSemaphorePermit,
}

/// All adapters that are served.
#[derive(Debug)]
pub struct Adapters {
    served: RwLock<BTreeMap<String, Arc<ServedAdapter>>>,
    /// What workers have by themselves, as each of them has last told.
    offers: Mutex<BTreeMap<WorkerId, Vec<OwnAdapter>>>,
    /// The model's name, which no adapter can have.
    model: String,
    stamps: Stamps,
    limit: usize,
    places: Arc<Semaphore>,
    left: mpsc::UnboundedSender<Leaving>,
    /// Taken by whoever tells engines.
    leavings: Mutex<Option<mpsc::UnboundedReceiver<Leaving>>>,
    /// Held by whoever loads or unloads.
    pub changes: tokio::sync::Mutex<()>,
}

impl Default for Adapters {
    fn default() -> Self {
        Self::new(0)
    }
}

impl Adapters {
    /// None yet, and so many at most.
    pub fn new(limit: usize) -> Self {
        let (left, leavings) = mpsc::unbounded_channel();
        let limit = limit.min(Semaphore::MAX_PERMITS);
        Self {
            served: RwLock::default(),
            offers: Mutex::default(),
            model: String::new(),
            stamps: Stamps::default(),
            limit,
            places: Arc::new(Semaphore::new(limit)),
            left,
            leavings: Mutex::new(Some(leavings)),
            changes: tokio::sync::Mutex::default(),
        }
    }

    /// The same, beside a model of this name.
    #[must_use]
    pub fn beside(self, model: &str) -> Self {
        Self { model: model.to_owned(), ..self }
    }

    /// The same, whose contents are told apart so.
    #[must_use]
    pub fn with_stamps(self, stamps: Stamps) -> Self {
        Self { stamps, ..self }
    }

    /// How contents are told apart.
    pub fn stamps(&self) -> Stamps {
        self.stamps
    }

    /// Serves an adapter before there are engines: they load it when they come.
    ///
    /// # Errors
    /// [`LoadError`] if the name is taken or there are too many.
    pub fn serve(&self, source: &AdapterSource, files: &AdapterFiles) -> Result<(), LoadError> {
        if self.get(&source.name).is_some() {
            return Err(LoadError::IsLoaded(source.name.clone()));
        }
        self.insert(self.make(source, files)?);
        Ok(())
    }

    /// Takes note of what a worker has by itself, in place of what it had before.
    pub fn offer(&self, worker: WorkerId, own: Vec<OwnAdapter>) {
        let mut offers = self.offers();
        match own.is_empty() {
            true => offers.remove(&worker),
            false => offers.insert(worker, own),
        };
        self.settle(&offers);
    }

    /// Serves what workers have by themselves, one content of each name, and nothing else of what
    /// was served for that reason.
    fn settle(&self, offers: &BTreeMap<WorkerId, Vec<OwnAdapter>>) {
        let all = || offers.values().flatten();
        let is_there = |served: &ServedAdapter| {
            all().any(|own| own.stamp == served.stamp && own.name == served.name)
        };
        self.write().retain(|_, served| !served.is_offered || is_there(served));
        for own in all() {
            if own.name == self.model {
                tracing::warn!(
                    adapter = own.name,
                    "a LoRA adapter of an agent has the model's name: nobody can ask for it"
                );
                continue;
            }
            if self.get(&own.name).is_some() {
                continue;
            }
            match self.take_in(own) {
                Ok(adapter) => {
                    tracing::info!(adapter = own.name, "serving a LoRA adapter of agents");
                    // One that was loaded here in this moment stays.
                    self.write().entry(own.name.clone()).or_insert(adapter);
                }
                Err(error) => {
                    tracing::warn!(adapter = own.name, %error, "a LoRA adapter of an agent is not served")
                }
            }
        }
    }

    fn take_in(&self, own: &OwnAdapter) -> Result<Arc<ServedAdapter>, LoadError> {
        let source = AdapterSource { name: own.name.clone(), path: own.root.clone() };
        let files = AdapterFiles { path: own.root.clone(), rank: None, stamp: own.stamp };
        self.make_of(&source, &files, true)
    }

    /// The adapter of this name.
    pub fn get(&self, name: &str) -> Option<Arc<ServedAdapter>> {
        self.served.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// All of them, by their names.
    pub fn all(&self) -> Vec<Arc<ServedAdapter>> {
        self.served.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// An adapter that is not served yet.
    pub fn make(
        &self,
        source: &AdapterSource,
        files: &AdapterFiles,
    ) -> Result<Arc<ServedAdapter>, LoadError> {
        self.make_of(source, files, false)
    }

    fn make_of(
        &self,
        source: &AdapterSource,
        files: &AdapterFiles,
        is_offered: bool,
    ) -> Result<Arc<ServedAdapter>, LoadError> {
        let place =
            self.places.clone().try_acquire_owned().map_err(|_| LoadError::Full(self.limit))?;
        let engine = Arc::new(Adapter {
            id: self.free_id(files.id()),
            name: adapter_engine_name(&source.name, files.stamp),
            path: files.path.clone(),
        });
        let leaving =
            Some(Leaving { adapter: engine.clone(), was_offered: is_offered, _place: place });
        let (name, root) = (source.name.clone(), source.path.clone());
        let (stamp, left) = (files.stamp, self.left.clone());
        Ok(Arc::new(ServedAdapter { name, root, engine, stamp, is_offered, leaving, left }))
    }

    /// Lets requests name the adapter. Returns the one that had the name.
    pub fn insert(&self, adapter: Arc<ServedAdapter>) -> Option<Arc<ServedAdapter>> {
        self.write().insert(adapter.name.clone(), adapter)
    }

    /// No further request may name it, but where workers have one of the name by themselves.
    pub fn remove(&self, name: &str) -> Option<Arc<ServedAdapter>> {
        let offers = self.offers();
        let removed = self.write().remove(name);
        self.settle(&offers);
        removed
    }

    /// Those that nobody needs any more, as they come. `None` for all but the first who asks.
    pub fn leavings(&self) -> Option<mpsc::UnboundedReceiver<Leaving>> {
        self.leavings.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn offers(&self) -> MutexGuard<'_, BTreeMap<WorkerId, Vec<OwnAdapter>>> {
        self.offers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<String, Arc<ServedAdapter>>> {
        self.served.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first id from this one on that no adapter has which is served.
    fn free_id(&self, mut id: NonZeroU32) -> NonZeroU32 {
        let served = self.served.read().unwrap_or_else(PoisonError::into_inner);
        while served.values().any(|other| other.id() == id) {
            id = found::following(id);
        }
        id
    }
}

#[cfg(test)]
mod tests;
