//! A fleet in virtual time: the real router, with its prefix index, before modelled engines; or
//! several of them, each in a frontend of its own.
//!
//! ```
//! use chiasm_router::Policy;
//! use chiasm_simulate::{Arrivals, Scenario, Source, Workload};
//! use chiasm_types::Role;
//!
//! let source = Source::Generated(Workload::SharedImageQa, Default::default());
//! let scenario = Scenario {
//!     workers: vec![Role::Aggregated; 4],
//!     sized_for: 4,
//!     requests: 400,
//!     warm_up: 100,
//!     source,
//!     seed: 1,
//!     engine: Default::default(),
//!     frontend: Default::default(),
//!     router: Default::default(),
//! };
//! let rate = 0.7 * scenario.saturation(Policy::RoundRobin)?;
//! let report = scenario.run(Policy::KvMedia, Arrivals::Poisson(rate))?;
//! assert_eq!(report.completed, 400);
//! # Ok::<(), chiasm_simulate::SimulateError>(())
//! ```
//!
//! Nothing waits and nothing is random but by the seed: the same scenario gives the same report, up
//! to its wall time. What the models leave out is in `docs/routing.md`.
//!
//! | module | is about |
//! |---|---|
//! | `scenario`, `run` | what is simulated; running it |
//! | `workload` | what is asked: generated requests and traces |
//! | `sequence` | a request's tokens in few words |
//! | `fleet` | the event loop: frontends, engines |
//! | `frontends` | the routers, and what they are told of each other's choices |
//! | `engine` | a modelled engine: scheduler, KV cache, encoder's cache |
//! | `encoder` | a modelled engine that encodes images for others |
//! | `embedding_store` | what such engines leave |
//! | `model` | the engines' and the frontends' speeds and sizes, and where the numbers come from |
//! | `tally`, `timeline`, `histogram`, `latency` | what is counted, in all and over time |
//! | `report` | what a run tells |
#![forbid(unsafe_code)]

mod embedding_store;
mod encoder;
mod engine;
mod error;
mod fleet;
mod frontends;
mod histogram;
mod latency;
mod model;
mod report;
mod run;
mod scenario;
mod sequence;
mod tally;
mod timeline;
mod virtual_time;
mod workload;

pub use error::SimulateError;
pub use latency::Latency;
pub use model::{EngineModel, FrontendModel};
pub use report::{PolicyReport, table};
pub use scenario::{Arrivals, Scenario, Source};
pub use timeline::Interval;
pub use workload::{TraceSummary, Workload, WorkloadSize};
