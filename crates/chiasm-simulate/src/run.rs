//! Runs of a scenario: one policy, several side by side, and as many requests as a fleet can serve.

use std::ops::RangeInclusive;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use chiasm_router::Policy;

use crate::error::SimulateError;
use crate::fleet::Fleet;
use crate::model::FrontendModel;
use crate::report::PolicyReport;
use crate::scenario::{Arrivals, Scenario, Source};

/// Requests that each worker has in flight when saturation is measured.
const SATURATING: usize = 128;
/// Requests per worker from which saturation is measured, at least and at most.
const SATURATION_SAMPLE: RangeInclusive<u64> = 512..=2000;

impl Scenario {
    /// Runs one policy to the end of the last request.
    ///
    /// # Errors
    /// The scenario makes no sense, its trace can't be read, or nothing in it fits the engines.
    pub fn run(&self, policy: Policy, arrivals: Arrivals) -> Result<PolicyReport, SimulateError> {
        self.check(arrivals)?;
        Fleet::new(self, policy, arrivals).run(self.requests()?)
    }

    /// Runs several policies on so many threads; the reports are in the order of the policies.
    ///
    /// # Errors
    /// As [`Scenario::run`].
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

    /// Requests per second that the fleet can serve under a policy: what ends while 128 requests
    /// per worker are in flight, after the warm-up. Measured with as many requests as the scenario
    /// has, but 512 to 2,000 per worker, and with one frontend, so that several are asked as much
    /// as one.
    ///
    /// # Errors
    /// As [`Scenario::run`].
    pub fn saturation(&self, policy: Policy) -> Result<f64, SimulateError> {
        let workers = self.workers.len() as u64;
        let (least, most) =
            (SATURATION_SAMPLE.start() * workers, SATURATION_SAMPLE.end() * workers);
        let requests = match self.source {
            Source::Generated(..) => self.requests.clamp(least, most),
            Source::Trace(_) => self.requests.min(most),
        };
        let warm_up = self.warm_up.max(SATURATING as u64 * workers).min(requests / 2);
        let frontend = FrontendModel { frontends: 1, ..self.frontend };
        let sample = Self { requests, warm_up, frontend, ..self.clone() };
        Ok(sample.run(policy, Arrivals::Closed(SATURATING))?.requests_per_second)
    }
}
