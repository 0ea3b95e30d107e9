//! The parameters of a simulation.

use std::path::PathBuf;

use chiasm_router::RouterConfig;
use chiasm_types::Role;

use crate::error::SimulateError;
use crate::model::{EngineModel, FrontendModel};
use crate::workload::{Generator, Request, Trace, TraceSummary, Workload, WorkloadSize};

/// The maximum number of workers; a larger number is likely a mistake.
const MAX_WORKERS: usize = 100_000;

/// The source of the requests.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// Generated requests of a workload.
    Generated(Workload, WorkloadSize),
    /// A file in Mooncake's format: JSON lines with `timestamp` (ms), `input_length`,
    /// `output_length` and `hash_ids` of 512-token blocks.
    Trace(PathBuf),
}

/// The arrival times of the requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// Independent arrivals, with this mean number of requests per second.
    Poisson(f64),
    /// The times of the trace, divided by this speed.
    Traced(f64),
    /// A closed loop: a request arrives as soon as fewer than this number per worker are in flight.
    Closed(usize),
}

/// A fleet, its requests and its routers.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// The role of each engine, for 1 to 100,000 engines. With roles, the router may have a prompt
    /// computed on another engine than its answer.
    pub workers: Vec<Role>,
    /// The number of workers for which images and conversations are generated. The length of
    /// `workers`, unless fleets of several sizes shall get the same requests.
    pub sized_for: usize,
    /// The number of requests; fewer if a trace has fewer.
    pub requests: u64,
    /// The number of first requests that don't count, while the caches fill.
    pub warm_up: u64,
    /// The source of the requests.
    pub source: Source,
    /// The seed of the requests, their arrivals, their frontends, and the routers' choices.
    pub seed: u64,
    /// The engines, which only differ in their roles.
    pub engine: EngineModel,
    /// The frontends.
    pub frontend: FrontendModel,
    /// The configuration of the routers; its policy and seed are replaced.
    pub router: RouterConfig,
}

impl Source {
    /// Reads a trace to its end, to find its errors. Returns `None` for generated requests.
    ///
    /// # Errors
    /// [`SimulateError::TraceRead`] and [`SimulateError::TraceLine`].
    pub fn trace_summary(&self) -> Result<Option<TraceSummary>, SimulateError> {
        match self {
            Self::Generated(..) => Ok(None),
            Self::Trace(path) => Trace::open(path)?.summary().map(Some),
        }
    }
}

impl Scenario {
    /// Returns the requests, in the order of their arrival.
    pub(crate) fn requests(
        &self,
    ) -> Result<Box<dyn Iterator<Item = Result<Request, SimulateError>>>, SimulateError> {
        let limit = usize::try_from(self.requests).unwrap_or(usize::MAX);
        Ok(match &self.source {
            Source::Generated(workload, size) => Box::new(
                Generator::new(*workload, size, self.sized_for, self.seed).map(Ok).take(limit),
            ),
            Source::Trace(path) => Box::new(Trace::open(path)?.take(limit)),
        })
    }

    /// Returns `true` if some engines have a role other than [`Role::Aggregated`].
    pub fn has_roles(&self) -> bool {
        self.workers.iter().any(|role| *role != Role::Aggregated)
    }

    /// Returns `true` if some engines encode images for the others.
    pub fn has_encoders(&self) -> bool {
        self.workers.contains(&Role::Encode)
    }

    /// Checks that the parameters are valid and fit `arrivals`.
    pub(crate) fn check(&self, arrivals: Arrivals) -> Result<(), SimulateError> {
        self.engine.check()?;
        self.frontend.check()?;
        if !(1..=MAX_WORKERS).contains(&self.workers.len()) {
            return Err(SimulateError::Config("--workers: a fleet has 1 to 100,000 workers"));
        }
        if !self.workers.iter().any(|role| role.can_answer()) {
            return Err(SimulateError::Config(
                "--workers: engines that only encode cannot answer; add others",
            ));
        }
        if self.has_roles() && self.frontend.frontends > 1 && self.frontend.announce_delay.is_some()
        {
            return Err(SimulateError::Config(
                "announcements between frontends are not supported for a fleet with roles: give \
                 --no-announcements",
            ));
        }
        if !(1..=MAX_WORKERS).contains(&self.sized_for) {
            return Err(SimulateError::Config("requests are generated for 1 to 100,000 workers"));
        }
        if self.warm_up >= self.requests {
            return Err(SimulateError::Config(
                "some requests must come after the warm-up; simulate more",
            ));
        }
        match arrivals {
            Arrivals::Poisson(number) | Arrivals::Traced(number)
                if !(number.is_finite() && number > 0.0) =>
            {
                Err(SimulateError::Config(
                    "the rate of requests and the speed of a trace must be more than 0",
                ))
            }
            Arrivals::Closed(0) => {
                Err(SimulateError::Config("at least one request per worker must be in flight"))
            }
            Arrivals::Traced(_) if matches!(self.source, Source::Generated(..)) => {
                Err(SimulateError::Config("generated requests have no arrival times; give a rate"))
            }
            _ => Ok(()),
        }
    }
}
