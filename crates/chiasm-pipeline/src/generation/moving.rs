//! Moves of requests that wait for the first token of a suspect worker, to workers with free
//! capacity.
//!
//! The worker may be in a long step and still answer, so a request stays there until it has begun
//! elsewhere. The oldest request moves first. No more requests move at once than other workers can
//! begin, and each move is charged to the retry budget. Engines in long steps therefore do not
//! double the work of the fleet.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chiasm_backend::InputForm;
use chiasm_fleet::{Condition, Worker};
use chiasm_types::WorkerId;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Either, select};
use tokio::time::{Instant, sleep};

use super::Generation;
use super::attempts::Failure;
use crate::Pipeline;
use crate::displaced::{Displaced, FreeCapacity, MoveGuard};
use crate::past_attempts::Attempts;
use crate::prepare::Prepared;

/// The interval between two checks for free capacity elsewhere.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

impl Generation {
    /// Attempts the request until its first output. If its worker becomes suspect before that,
    /// also begins the request on another worker. The first attempt with output continues, and the
    /// other is aborted.
    ///
    /// # Errors
    /// Returns the last failure, and the attempts before it.
    pub(super) async fn begin(
        pipeline: &Arc<Pipeline>,
        prepared: &Prepared,
        attempts: &Attempts,
    ) -> Result<Self, (Failure, Attempts)> {
        let with_attempts = |failure| (failure, attempts.clone());
        let current_worker = CurrentWorker::default();
        let mut first = pin!(Self::first_delta(pipeline, prepared, attempts, &current_worker));
        let displaced = &pipeline.displaced;
        let may_move =
            pin!(displaced.wait_to_move(pipeline, prepared.arrived, &current_worker, attempts));
        let (worker, guard) = match select(first.as_mut(), may_move).await {
            Either::Left((generation, _)) => return generation.map_err(with_attempts),
            Either::Right((may_move, _)) => may_move,
        };
        let Some(moved) = attempts.move_from(pipeline, worker) else {
            // The request stays, and leaves the capacity to another request.
            drop(guard);
            return first.await.map_err(with_attempts);
        };
        let begun = match select(first, Self::begin_elsewhere(pipeline, prepared, moved)).await {
            Either::Left((Ok(generation), _)) | Either::Right((Ok(generation), _)) => {
                Ok(generation)
            }
            Either::Left((Err(failure), second)) => {
                second.await.map_err(|(last, after)| (last, after.after_failure(&failure)))
            }
            Either::Right((Err((last, after)), first)) => {
                first.await.map_err(|failure| (last, after.after_failure(&failure)))
            }
        };
        drop(guard);
        begun
    }

    /// Calls [`begin`](Self::begin) in a box, because the two are mutually recursive.
    fn begin_elsewhere<'a>(
        pipeline: &'a Arc<Pipeline>,
        prepared: &'a Prepared,
        attempts: Attempts,
    ) -> BoxFuture<'a, Result<Self, (Failure, Attempts)>> {
        async move { Self::begin(pipeline, prepared, &attempts).await }.boxed()
    }
}

/// The worker that an attempt currently waits for.
#[derive(Debug, Default)]
pub(super) struct CurrentWorker(Mutex<Option<Arc<Worker>>>);

impl CurrentWorker {
    /// Sets the worker that the attempt waits for.
    pub(super) fn set(&self, worker: &Arc<Worker>) {
        *self.worker() = Some(worker.clone());
    }

    /// Waits until the current worker is suspect, and returns it. The attempt, which sets the
    /// worker, must be polled first.
    fn wait_suspect(&self) -> impl Future<Output = Arc<Worker>> + Send {
        let mut watched: Option<(Arc<Worker>, BoxFuture<'static, ()>)> = None;
        poll_fn(move |context| {
            let current = self.worker();
            let is_watched = watched.as_ref().map(|(worker, _)| Arc::as_ptr(worker))
                == current.as_ref().map(Arc::as_ptr);
            if !is_watched {
                let watch = |worker: &Arc<Worker>| (worker.clone(), worker.wait_suspect().boxed());
                watched = current.as_ref().map(watch);
            }
            drop(current);
            match &mut watched {
                Some((worker, suspect)) => suspect.poll_unpin(context).map(|()| worker.clone()),
                None => std::task::Poll::Pending,
            }
        })
    }

    fn is(&self, worker: &Arc<Worker>) -> bool {
        self.worker().as_ref().is_some_and(|current| Arc::ptr_eq(current, worker))
    }

    fn worker(&self) -> MutexGuard<'_, Option<Arc<Worker>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Displaced {
    /// Waits until a request may begin elsewhere: its worker is suspect, and other workers have
    /// free capacity for it and for all older requests. Returns the suspect worker.
    async fn wait_to_move(
        &self,
        pipeline: &Pipeline,
        arrived: Instant,
        current_worker: &CurrentWorker,
        attempts: &Attempts,
    ) -> (WorkerId, MoveGuard<'_>) {
        loop {
            let worker = current_worker.wait_suspect().await;
            let ticket = self.join(arrived);
            while current_worker.is(&worker) && worker.condition() != Condition::Answers {
                let capacity = FreeCapacity {
                    untried: free_capacity(pipeline, &attempts.exclude),
                    total: free_capacity(pipeline, &[]),
                };
                if let Some(guard) = ticket.try_move(capacity) {
                    return (worker.id, guard);
                }
                sleep(CHECK_INTERVAL).await;
            }
        }
    }
}

/// Returns the number of requests that workers can begin at once, without the workers in `exclude`.
fn free_capacity(pipeline: &Pipeline, exclude: &[WorkerId]) -> usize {
    let free = |worker: &Arc<Worker>| {
        let capabilities = worker.backend.capabilities();
        let load = worker.load();
        let begins_at_once = capabilities.input == InputForm::Tokens
            && capabilities.role.can_answer()
            && worker.is_available()
            && load.waiting == 0
            && !load.draining
            && !exclude.contains(&worker.id);
        match capabilities.max_running {
            _ if !begins_at_once => 0,
            // The worker reports no limit, and no request waits there.
            0 => 1,
            limit => limit.saturating_sub(usize::try_from(load.running).unwrap_or(usize::MAX)),
        }
    };
    pipeline.fleet.workers().iter().map(free).sum()
}
