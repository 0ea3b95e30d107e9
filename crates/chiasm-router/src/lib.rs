//! Which worker gets a request.
//!
//! A [`Router`] knows the workers, what their caches hold (from KV events) and what was given to
//! them. For each request it picks one by its [`Policy`] and hands out a [`Reservation`]: while it
//! lives, the request counts as load of the worker, and the blocks that the worker will compute for
//! it are promised to those who come after.
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
//!     hands_over_in: 0,
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
//! | module | is about |
//! |---|---|
//! | `config` | policies, weights, limits |
//! | `router` | the public face: workers, events, selection |
//! | `shared` | the state behind all clones of a router, and its locks |
//! | `request` | a request as the choice of a worker sees it |
//! | `worker` | what is known of one worker |
//! | `seat` | handles of workers that go stale with them |
//! | `roster` | the workers' state and its bookkeeping |
//! | `select` | the choice itself, by cost, of one worker or of one for each stage |
//! | `cost` | the formula that workers are compared by |
//! | `route` | where a request goes, stage by stage |
//! | `explain` | what was compared, for people |
//! | `lately` | how much work workers did lately |
//! | `promises` | blocks that requests in flight will leave behind |
//! | `believed` | what workers without events are taken to hold |
//! | `media_holders` | who could reuse an image without its KV blocks |
//! | `sessions` | where a session's last request went |
//! | `reservation` | what a request holds while it runs |
//! | `clock` | what time it is, also in simulations |
#![forbid(unsafe_code)]

mod believed;
mod clock;
mod config;
mod cost;
mod embeddings;
mod error;
mod explain;
mod lately;
mod media_holders;
mod promises;
mod request;
mod reservation;
mod roster;
mod route;
mod router;
mod seat;
mod select;
mod sessions;
mod shared;
mod worker;

pub use chiasm_kv::Chore;
pub use clock::{Clock, VirtualClock};
pub use config::{
    BusyThresholds, Decoding, Policy, RouterConfig, StageWeights, UnknownPolicy, Weights,
};
pub use cost::Terms;
pub use error::RouteError;
pub use explain::{Considered, Decision, Explanation};
pub use request::{RouteItem, RouteRequest, Splitting};
pub use reservation::Reservation;
pub use route::{Encodes, Route};
pub use router::Router;
pub use worker::{Admission, EngineStats, Knowledge, WorkerInfo, WorkerSnapshot};
