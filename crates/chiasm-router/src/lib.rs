//! Which worker gets a request.
//!
//! A [`Router`] knows the workers, what their caches hold (from KV events) and what was given to them. For each request it
//! picks one by its [`Policy`] and hands out a [`Reservation`]: while it lives, the request counts as load of the worker,
//! and the blocks that the worker will compute for it are promised to those who come after.
//!
//! ```
//! use chiasm_router::{RouteRequest, Router, RouterConfig, WorkerInfo};
//! use chiasm_types::{BlockSize, WorkerId};
//!
//! let router = Router::new(RouterConfig::default());
//! router.add_worker(WorkerId(0), WorkerInfo { total_blocks: 1000, block_size: BlockSize::new(32).unwrap() });
//!
//! let mut reservation = router.select(&RouteRequest { keys: &[], prompt_tokens: 20, exclude: &[] })?;
//! assert_eq!(reservation.worker, WorkerId(0));
//! reservation.first_token();
//! drop(reservation); // the request has ended
//! # Ok::<(), chiasm_router::RouteError>(())
//! ```
//!
//! | module | is about |
//! |---|---|
//! | `config` | policies, weights and why they are what they are |
//! | `router` | the public face: workers, events, selection |
//! | `fleet` | the workers' state and its bookkeeping |
//! | `select` | the choice itself |
//! | `promises` | blocks that requests in flight will leave behind |
//! | `reservation` | what a request holds while it runs |
#![forbid(unsafe_code)]

mod config;
mod error;
mod fleet;
mod promises;
mod reservation;
mod router;
mod select;

pub use config::{Policy, RouterConfig};
pub use error::RouteError;
pub use fleet::{EngineStats, WorkerInfo, WorkerSnapshot};
pub use reservation::Reservation;
pub use router::{RouteRequest, Router};
