//! The start of a fleet.

use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use chiasm_backend::Connector;
use chiasm_router::{Router, RouterConfig};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::adapters::Adapters;
use crate::{Fleet, FleetMetrics, NoEngines, Patience, loading};

impl Fleet {
    /// Starts one worker per connector, without waiting for them; see [`Fleet::wait_ready`].
    ///
    /// # Errors
    /// [`NoEngines`] without connectors.
    pub fn start(
        connectors: Vec<Box<dyn Connector>>,
        router: RouterConfig,
        patience: Patience,
    ) -> Result<Arc<Self>, NoEngines> {
        Self::start_with_adapters(connectors, router, patience, Arc::default())
    }

    /// Starts one worker per connector, with LoRA adapters that requests may name.
    ///
    /// # Errors
    /// [`NoEngines`] without connectors.
    pub fn start_with_adapters(
        connectors: Vec<Box<dyn Connector>>,
        router: RouterConfig,
        patience: Patience,
        adapters: Arc<Adapters>,
    ) -> Result<Arc<Self>, NoEngines> {
        if connectors.is_empty() {
            return Err(NoEngines);
        }
        let fleet = Self::empty(router, patience, adapters);
        for connector in connectors {
            fleet.add(connector);
        }
        Ok(fleet)
    }

    /// Creates a fleet without workers; [`Fleet::add`] adds them as they are discovered.
    pub fn empty(router: RouterConfig, patience: Patience, adapters: Arc<Adapters>) -> Arc<Self> {
        // Workers join and leave on threads that also serve requests, so the router's long work
        // runs on blocking threads.
        let runtime = Handle::current();
        let fleet = Arc::new(Self {
            router: Arc::new(Router::with_background(router, move |task| {
                drop(runtime.spawn_blocking(task))
            })),
            metrics: FleetMetrics::default(),
            on_departure: OnceLock::new(),
            state: Mutex::default(),
            ready: watch::Sender::new(0),
            max_running: AtomicUsize::new(0),
            shutdown: watch::Sender::new(false),
            abort_reason: OnceLock::new(),
            keepers: Mutex::new(Some(JoinSet::new())),
            created: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
            patience,
            worker_kv_events: Mutex::default(),
            stops: Mutex::default(),
            added: AtomicU32::new(0),
            unnamed: Mutex::default(),
            adapters,
            kept: OnceLock::new(),
        });
        if let Some(unused) = fleet.adapters.take_unused()
            && let Some(keepers) = &mut *fleet.keepers()
        {
            keepers.spawn(loading::unload_unused(
                fleet.clone(),
                unused,
                fleet.shutdown.subscribe(),
            ));
        }
        fleet
    }
}
