//! The results of loading adapters into one backend.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Mutex, MutexGuard, PoisonError};

use chiasm_backend::{AdapterError, Backend};
use chiasm_types::WorkerId;

use crate::adapters::{Adapters, ServedAdapter};

/// The result of loading each adapter into one backend, by the adapter's id.
#[derive(Debug, Default)]
pub(crate) struct LoadedAdapters(Mutex<BTreeMap<NonZeroU32, Result<(), AdapterError>>>);

impl LoadedAdapters {
    /// Returns the result of loading `adapter`, or `None` before the first attempt.
    pub(crate) fn result(&self, adapter: &ServedAdapter) -> Option<Result<(), AdapterError>> {
        self.results().get(&adapter.id()).cloned()
    }

    /// Loads an adapter unless it is loaded already.
    pub(crate) async fn load(
        &self,
        backend: &dyn Backend,
        adapter: &ServedAdapter,
    ) -> Result<(), AdapterError> {
        if matches!(self.result(adapter), Some(Ok(()))) {
            return Ok(());
        }
        let loaded = backend.load_adapter(adapter.engine()).await;
        self.results().insert(adapter.id(), loaded.clone());
        loaded
    }

    /// Loads every served adapter that this backend has not tried to load. Logs errors except
    /// `NotPreloaded`; after an error the worker serves without the adapter.
    pub(crate) async fn load_all(&self, id: WorkerId, backend: &dyn Backend, adapters: &Adapters) {
        for adapter in adapters.all() {
            let is_preloaded = backend.capabilities().adapters.contains_key(&adapter.engine().name);
            if is_preloaded || adapter.is_preloaded || self.result(&adapter).is_some() {
                continue;
            }
            match self.load(backend, &adapter).await {
                Err(AdapterError::NotPreloaded) => {}
                Ok(()) => {
                    tracing::info!(worker = %id, adapter = adapter.name, "loaded a LoRA adapter")
                }
                Err(error) => {
                    tracing::error!(
                        worker = %id,
                        adapter = adapter.name,
                        %error,
                        "can't load a LoRA adapter; the engine serves without it"
                    );
                }
            }
        }
    }

    /// Removes the result of an adapter that the engine no longer has.
    pub(crate) fn forget(&self, id: NonZeroU32) {
        self.results().remove(&id);
    }

    fn results(&self) -> MutexGuard<'_, BTreeMap<NonZeroU32, Result<(), AdapterError>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
