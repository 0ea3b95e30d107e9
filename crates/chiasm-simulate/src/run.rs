//! Runs of a scenario: one policy, several in parallel, and the measurement of saturation.

use std::ops::RangeInclusive;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use chiasm_router::Policy;

use crate::error::SimulateError;
use crate::fleet::Fleet;
use crate::model::FrontendModel;
use crate::report::PolicyReport;
use crate::scenario::{Arrivals, Scenario, Source};

/// The number of requests in flight per worker while saturation is measured.
const SATURATING_REQUESTS: usize = 128;
/// The range of the number of requests per worker from which saturation is measured.
const SATURATION_SAMPLE: RangeInclusive<u64> = 512..=2000;

impl Scenario {
    /// Runs one policy to the end of the last request.
    ///
    /// # Errors
    /// If the scenario is invalid, its trace can't be read, or no request fits the engines.
    pub fn run(&self, policy: Policy, arrivals: Arrivals) -> Result<PolicyReport, SimulateError> {
        self.check(arrivals)?;
        Fleet::new(self, policy, arrivals).run(self.requests()?)
    }

    /// Runs several policies on `threads` threads. Returns the reports in the order of the
    /// policies.
    ///
    /// # Errors
    /// The errors of [`Scenario::run`].
    pub fn run_all(
        &self,
        policies: &[Policy],
        arrivals: Arrivals,
        threads: usize,
    ) -> Result<Vec<PolicyReport>, SimulateError> {
        let next = AtomicUsize::new(0);
        let done = Mutex::new(Vec::with_capacity(policies.len()));
        std::thread::scope(|scope| {
            for _ in 0..threads.clamp(1, policies.len().max(1)) {
                scope.spawn(|| {
                    while let Some((at, policy)) =
                        policies.iter().enumerate().nth(next.fetch_add(1, Ordering::Relaxed))
                    {
                        let report = self.run(*policy, arrivals);
                        done.lock()
                            .unwrap_or_else(|poisoned| poisoned.into_inner())
                            .push((at, report));
                    }
                });
            }
        });
        let mut done = done.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        done.sort_by_key(|(at, _)| *at);
        done.into_iter().map(|(_, report)| report).collect()
    }

    /// Measures the requests per second that the fleet can serve under a policy: those that end
    /// while 128 requests per worker are in flight, after the warm-up.
    ///
    /// The measurement has as many requests as the scenario, but 512 to 2,000 per worker, and one
    /// frontend, so that fleets with several frontends get the same rate.
    ///
    /// # Errors
    /// The errors of [`Scenario::run`].
    pub fn saturation(&self, policy: Policy) -> Result<f64, SimulateError> {
        let workers = self.workers.len() as u64;
        let min = SATURATION_SAMPLE.start() * workers;
        let max = SATURATION_SAMPLE.end() * workers;
        let requests = match self.source {
            Source::Generated(..) => self.requests.clamp(min, max),
            Source::Trace(_) => self.requests.min(max),
        };
        let warm_up = self.warm_up.max(SATURATING_REQUESTS as u64 * workers).min(requests / 2);
        let frontend = FrontendModel { frontends: 1, ..self.frontend };
        let sample = Self { requests, warm_up, frontend, ..self.clone() };
        Ok(sample.run(policy, Arrivals::Closed(SATURATING_REQUESTS))?.requests_per_second)
    }
}
