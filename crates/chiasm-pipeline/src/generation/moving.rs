//! Requests that wait for the first token of a suspect worker while other workers could begin at
//! once.
//!
//! The worker may be in a long step and answer yet, so a request stays there until it has begun
//! elsewhere. The oldest request moves first. No more requests move at once than other workers have
//! free seats, and each move is charged to the retry budget: engines in long steps do not double
//! the work of the fleet.

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
use crate::displaced::{Displaced, Moving, Seats};
use crate::prepare::Prepared;
use crate::tried::Attempts;

/// The pause between two looks of a request for a free seat elsewhere.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

impl Generation {
    /// Attempts the request until its first output. If its worker becomes suspect before that, it
    /// is begun elsewhere, too: whichever begins first goes on, and the other is aborted.
    ///
    /// # Errors
    /// The last failure, and the attempts before that one.
    pub(super) async fn begin(
        pipeline: &Arc<Pipeline>,
        prepared: &Prepared,
        attempts: &Attempts,
    ) -> Result<Self, (Failure, Attempts)> {
        let alone = |failure| (failure, attempts.clone());
        let waits_for = WaitsFor::default();
        let mut first = pin!(Self::first_delta(pipeline, prepared, attempts, &waits_for));
        let turn = pin!(pipeline.displaced.turn(pipeline, prepared.arrived, &waits_for, attempts));
        let (worker, moving) = match select(first.as_mut(), turn).await {
            Either::Left((begun, _)) => return begun.map_err(alone),
            Either::Right((turn, _)) => turn,
        };
        let Some(moved) = attempts.moved_from(pipeline, worker) else {
            // It stays where it is: the seat is another request's.
            drop(moving);
            return first.await.map_err(alone);
        };
        let begun = match select(first, Self::begin_elsewhere(pipeline, prepared, moved)).await {
            Either::Left((Ok(begun), _)) | Either::Right((Ok(begun), _)) => Ok(begun),
            Either::Left((Err(failure), second)) => {
                second.await.map_err(|(last, after)| (last, after.after_failure(&failure)))
            }
            Either::Right((Err((last, after)), first)) => {
                first.await.map_err(|failure| (last, after.after_failure(&failure)))
            }
        };
        drop(moving);
        begun
    }

    /// Does what [`begin`](Self::begin) does, in a box: the two call each other.
    fn begin_elsewhere<'a>(
        pipeline: &'a Arc<Pipeline>,
        prepared: &'a Prepared,
        attempts: Attempts,
    ) -> BoxFuture<'a, Result<Self, (Failure, Attempts)>> {
        async move { Self::begin(pipeline, prepared, &attempts).await }.boxed()
    }
}

/// The worker that an attempt waits for.
#[derive(Debug, Default)]
pub(super) struct WaitsFor(Mutex<Option<Arc<Worker>>>);

impl WaitsFor {
    /// Sets the worker that the attempt waits for from now on.
    pub(super) fn set(&self, worker: &Arc<Worker>) {
        *self.worker() = Some(worker.clone());
    }

    /// Returns the worker once it is suspect. The attempt, which sets it, has to be polled before.
    fn suspected(&self) -> impl Future<Output = Arc<Worker>> + Send {
        let mut followed: Option<(Arc<Worker>, BoxFuture<'static, ()>)> = None;
        poll_fn(move |context| {
            let now = self.worker();
            let is_followed = followed.as_ref().map(|(worker, _)| Arc::as_ptr(worker))
                == now.as_ref().map(Arc::as_ptr);
            if !is_followed {
                followed = now.as_ref().map(|worker| (worker.clone(), worker.suspected().boxed()));
            }
            drop(now);
            match &mut followed {
                Some((worker, suspected)) => suspected.poll_unpin(context).map(|()| worker.clone()),
                None => std::task::Poll::Pending,
            }
        })
    }

    fn is(&self, worker: &Arc<Worker>) -> bool {
        self.worker().as_ref().is_some_and(|now| Arc::ptr_eq(now, worker))
    }

    fn worker(&self) -> MutexGuard<'_, Option<Arc<Worker>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Displaced {
    /// Waits for a request's turn to begin elsewhere: its worker is suspect, and other workers have
    /// free seats for it and for all older requests. Returns the suspect worker.
    async fn turn(
        &self,
        pipeline: &Pipeline,
        arrived: Instant,
        waits_for: &WaitsFor,
        attempts: &Attempts,
    ) -> (WorkerId, Moving<'_>) {
        loop {
            let worker = waits_for.suspected().await;
            let ticket = self.join(arrived);
            while waits_for.is(&worker) && worker.condition() != Condition::Answers {
                let seats = Seats {
                    untried: free_seats(pipeline, &attempts.exclude),
                    total: free_seats(pipeline, &[]),
                };
                if let Some(moving) = ticket.turn(seats) {
                    return (worker.id, moving);
                }
                sleep(LOOK_INTERVAL).await;
            }
        }
    }
}

/// Returns the number of requests that workers can begin at once, without the workers in `exclude`.
fn free_seats(pipeline: &Pipeline, exclude: &[WorkerId]) -> usize {
    let seats = |worker: &Arc<Worker>| {
        let can = worker.backend.capabilities();
        let load = worker.load();
        let begins_at_once = can.input == InputForm::Tokens
            && can.role.answers()
            && worker.can_be_asked()
            && load.waiting == 0
            && !load.draining
            && !exclude.contains(&worker.id);
        match can.max_running {
            _ if !begins_at_once => 0,
            // It reports no limit, and nothing waits there.
            0 => 1,
            most => most.saturating_sub(usize::try_from(load.running).unwrap_or(usize::MAX)),
        }
    };
    pipeline.fleet.workers().iter().map(seats).sum()
}
