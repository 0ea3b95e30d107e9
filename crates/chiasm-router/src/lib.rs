//! Selection of the worker that gets a request.
//!
//! A [`Router`] tracks the workers, the contents of their caches (from KV events) and the requests
//! it gave to them. For each request it picks a worker by its [`Policy`] and returns a
//! [`Reservation`]. While the reservation lives, the request counts as load of the worker, and the
//! blocks that the worker will compute for it are promised to later requests.
//!
//! ```
//! use chiasm_router::{RouteRequest, Router, RouterConfig, WorkerInfo};
//! use chiasm_types::{BlockSize, PlanClassId, Role, WorkerId};
//!
//! let router = Router::new(RouterConfig::default());
//! let block_size = BlockSize::new(32).unwrap();
//! let info = WorkerInfo {
//!     total_blocks: 1000,
//!     block_size,
//!     publishes_events: true,
//!     encoder_cache_tokens: 8192,
//!     receiver_cache_elements: 4 << 30,
//!     class: PlanClassId(0),
//!     role: Role::Aggregated,
//!     embedding_store_bytes: 0,
//!     machine: 0,
//!     handover_domain: 0,
//!     max_prompt_tokens: 32_767,
//!     max_encoder_tokens: 8192,
//! };
//! router.add_worker(WorkerId(0), info);
//!
//! let mut reservation = router.select(&RouteRequest { prompt_tokens: 20, ..Default::default() })?;
//! assert_eq!(reservation.worker, WorkerId(0));
//! reservation.first_token();
//! drop(reservation); // the request has ended
//! # Ok::<(), chiasm_router::RouteError>(())
//! ```
//!
//! | module | contents |
//! |---|---|
//! | `config` | policies, weights, limits |
//! | `router` | the public interface: workers, events, selection |
//! | `shared` | the state behind all clones of a router, and its locks |
//! | `request` | a request as the selection of a worker sees it |
//! | `worker` | the state of one worker |
//! | `worker_handle` | handles of workers that go stale with the worker |
//! | `worker_table` | the state of all workers and its bookkeeping |
//! | `select` | the selection itself, by cost, of one worker or of one for each stage |
//! | `cost` | the formula that workers are compared by; `select/candidate` computes its terms |
//! | `route` | the workers of a request, stage by stage |
//! | `explain` | the comparison behind a choice, for people |
//! | `recent_work` | the decayed sum of the work that each worker has done |
//! | `promises` | blocks that requests in flight will leave behind |
//! | `approximate_cache` | the expected cache contents of workers without events |
//! | `media_holders` | workers that could reuse an image without its KV blocks |
//! | `embeddings` | the stores of embeddings that the workers of a machine share |
//! | `sessions` | the worker of each session's last request |
//! | `reservation` | the load and promises of a request while it runs |
//! | `clock` | the current time, also in simulations |
//! | `error` | the errors of picking a worker |
#![forbid(unsafe_code)]

mod approximate_cache;
mod clock;
mod config;
mod cost;
mod embeddings;
mod error;
mod explain;
mod media_holders;
mod promises;
mod recent_work;
mod request;
mod reservation;
mod route;
mod router;
mod select;
mod sessions;
mod shared;
mod worker;
mod worker_handle;
mod worker_table;

pub use chiasm_kv::Chore;
pub use clock::{Clock, VirtualClock};
pub use config::{
    BusyThresholds, Decoding, Policy, RouterConfig, StageWeights, UnknownPolicy, Weights,
};
pub use cost::CostTerms;
pub use error::RouteError;
pub use explain::{CandidateExplanation, Decision, Explanation};
pub use request::{RouteItem, RouteRequest, Splitting};
pub use reservation::Reservation;
pub use route::{EncodeStage, Route};
pub use router::Router;
pub use worker::{Admission, EngineStats, Knowledge, WorkerInfo, WorkerSnapshot};
