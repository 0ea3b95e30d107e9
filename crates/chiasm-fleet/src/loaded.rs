//! What became of the adapters that one backend was asked to load.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Mutex, MutexGuard, PoisonError};

use chiasm_backend::{AdapterError, Backend};
use chiasm_types::WorkerId;

use crate::adapters::{Adapters, ServedAdapter};

/// The adapters that one backend has loaded, and the errors of the others.
#[derive(Debug, Default)]
pub(crate) struct Loaded(Mutex<BTreeMap<NonZeroU32, Result<(), AdapterError>>>);

impl Loaded {
    /// What became of an adapter; `None` if the backend was not asked yet.
    pub(crate) fn of(&self, adapter: &ServedAdapter) -> Option<Result<(), AdapterError>> {
        self.known().get(&adapter.id()).cloned()
    }

    /// Loads an adapter unless it is loaded.
    pub(crate) async fn load(
        &self,
        backend: &dyn Backend,
        adapter: &ServedAdapter,
    ) -> Result<(), AdapterError> {
        if matches!(self.of(adapter), Some(Ok(()))) {
            return Ok(());
        }
        let loaded = backend.load_adapter(adapter.engine()).await;
        self.known().insert(adapter.id(), loaded.clone());
        loaded
    }

    /// Loads all adapters that the backend was not asked to load yet. Errors but `NotOwn` are
    /// logged: the backend does without.
    pub(crate) async fn load_all(&self, id: WorkerId, backend: &dyn Backend, adapters: &Adapters) {
        for adapter in adapters.all() {
            let has = backend.capabilities().adapters.contains_key(&adapter.engine().name);
            if has || adapter.is_offered || self.of(&adapter).is_some() {
                continue;
            }
            match self.load(backend, &adapter).await {
                Err(AdapterError::NotOwn) => {}
                Ok(()) => {
                    tracing::info!(worker = %id, adapter = adapter.name, "loaded a LoRA adapter")
                }
                Err(error) => {
                    tracing::error!(worker = %id, adapter = adapter.name, %error, "the engine does without a LoRA adapter");
                }
            }
        }
    }

    pub(crate) fn forget(&self, id: NonZeroU32) {
        self.known().remove(&id);
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<NonZeroU32, Result<(), AdapterError>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
