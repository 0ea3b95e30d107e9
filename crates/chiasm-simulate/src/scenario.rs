//! What is simulated.

use std::path::PathBuf;

use chiasm_router::RouterConfig;
use chiasm_types::Role;

use crate::error::SimulateError;
use crate::model::{EngineModel, FrontendModel};
use crate::workload::{Generator, Request, Trace, TraceSummary, Workload, WorkloadSize};

/// Most workers; more would be a wrong number rather than a fleet.
const MOST_WORKERS: usize = 100_000;

/// Where requests come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// Requests of a workload are generated.
    Generated(Workload, WorkloadSize),
    /// Requests are read from a file in Mooncake's format: JSON lines with `timestamp` (ms),
    /// `input_length`, `output_length` and `hash_ids` of 512-token blocks.
    Trace(PathBuf),
}

/// When requests arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// Requests arrive independently of each other, so many per second on average.
    Poisson(f64),
    /// Requests arrive when the trace says, so many times as fast.
    Traced(f64),
    /// A request arrives as soon as fewer than this number per worker are in flight.
    Closed(usize),
}

/// A fleet, what is asked of it, and the routers before it.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// The role of each engine, of 1 to 100,000. Where some have one, each request goes to where
    /// the router says, whose prompt may be computed elsewhere than its answer.
    pub workers: Vec<Role>,
    /// The number of workers that generated requests have images and conversations for: those of
    /// `workers`, unless fleets of several sizes are to be asked the same.
    pub sized_for: usize,
    /// Requests; fewer when a trace has fewer.
    pub requests: u64,
    /// Number of requests that come first and don't count, while caches fill.
    pub warm_up: u64,
    /// The source of the requests.
    pub source: Source,
    /// Seed of the requests, their arrivals, the frontends they come to, and the routers' choices.
    pub seed: u64,
    /// The engines, which are all alike but for their roles.
    pub engine: EngineModel,
    /// The frontends before them.
    pub frontend: FrontendModel,
    /// The routers' weights and limits; policy and seed are replaced.
    pub router: RouterConfig,
}

impl Source {
    /// Reads a trace to its end, which finds its mistakes; `None` for generated requests.
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
    pub(crate) fn requests(
        &self,
    ) -> Result<Box<dyn Iterator<Item = Result<Request, SimulateError>>>, SimulateError> {
        let most = usize::try_from(self.requests).unwrap_or(usize::MAX);
        Ok(match &self.source {
            Source::Generated(workload, size) => Box::new(
                Generator::new(*workload, size, self.sized_for, self.seed).map(Ok).take(most),
            ),
            Source::Trace(path) => Box::new(Trace::open(path)?.take(most)),
        })
    }

    /// Whether some engines compute some stages of requests alone.
    pub fn has_roles(&self) -> bool {
        self.workers.iter().any(|role| *role != Role::Aggregated)
    }

    /// Whether some engines encode images for the others.
    pub fn has_encoders(&self) -> bool {
        self.workers.contains(&Role::Encode)
    }

    pub(crate) fn check(&self, arrivals: Arrivals) -> Result<(), SimulateError> {
        self.engine.check()?;
        self.frontend.check()?;
        if !(1..=MOST_WORKERS).contains(&self.workers.len()) {
            return Err(SimulateError::Config("a fleet has 1 to 100,000 workers"));
        }
        if !self.workers.iter().any(|role| role.answers()) {
            return Err(SimulateError::Config("engines that encode answer nothing; add others"));
        }
        if self.has_roles() && self.frontend.frontends > 1 && self.frontend.announce_delay.is_some()
        {
            return Err(SimulateError::Config(
                "frontends before a fleet with roles can't be told of each other's requests; leave announcements out",
            ));
        }
        if !(1..=MOST_WORKERS).contains(&self.sized_for) {
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
            Arrivals::Traced(_) if matches!(self.source, Source::Generated(..)) => Err(
                SimulateError::Config("generated requests have no times of their own; give a rate"),
            ),
            _ => Ok(()),
        }
    }
}
