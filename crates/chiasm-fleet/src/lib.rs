//! Workers: their backends, capabilities, health, LoRA adapters and KV caches.
//!
//! Each worker has a keeper, which is a task. The keeper connects to the worker's backend, adds it
//! to the router, and feeds the router the worker's KV events and load. When the backend ends, the
//! keeper removes the worker from the router and reconnects after a pause.
//!
//! | module | is |
//! |---|---|
//! | `fleet` | all workers and their shared state |
//! | `keeper` | the life of one worker, over all its backends |
//! | `members` | adding and removing workers, and the shutdown |
//! | `start` | the start of a fleet |
//! | `events`, `followed` | feeds of KV events into the router, and their counters |
//! | `tap` | KV-event subscriptions for frontends on other machines |
//! | `kept` | knowledge of KV caches, saved for the next process |
//! | `loading`, `loaded` | LoRA adapters on workers, and the results of loading them |
//! | `condition` | the liveness of a worker: answering, suspect or hung |
//! | `trial`, `worker_breaker`, `breaker` | outcomes of requests, and circuit breakers |
//! | `backoff` | the pauses between connections and between probes |
//! | `classes` | the plan classes of the present workers |
//! | `keys` | the block keys of a class |
//! | `places` | numbers for workers' machines and networks |
//! | [`adapters`] | LoRA adapters that requests may name |
//! | `metrics`, `media_metrics`, `gauges` | metrics for Prometheus |
#![forbid(unsafe_code)]

pub mod adapters;
mod backoff;
mod breaker;
mod classes;
mod condition;
mod events;
mod fleet;
mod followed;
mod gauges;
mod keeper;
mod kept;
mod keys;
mod loaded;
mod loading;
mod media_metrics;
mod members;
mod metrics;
mod places;
mod start;
mod tap;
mod trial;
mod worker_breaker;

pub use breaker::{BreakerState, WorkerFault};
pub use classes::{PresentClass, PresentClasses};
pub use condition::{Condition, Patience};
pub(crate) use fleet::lock;
pub use fleet::{Fleet, NoEngines, Worker};
pub use followed::KvEventCounts;
pub use kept::KeptIndexes;
pub use keys::{keys_for, spans};
pub use metrics::{FleetMetrics, WorkerLabel};
pub use tap::{KvSubscription, KvUpdate};
pub use trial::Trial;
