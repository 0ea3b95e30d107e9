//! Runs a prepared request on a worker: picks the worker, starts the job on its backend, and
//! follows the answer. If a worker dies, another one is tried until the client has been sent a
//! token.

mod attempts;
mod encode;
mod job;
mod moving;
mod prefill;

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use chiasm_backend::{DeathReason, Output, Prefill, RunningJob, Stage};
use chiasm_fleet::Trial;
use chiasm_fleet::adapters::ServedAdapter;
use chiasm_prompt::StopStrings;
use chiasm_request::{ChoiceDelta, FinishedChoice};
pub(crate) use chiasm_request::{MediaTokens, RequestedSampling, RouteOutcome};
use chiasm_router::{Reservation, Route};
use chiasm_types::{MmHash, WorkerId};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use futures_util::stream::Stream;
use tokio::time::{Instant, Sleep, sleep_until};
use tracing::Instrument;

use self::attempts::Failure;
use self::encode::encode;
use self::job::build_job;
use self::moving::CurrentWorker;
use self::prefill::{Prefilled, prefill};
use super::choice::Choice;
use super::deadlines::{Deadlines, start_within};
use super::error::RequestError;
use super::past_attempts::Attempts;
use super::pick::pick;
use super::prepare::Prepared;
use crate::Pipeline;

/// A running answer: all continuations of one prompt on one worker. Dropping it aborts the running
/// continuations.
pub struct Generation {
    pipeline: Arc<Pipeline>,
    running: Box<dyn RunningJob>,
    choices: Vec<Choice>,
    /// The number of continuations whose last delta has not come yet.
    unfinished: usize,
    reservation: Reservation,
    trial: Trial,
    route: RouteOutcome,
    /// The media items whose embeddings the worker was expected to find.
    embedded: Vec<MmHash>,
    /// The first delta, which was awaited before anything was sent to the client.
    first_delta: Option<ChoiceDelta>,
    arrived: Instant,
    /// The time at which a worker was picked.
    started: Instant,
    /// Completes when the worker hangs. `None` once the client was sent a token, because the answer
    /// can't move then.
    hung: Option<BoxFuture<'static, ()>>,
    deadlines: Deadlines,
    /// The timer for the next deadline.
    timer: Option<Pin<Box<Sleep>>>,
    /// The waker that the timer wakes, set at the timer's last poll.
    timer_waker: Option<Waker>,
    /// `true` if an output has come since the timer was last checked.
    had_output: bool,
    /// `true` if the backend has reported its statistics of the prefill.
    knows_prefill: bool,
    /// Dropped last: the job must end before the engine may unload the adapter.
    _adapter: Option<Arc<ServedAdapter>>,
}

impl Generation {
    /// Starts the answer and waits for its first output. Tries other workers if one dies before
    /// that, and plans the request again if a media item differs from its plan.
    ///
    /// # Errors
    /// Returns an error if no worker can accept the request, or if the last attempt failed.
    pub async fn start(
        pipeline: &Arc<Pipeline>,
        prepared: &mut Prepared,
    ) -> Result<Self, RequestError> {
        let mut attempts = Attempts::start(pipeline, prepared)?;
        loop {
            match Self::begin(pipeline, prepared, &attempts).await {
                Ok(mut generation) => {
                    generation.hung = None;
                    return Ok(generation);
                }
                Err((failure, attempts_before)) => {
                    attempts = attempts_before;
                    attempts.prepare_next(pipeline, prepared, failure).await?;
                }
            }
        }
    }

    async fn first_delta(
        pipeline: &Arc<Pipeline>,
        prepared: &Prepared,
        attempts: &Attempts,
        current_worker: &CurrentWorker,
    ) -> Result<Self, Failure> {
        let mut generation = Self::attempt(pipeline, prepared, attempts, current_worker).await?;
        generation.first_delta =
            generation.next_delta().instrument(tracing::debug_span!("first_token")).await?;
        Ok(generation)
    }

    /// Returns the route of the request, as far as it is known.
    pub fn route(&self) -> RouteOutcome {
        self.route
    }

    /// Converts the answer to a stream of the deltas of all continuations, each with the index of
    /// its continuation.
    pub fn into_deltas(self) -> Deltas {
        Deltas { generation: Some(Box::new(self)) }
    }

    /// Waits for the whole answer.
    async fn finish(mut self) -> Result<(Vec<FinishedChoice>, RouteOutcome), Failure> {
        let mut partial: Vec<ChoiceDelta> =
            self.choices.iter().map(|_| ChoiceDelta::default()).collect();
        while let Some(delta) = self.next_delta().await? {
            partial[delta.index].append(delta);
        }
        let choices = partial.into_iter().map(ChoiceDelta::into_finished).collect::<Option<_>>();
        let choices =
            choices.ok_or_else(|| RequestError::internal("the engine ended without a reason"))?;
        Ok((choices, self.route))
    }

    async fn attempt(
        pipeline: &Arc<Pipeline>,
        prepared: &Prepared,
        attempts: &Attempts,
        current_worker: &CurrentWorker,
    ) -> Result<Self, Failure> {
        let started = Instant::now();
        let (picked, explanation_id) = {
            let _span = tracing::debug_span!("route").entered();
            pick(pipeline, prepared, &attempts.exclude)?
        };
        let Route {
            answer: reservation,
            prefill: prefill_reservation,
            encode_stages,
            mut embedded,
        } = picked;
        let picked_after = started.saturating_duration_since(prepared.arrived);
        let id = reservation.worker;
        // A half-open worker gets no other request until a trial ends. Trials at all picked workers
        // therefore begin before anything can fail, and before a stage is skipped.
        let others = encode_stages.iter().map(|stage| stage.reservation.worker);
        let others = others.chain(prefill_reservation.iter().map(|stage| stage.worker));
        let others = others.filter_map(|other| pipeline.fleet.worker(other));
        let _other_trials: Vec<Trial> =
            others.map(|other| Trial::begin(&pipeline.fleet, other)).collect();
        // The worker may have left just now.
        let worker = pipeline.fleet.worker(id).ok_or(Failure::NotTaken(id))?;
        let mut trial = Trial::begin(&pipeline.fleet, worker.clone());
        let encoding = encode(pipeline, prepared, encode_stages);
        let (newly_embedded, encoded) = encoding.instrument(tracing::debug_span!("encode")).await?;
        embedded.extend(newly_embedded);
        let prefilled = match prefill_reservation {
            None => None,
            Some(reservation) => {
                let span = tracing::debug_span!("prefill", worker = %reservation.worker);
                let prefill = prefill(pipeline, prepared, reservation, &embedded, current_worker);
                Some(prefill.instrument(span).await?)
            }
        };
        let (stage, prefilled) = match prefilled {
            None => (Stage::Whole, None),
            Some(Prefilled { kv_transfer, outcome }) => {
                (kv_transfer.map_or(Stage::Whole, Stage::Decode), Some(outcome))
            }
        };
        current_worker.set(&worker);
        let (plan, job) = build_job(pipeline, prepared, &worker, stage, embedded.clone())?;
        let mut route = RouteOutcome {
            encoded,
            prefilled,
            overlap_blocks: prefilled
                .map_or(reservation.overlap_blocks, |prefill| prefill.overlap_blocks),
            total_blocks: plan.keys.len(),
            prompt_tokens: plan.tokens.len(),
            media_tokens: MediaTokens::count(&plan.job_items),
            sampling: RequestedSampling::from_sampling(&prepared.sampling),
            stage_times: prepared.stage_times,
            prefill: prefilled.map(|prefill| prefill.prefill).unwrap_or_default(),
            picked_after,
            prefill_wait: prefilled.and_then(|prefill| {
                Some(picked_after + prefill.hand_off + prefill.prefill.queued?)
            }),
            moves: attempts.lost,
            explanation_id,
            ..RouteOutcome::new(id, plan.class)
        };
        tracing::debug!(
            worker = %id,
            overlap_blocks = route.overlap_blocks,
            total_blocks = route.total_blocks,
            "routed"
        );
        pipeline.metrics.count_routed(&route);
        prepared.last_route.set(route);

        let span = tracing::debug_span!("hand_off", worker = %id);
        let sent_at = Instant::now();
        let deadlines = prepared.deadlines;
        let start = worker.backend.start(Arc::new(job)).instrument(span);
        let running = start_within(deadlines.first_token, &mut trial, start).await?;
        let running = running.map_err(|error| Failure::from_job_error(id, error))?;
        if let Some(observer) = &pipeline.observer {
            observer.record_sent(&plan.job_items);
        }
        route.hand_off = sent_at.elapsed();
        prepared.last_route.set(route);
        let output_parsing = prepared.output_parsing.as_ref();
        let stops =
            StopStrings::new(prepared.sampling.stop.clone(), prepared.sampling.include_stop);
        let choice = |index| {
            Choice::new(
                index,
                &pipeline.model,
                &plan.tokens,
                &prepared.sampling,
                stops.clone(),
                output_parsing,
            )
        };
        let mut generation = Self {
            pipeline: pipeline.clone(),
            running,
            unfinished: prepared.sampling.n as usize,
            choices: (0..prepared.sampling.n as usize).map(choice).collect(),
            reservation,
            trial,
            route,
            embedded,
            first_delta: None,
            arrived: prepared.arrived,
            started,
            hung: Some(worker.wait_hung().boxed()),
            deadlines,
            timer: deadlines.first_token.map(|deadline| Box::pin(sleep_until(deadline.at))),
            timer_waker: None,
            had_output: false,
            // The cached tokens of the answering worker are those that the other worker sent.
            knows_prefill: prefilled.is_some(),
            _adapter: prepared.adapter.clone(),
        };
        generation.update_delivered();
        Ok(generation)
    }

    /// Waits for the next delta; see [`poll_delta`](Self::poll_delta).
    async fn next_delta(&mut self) -> Result<Option<ChoiceDelta>, Failure> {
        poll_fn(|context| self.poll_delta(context)).await
    }

    /// Polls for the next delta. Returns `None` once all continuations have ended.
    fn poll_delta(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<ChoiceDelta>, Failure>> {
        if let Some(delta) = self.first_delta.take() {
            return Poll::Ready(Ok(Some(delta)));
        }
        loop {
            let output = match ready!(self.poll_output(context)) {
                // The client has been sent the end of every continuation: an error is too late.
                Err(_) if self.unfinished == 0 => None,
                output => output?,
            };
            let Some(output) = output else { return Poll::Ready(Ok(None)) };
            if let Some(delta) = self.process_output(output)? {
                return Poll::Ready(Ok(Some(delta)));
            }
        }
    }

    /// Converts an output to a delta. Returns `None` for an output after the continuation's end,
    /// which a backend may have sent before it could be stopped.
    fn process_output(&mut self, output: Output) -> Result<Option<ChoiceDelta>, Failure> {
        let late_prefill = match self.route.first_token {
            None => {
                self.record_first_output(&output);
                None
            }
            // Some backends report the prefill after the answer.
            Some(_) => output.prefill.filter(|_| !self.knows_prefill),
        };
        if let Some(prefill) = late_prefill {
            self.record_prefill(prefill);
            self.pipeline.metrics.count_late_prefill(&self.route);
        }
        let index = output.choice;
        let has_ended = output.finish.is_some();
        let Some(choice) = self.choices.get_mut(index) else {
            let error = RequestError::internal(
                "the engine answered with a continuation that was not requested",
            );
            return Err(error.into());
        };
        if choice.has_ended() {
            return Ok(late_prefill.map(|prefill| ChoiceDelta {
                index,
                prefill: Some(prefill),
                ..ChoiceDelta::default()
            }));
        }
        let mut delta = choice.push(output);
        delta.prefill = late_prefill;
        if let Some(gap) = choice.gap(&delta) {
            self.pipeline.metrics.observe_gap(gap, delta.tokens.len());
        }
        if let Some(finish) = &delta.finish {
            self.unfinished = self.unfinished.saturating_sub(1);
            self.pipeline.metrics.count_finished(finish);
            if !has_ended {
                self.running.stop(index);
            }
        }
        Ok(Some(delta))
    }

    fn poll_output(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Output>, Failure>> {
        let worker = self.route.worker;
        // An output that has arrived counts, even after the deadline.
        if let Poll::Ready(output) = self.running.poll_next(context) {
            self.had_output = true;
            return Poll::Ready(output.transpose().map_err(|error| {
                self.trial.failed(&error);
                Failure::from_job_error(worker, error)
            }));
        }
        if let Some(hung) = &mut self.hung
            && hung.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Err(Failure::Lost(worker, DeathReason::new("the worker hangs"))));
        }
        let Some(timer) = &mut self.timer else { return Poll::Pending };
        // Polling the timer after each output would cost more than everything else here. A timer
        // that is registered already will wake this task.
        let is_registered =
            self.timer_waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker()));
        let had_output = std::mem::take(&mut self.had_output);
        if had_output && is_registered && Instant::now() < timer.deadline() {
            return Poll::Pending;
        }
        if !is_registered {
            self.timer_waker = Some(context.waker().clone());
        }
        ready!(timer.as_mut().poll(context));
        let Deadlines { first_token, end } = self.deadlines;
        let passed = if self.route.first_token.is_none() { first_token } else { end };
        let error = passed.map_or_else(
            || RequestError::internal("a deadline passed"),
            |deadline| deadline.to_error(),
        );
        Poll::Ready(Err(error.into()))
    }

    /// Updates the counts of delivered items that the backend has reported so far.
    fn update_delivered(&mut self) {
        let delivered = self.running.delivered();
        if delivered.unfound > self.route.delivered.unfound {
            self.pipeline.fleet.router().forget_embeddings(self.route.worker, &self.embedded);
        }
        self.route.delivered = delivered;
    }

    /// Records the first output. With several continuations, the first one reports what was cached
    /// before this request.
    fn record_first_output(&mut self, output: &Output) {
        let after = self.arrived.elapsed();
        // By now, items that the engine turned out to lack have been sent again.
        self.update_delivered();
        self.route.hand_off += self.running.hand_off();
        self.route.first_token = Some(after);
        self.trial.succeeded();
        match (&mut self.timer, self.deadlines.end) {
            (Some(timer), Some(end)) => {
                timer.as_mut().reset(end.at);
                self.timer_waker = None;
            }
            (timer, _) => *timer = None,
        }
        match (output.prefill, self.route.prefilled) {
            (Some(prefill), None) => self.record_prefill(prefill),
            (Some(prefill), Some(by)) => self.check_transferred(prefill, by.worker),
            (None, _) => {}
        }
        self.reservation.first_token();
        self.pipeline.metrics.count_first_token(&self.route, self.started.elapsed());
    }

    /// Checks that the answering worker got its prompt from the worker that computed it.
    fn check_transferred(&self, prefill: Prefill, from: WorkerId) {
        let cached_tokens = prefill.cached_tokens + self.reservation.block_size.get();
        if cached_tokens < self.route.prompt_tokens {
            let worker = self.route.worker;
            let tokens = self.route.prompt_tokens - prefill.cached_tokens;
            tracing::warn!(
                %worker, %from, tokens,
                "the prompt was computed again: \
                 the transfer from the prefill worker failed"
            );
            self.pipeline.metrics.count_recomputed();
        }
    }

    /// Records the engine's statistics of the prefill.
    fn record_prefill(&mut self, prefill: Prefill) {
        self.knows_prefill = true;
        self.route.prefill = prefill;
        let handed_over = self.started + self.route.hand_off;
        self.route.prefill_wait =
            prefill.queued.map(|queued| handed_over.duration_since(self.arrived) + queued);
        self.pipeline.metrics.count_prompt_overlap_error(
            &self.reservation,
            self.route.overlap_blocks,
            self.route.prompt_tokens,
            prefill.cached_tokens,
        );
    }
}

/// A stream of the deltas of an answer. It ends after an error. Dropping it aborts the running
/// continuations.
pub struct Deltas {
    /// Boxed because a stream is moved several times before it is read.
    generation: Option<Box<Generation>>,
}

impl Stream for Deltas {
    type Item = Result<ChoiceDelta, RequestError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(generation) = &mut self.generation else { return Poll::Ready(None) };
        let delta = ready!(generation.poll_delta(context)).map_err(RequestError::from).transpose();
        if !matches!(delta, Some(Ok(_))) {
            self.generation = None;
        }
        Poll::Ready(delta)
    }
}

/// Runs a prompt to its end. Nothing is sent to the client before the end, so the request may move
/// at any time.
///
/// # Errors
/// Returns the errors of [`Generation::start`].
pub async fn collect(
    pipeline: &Arc<Pipeline>,
    prepared: &mut Prepared,
) -> Result<(Vec<FinishedChoice>, RouteOutcome), RequestError> {
    let mut attempts = Attempts::start(pipeline, prepared)?;
    loop {
        match collect_once(pipeline, prepared, &attempts).await {
            Ok(answer) => return Ok(answer),
            Err((failure, attempts_before)) => {
                attempts = attempts_before;
                attempts.prepare_next(pipeline, prepared, failure).await?;
            }
        }
    }
}

async fn collect_once(
    pipeline: &Arc<Pipeline>,
    prepared: &Prepared,
    attempts: &Attempts,
) -> Result<(Vec<FinishedChoice>, RouteOutcome), (Failure, Attempts)> {
    let generation = Generation::begin(pipeline, prepared, attempts).await?;
    generation.finish().await.map_err(|failure| (failure, attempts.clone()))
}

#[cfg(test)]
mod tests;
