//! Deadlines of requests.

use std::future::Future;
use std::time::Duration;

use chiasm_backend::JobError;
use chiasm_fleet::Trial;
use tokio::time::{Instant, timeout_at};

use super::error::{Cause, RequestError};
use super::limits::PipelineLimits;

/// The deadlines of a request, which start with its arrival.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// The deadline for the first token.
    pub first_token: Option<Deadline>,
    /// The deadline for the last token.
    pub end: Option<Deadline>,
}

/// A deadline, with the limit that the error names when it passes.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    /// The time of the deadline.
    pub at: Instant,
    limit: Duration,
    flag: &'static str,
}

impl Deadlines {
    /// Returns the deadlines of a request that arrived at `arrived`.
    pub fn new(arrived: Instant, limits: &PipelineLimits) -> Self {
        let deadline = |limit: Option<Duration>, flag| {
            let limit = limit?;
            Some(Deadline { at: arrived.checked_add(limit)?, limit, flag })
        };
        let end = deadline(limits.request_timeout, "--request-timeout");
        let first_token = deadline(limits.first_token_timeout, "--first-token-timeout");
        // The first token is also due before the last.
        let first_token = first_token.into_iter().chain(end).min_by_key(|deadline| deadline.at);
        Self { first_token, end }
    }
}

impl Deadline {
    /// Returns the error of a request that misses this deadline.
    pub fn to_error(&self) -> RequestError {
        Cause::TimedOut { after: self.limit, flag: self.flag }.into()
    }

    /// Returns `true` if at least half of the limit was left at `then`.
    pub fn has_half_left(&self, then: Instant) -> bool {
        self.at.saturating_duration_since(then) * 2 >= self.limit
    }
}

/// Awaits a future until the deadline, if there is one.
///
/// # Errors
/// Returns [`Cause::TimedOut`] if the deadline passes. The future is dropped then.
pub async fn within<T>(
    deadline: Option<Deadline>,
    future: impl Future<Output = T>,
) -> Result<T, RequestError> {
    match deadline {
        Some(deadline) => timeout_at(deadline.at, future).await.map_err(|_| deadline.to_error()),
        None => Ok(future.await),
    }
}

/// Awaits `start`, which completes when a worker accepts a job or begins its answer, and records
/// its failure in the trial.
///
/// # Errors
/// Returns [`Cause::TimedOut`] if the deadline passes. `start` is dropped then.
pub(crate) async fn start_within<T>(
    deadline: Option<Deadline>,
    trial: &mut Trial,
    start: impl Future<Output = Result<T, JobError>>,
) -> Result<Result<T, JobError>, RequestError> {
    let sent_at = Instant::now();
    let started = within(deadline, start).await;
    match &started {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => trial.failed(error),
        // A request that was sent with little time left does not count against the worker.
        Err(_) if deadline.is_some_and(|deadline| deadline.has_half_left(sent_at)) => {
            trial.timed_out()
        }
        Err(_) => {}
    }
    started
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_limit_is_left_until_the_middle() {
        let arrived = Instant::now();
        let limits = PipelineLimits {
            first_token_timeout: Some(Duration::from_secs(10)),
            ..PipelineLimits::default()
        };
        let deadline = Deadlines::new(arrived, &limits).first_token.unwrap();
        let has_half_left =
            |seconds| deadline.has_half_left(arrived + Duration::from_secs(seconds));
        assert_eq!([0, 5, 6, 11].map(has_half_left), [true, true, false, false]);
    }
}
