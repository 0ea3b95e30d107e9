//! How long a request may take.

use std::future::Future;
use std::time::Duration;

use chiasm_backend::JobError;
use chiasm_fleet::Trial;
use tokio::time::{Instant, timeout_at};

use super::error::{Cause, RequestError};
use super::limits::PipelineLimits;

/// When a request is given up, counted from its arrival.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// Until its first token.
    pub first_token: Option<Deadline>,
    /// Until its last.
    pub end: Option<Deadline>,
}

/// A point in time, and what to say when it has come.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    /// The point in time.
    pub at: Instant,
    after: Duration,
    flag: &'static str,
}

impl Deadlines {
    /// The deadlines of a request that arrived then.
    pub fn of(arrived: Instant, limits: &PipelineLimits) -> Self {
        let deadline = |after: Option<Duration>, flag| {
            let after = after?;
            Some(Deadline { at: arrived.checked_add(after)?, after, flag })
        };
        let end = deadline(limits.request_timeout, "--request-timeout");
        let first_token = deadline(limits.first_token_timeout, "--first-token-timeout");
        // Whichever comes first.
        let first_token = first_token.into_iter().chain(end).min_by_key(|deadline| deadline.at);
        Self { first_token, end }
    }
}

impl Deadline {
    /// What is told when it has passed.
    pub fn passed(&self) -> RequestError {
        Cause::TimedOut { after: self.after, flag: self.flag }.into()
    }

    /// Returns `true` if at `then` at least half of the time until the deadline was left.
    pub fn has_half_left(&self, then: Instant) -> bool {
        self.at.saturating_duration_since(then) * 2 >= self.after
    }
}

/// Waits, but not for longer than to the deadline if there is one.
///
/// # Errors
/// [`Cause::TimedOut`] when the deadline passes; what was waited for is dropped then.
pub async fn within<T>(
    deadline: Option<Deadline>,
    what: impl Future<Output = T>,
) -> Result<T, RequestError> {
    match deadline {
        Some(deadline) => timeout_at(deadline.at, what).await.map_err(|_| deadline.passed()),
        None => Ok(what.await),
    }
}

/// Waits until a job of a trial is taken or the head of its answer comes, and records a failure of
/// that with the trial.
///
/// # Errors
/// [`Cause::TimedOut`] when the deadline passes; `begins` is dropped then.
pub(crate) async fn begun_within<T>(
    deadline: Option<Deadline>,
    trial: &mut Trial,
    begins: impl Future<Output = Result<T, JobError>>,
) -> Result<Result<T, JobError>, RequestError> {
    let given = Instant::now();
    let begun = within(deadline, begins).await;
    match &begun {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => trial.failed(error),
        // A request that came with little of its time left says nothing about the worker.
        Err(_) if deadline.is_some_and(|deadline| deadline.has_half_left(given)) => {
            trial.timed_out()
        }
        Err(_) => {}
    }
    begun
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_is_left_until_the_middle() {
        let arrived = Instant::now();
        let limits = PipelineLimits {
            first_token_timeout: Some(Duration::from_secs(10)),
            ..PipelineLimits::default()
        };
        let deadline = Deadlines::of(arrived, &limits).first_token.unwrap();
        let has_half_left =
            |seconds| deadline.has_half_left(arrived + Duration::from_secs(seconds));
        assert_eq!([0, 5, 6, 11].map(has_half_left), [true, true, false, false]);
    }
}
