//! A simulation of a fleet in virtual time: one or several frontends, each with the real router and
//! its prefix index, in front of modelled engines.
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
//! Nothing waits in real time, and all randomness comes from the seed: the same scenario gives the
//! same report, except for its wall time. `docs/simulate.md` lists what the models leave
//! out.
//!
//! | module | contents |
//! |---|---|
//! | `scenario`, `run` | the parameters of a simulation; running it |
//! | `workload` | the requests: generated ones and traces |
//! | `sequence` | a compact description of a request's tokens |
//! | `fleet` | the event loop: frontends, engines |
//! | `frontends` | the routers, and their announcements of requests to each other |
//! | `engine` | a modelled engine: scheduler, KV cache, encoder cache |
//! | `encoder` | a modelled engine that encodes images for others |
//! | `embedding_store` | the store of the embeddings that such engines make |
//! | `model` | the speeds and sizes of engines and frontends, and the sources of the numbers |
//! | `tally`, `timeline`, `histogram`, `latency` | counts, in total and over time |
//! | `report` | the results of a run |
//! | `error` | the errors of a simulation |
//! | `virtual_time` | the unit of time |
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
