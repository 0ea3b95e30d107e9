//! Workers: which backends can take requests, what each can do, and what the router knows of their
//! KV caches.
//!
//! Each worker has a keeper, a task that connects to its backend, joins it to the router, feeds the
//! router its KV events and load, takes it out when it ends and connects to the next one after a
//! pause.
//!
//! | module | is |
//! |---|---|
//! | `fleet` | all workers, and what they share |
//! | `keeper` | one worker from start to end, over all its backends |
//! | `members` | workers that come and go while the fleet runs |
//! | `start` | the start of a fleet |
//! | `events`, `followed` | following a worker's KV events, and their counts |
//! | `tap` | the KV events of a worker for others that follow it |
//! | `kept` | knowledge of KV caches that outlives the process |
//! | `loading`, `loaded` | LoRA adapters on their way to the engines, and those that are there |
//! | `condition` | the liveness of a worker: answering, suspect or hung |
//! | `trial`, `worker_breaker`, `breaker` | outcomes of requests, and the circuit breakers that they open and close |
//! | `backoff` | the pauses between connections |
//! | `classes` | the plan classes of the present workers |
//! | `keys` | the block keys of a class |
//! | `places` | the machines of workers |
//! | [`adapters`] | LoRA adapters that requests may name |
//! | `metrics`, `media_metrics`, `gauges` | counts for Prometheus |
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
pub use tap::{KvHeard, KvKnown};
pub use trial::Trial;
