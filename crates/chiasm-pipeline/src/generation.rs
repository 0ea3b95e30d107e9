//! A prepared request on a worker: pick it, give its backend the job, and follow the answer.
//! Another worker is tried when one dies, as long as the client has not been sent a token.

mod attempts;
mod encode;
mod job;
mod moving;
mod prefill;

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use chiasm_backend::{Death, Output, Prefill, RunningJob, Stage};
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
use self::job::job;
use self::moving::WaitsFor;
use self::prefill::{Prefilled, prefill};
use super::choice::Choice;
use super::deadlines::{Deadlines, begun_within};
use super::error::RequestError;
use super::pick::pick;
use super::prepare::Prepared;
use super::tried::Attempts;
use crate::Pipeline;

/// A running answer: all continuations of one prompt on one worker. Dropping it aborts what still
/// runs.
pub struct Generation {
    pipeline: Arc<Pipeline>,
    running: Box<dyn RunningJob>,
    choices: Vec<Choice>,
    /// Continuations whose last delta has not come.
    unfinished: usize,
    reservation: Reservation,
    trial: Trial,
    attempted: RouteOutcome,
    /// Media items whose embeddings the worker was told to find.
    embedded: Vec<MmHash>,
    /// The first delta, which was awaited before the client was told anything.
    ahead: Option<ChoiceDelta>,
    arrived: Instant,
    /// When a worker was picked.
    started: Instant,
    /// Ends when the worker hangs; `None` once the client was told a token, as the answer can't
    /// move any more.
    hung: Option<BoxFuture<'static, ()>>,
    deadlines: Deadlines,
    /// Ends at the deadline that is next.
    alarm: Option<Pin<Box<Sleep>>>,
    /// Who is woken then: who looked at the alarm last.
    waits: Option<Waker>,
    /// An output has come since somebody looked at the alarm.
    had_output: bool,
    /// The backend has told how it computed the prompt.
    knows_prefill: bool,
    /// Last: the engine has let go of the job before it may forget the adapter.
    _adapter: Option<Arc<ServedAdapter>>,
}

impl Generation {
    /// Starts the answer and waits for its first output, trying other workers if one dies before
    /// that.
    ///
    /// # Errors
    /// [`RequestError`] when no worker can take the request, or the one that took it could not
    /// answer it.
    pub async fn start(
        pipeline: &Arc<Pipeline>,
        prepared: &Prepared,
    ) -> Result<Self, RequestError> {
        let mut attempts = Attempts::begin(pipeline, prepared)?;
        loop {
            match Self::begin(pipeline, prepared, &attempts).await {
                Ok(mut generation) => {
                    generation.hung = None;
                    return Ok(generation);
                }
                Err((failure, after)) => {
                    attempts = after;
                    attempts.again(pipeline, prepared, failure).await?;
                }
            }
        }
    }

    async fn first_delta(
        pipeline: &Arc<Pipeline>,
        prepared: &Prepared,
        attempts: &Attempts,
        waits_for: &WaitsFor,
    ) -> Result<Self, Failure> {
        let mut generation = Self::attempt(pipeline, prepared, attempts, waits_for).await?;
        generation.ahead =
            generation.next_delta().instrument(tracing::debug_span!("first_token")).await?;
        Ok(generation)
    }

    /// Where the request went.
    pub fn attempted(&self) -> RouteOutcome {
        self.attempted
    }

    /// The deltas of all continuations as they come, each marked with its continuation's index.
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
        Ok((choices, self.attempted))
    }

    async fn attempt(
        pipeline: &Arc<Pipeline>,
        prepared: &Prepared,
        before: &Attempts,
        waits_for: &WaitsFor,
    ) -> Result<Self, Failure> {
        let started = Instant::now();
        let (Route { answers: reservation, prefills, encodes, mut embedded }, explained) = {
            let _span = tracing::debug_span!("route").entered();
            pick(pipeline, prepared, &before.exclude)?
        };
        let picked = started.saturating_duration_since(prepared.arrived);
        let worker = reservation.worker;
        // Each worker that was picked may be half-open, and gets no other request until a trial
        // there ends. So trials begin before anything can fail, and before a stage is left out.
        let others = encodes.iter().map(|encodes| encodes.reservation.worker);
        let others = others.chain(prefills.iter().map(|prefills| prefills.worker));
        let others = others.filter_map(|other| pipeline.fleet.worker(other));
        let _other_trials: Vec<Trial> =
            others.map(|other| Trial::begin(&pipeline.fleet, other)).collect();
        // It left in this moment.
        let serving = pipeline.fleet.worker(worker).ok_or(Failure::NotTaken(worker))?;
        let mut trial = Trial::begin(&pipeline.fleet, serving.clone());
        let (now, encoded) =
            encode(pipeline, prepared, encodes).instrument(tracing::debug_span!("encode")).await?;
        embedded.extend(now);
        let prefilled = match prefills {
            None => None,
            Some(prefills) => {
                let span = tracing::debug_span!("prefill", worker = %prefills.worker);
                Some(
                    prefill(pipeline, prepared, prefills, &embedded, waits_for)
                        .instrument(span)
                        .await?,
                )
            }
        };
        let (stage, prefilled) = match prefilled {
            None => (Stage::Whole, None),
            Some(Prefilled { left, by }) => (left.map_or(Stage::Whole, Stage::Decode), Some(by)),
        };
        waits_for.set(&serving);
        let (plan, job) = job(pipeline, prepared, &serving, stage, embedded.clone())?;
        let mut attempted = RouteOutcome {
            encoded,
            prefilled,
            overlap_blocks: prefilled.map_or(reservation.overlap_blocks, |by| by.overlap_blocks),
            total_blocks: plan.keys.len(),
            prompt_tokens: plan.tokens.len(),
            media_tokens: MediaTokens::count(&plan.job_items),
            asked: RequestedSampling::from_sampling(&prepared.sampling),
            took: prepared.took,
            prefill: prefilled.map(|by| by.prefill).unwrap_or_default(),
            picked,
            prefill_wait: prefilled.and_then(|by| Some(picked + by.hand_off + by.prefill.queued?)),
            moves: before.lost,
            explained,
            ..RouteOutcome::on(worker, plan.class)
        };
        tracing::debug!(
            worker = %attempted.worker,
            overlap_blocks = attempted.overlap_blocks,
            total_blocks = attempted.total_blocks,
            "routed"
        );
        pipeline.metrics.routed(&attempted);

        let handing_over = tracing::debug_span!("hand_off", %worker);
        let handed_over = Instant::now();
        let deadlines = prepared.deadlines;
        let starting = serving.backend.start(Arc::new(job)).instrument(handing_over);
        let running = begun_within(deadlines.first_token, &mut trial, starting).await?;
        let running = running.map_err(|error| Failure::of_job(worker, error))?;
        if let Some(observer) = &pipeline.observer {
            observer.sent(&plan.job_items);
        }
        attempted.hand_off = handed_over.elapsed();
        let reading = prepared.reading.as_ref();
        let stops =
            StopStrings::new(prepared.sampling.stop.clone(), prepared.sampling.include_stop);
        let choice = |index| {
            Choice::new(
                index,
                &pipeline.model,
                &plan.tokens,
                &prepared.sampling,
                stops.clone(),
                reading,
            )
        };
        let mut generation = Self {
            pipeline: pipeline.clone(),
            running,
            unfinished: prepared.sampling.n as usize,
            choices: (0..prepared.sampling.n as usize).map(choice).collect(),
            reservation,
            trial,
            attempted,
            embedded,
            ahead: None,
            arrived: prepared.arrived,
            started,
            hung: Some(serving.hung().boxed()),
            deadlines,
            alarm: deadlines.first_token.map(|deadline| Box::pin(sleep_until(deadline.at))),
            waits: None,
            had_output: false,
            // What the worker that answers finds is what it was sent.
            knows_prefill: prefilled.is_some(),
            _adapter: prepared.adapter.clone(),
        };
        generation.saw_delivered();
        Ok(generation)
    }

    /// Waits for [`poll_delta`](Self::poll_delta).
    async fn next_delta(&mut self) -> Result<Option<ChoiceDelta>, Failure> {
        poll_fn(|context| self.poll_delta(context)).await
    }

    /// The next delta; `None` when all continuations have ended.
    fn poll_delta(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<ChoiceDelta>, Failure>> {
        if let Some(delta) = self.ahead.take() {
            return Poll::Ready(Ok(Some(delta)));
        }
        loop {
            let output = match ready!(self.poll_output(context)) {
                // The answer is whole, and its client has been told so: one stream has one end.
                Err(_) if self.unfinished == 0 => None,
                output => output?,
            };
            let Some(output) = output else { return Poll::Ready(Ok(None)) };
            if let Some(delta) = self.delta_of(output)? {
                return Poll::Ready(Ok(Some(delta)));
            }
        }
    }

    /// Returns the delta of an output. `None` for an output after the continuation's end, which a
    /// backend may have sent before it could be stopped.
    fn delta_of(&mut self, output: Output) -> Result<Option<ChoiceDelta>, Failure> {
        let late = match self.attempted.first_token {
            None => {
                self.saw_first(&output);
                None
            }
            // Some backends tell of the prompt behind the answer.
            Some(_) => output.prefill.filter(|_| !self.knows_prefill),
        };
        if let Some(prefill) = late {
            self.saw_prefill(prefill);
            self.pipeline.metrics.found_later(&self.attempted);
        }
        let (index, has_ended) = (output.choice, output.finish.is_some());
        let Some(choice) = self.choices.get_mut(index) else {
            let error = RequestError::internal(
                "the engine answered with a continuation that was not asked for",
            );
            return Err(error.into());
        };
        if choice.has_ended() {
            return Ok(late.map(|prefill| ChoiceDelta {
                index,
                prefill: Some(prefill),
                ..ChoiceDelta::default()
            }));
        }
        let mut delta = choice.push(output);
        delta.prefill = late;
        if let Some(gap) = choice.gap(&delta) {
            self.pipeline.metrics.between_tokens(gap, delta.tokens.len());
        }
        if let Some(finish) = &delta.finish {
            self.unfinished = self.unfinished.saturating_sub(1);
            self.pipeline.metrics.finished(finish);
            if !has_ended {
                self.running.stop(index);
            }
        }
        Ok(Some(delta))
    }

    fn poll_output(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Output>, Failure>> {
        let worker = self.attempted.worker;
        // What has come counts, however late it is.
        if let Poll::Ready(output) = self.running.poll_next(context) {
            self.had_output = true;
            return Poll::Ready(output.transpose().map_err(|error| {
                self.trial.failed(&error);
                Failure::of_job(worker, error)
            }));
        }
        if let Some(hung) = &mut self.hung
            && hung.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Err(Failure::Lost(worker, Death::new("it hangs"))));
        }
        let Some(alarm) = &mut self.alarm else { return Poll::Pending };
        // Setting the alarm again after each output would cost more than all the rest here; one
        // that is still to come wakes this task.
        let is_set = self.waits.as_ref().is_some_and(|waits| waits.will_wake(context.waker()));
        if std::mem::take(&mut self.had_output) && is_set && Instant::now() < alarm.deadline() {
            return Poll::Pending;
        }
        if !is_set {
            self.waits = Some(context.waker().clone());
        }
        ready!(alarm.as_mut().poll(context));
        let Deadlines { first_token, end } = self.deadlines;
        let passed = if self.attempted.first_token.is_none() { first_token } else { end };
        let error = passed
            .map_or_else(|| RequestError::internal("a deadline passed"), |passed| passed.passed());
        Poll::Ready(Err(error.into()))
    }

    /// Takes note of how the items travelled, as far as the backend has told.
    fn saw_delivered(&mut self) {
        let delivered = self.running.delivered();
        if delivered.unfound > self.attempted.delivered.unfound {
            self.pipeline.fleet.router().forget_embeddings(self.attempted.worker, &self.embedded);
        }
        self.attempted.delivered = delivered;
    }

    /// Takes note of a first output. The first of several continuations tells what was cached
    /// before this request.
    fn saw_first(&mut self, output: &Output) {
        let after = self.arrived.elapsed();
        // An item that the engine turned out to lack was sent again by now.
        self.saw_delivered();
        self.attempted.hand_off += self.running.hand_off();
        self.attempted.first_token = Some(after);
        self.trial.succeeded();
        match (&mut self.alarm, self.deadlines.end) {
            (Some(alarm), Some(end)) => {
                alarm.as_mut().reset(end.at);
                self.waits = None;
            }
            (alarm, _) => *alarm = None,
        }
        match (output.prefill, self.attempted.prefilled) {
            (Some(prefill), None) => self.saw_prefill(prefill),
            (Some(prefill), Some(by)) => self.saw_what_it_was_given(prefill, by.worker),
            (None, _) => {}
        }
        self.reservation.first_token();
        self.pipeline.metrics.first_token(&self.attempted, self.started.elapsed());
    }

    /// Takes note of how much of its prompt the worker that answers has got from the one that has
    /// computed it.
    fn saw_what_it_was_given(&self, prefill: Prefill, from: WorkerId) {
        let had = prefill.cached_tokens + self.reservation.block_size.get();
        if had < self.attempted.prompt_tokens {
            let worker = self.attempted.worker;
            let tokens = self.attempted.prompt_tokens - prefill.cached_tokens;
            tracing::warn!(%worker, %from, tokens, "a prompt was computed again: it could not be had from where it was computed");
            self.pipeline.metrics.recomputed();
        }
    }

    /// Takes note of how the prompt was computed.
    fn saw_prefill(&mut self, prefill: Prefill) {
        self.knows_prefill = true;
        self.attempted.prefill = prefill;
        let begun = self.started + self.attempted.hand_off;
        self.attempted.prefill_wait =
            prefill.queued.map(|queued| begun.duration_since(self.arrived) + queued);
        let (predicted, prompt) = (self.attempted.overlap_blocks, self.attempted.prompt_tokens);
        self.pipeline.metrics.prompt_found(
            &self.reservation,
            predicted,
            prompt,
            prefill.cached_tokens,
        );
    }
}

/// The deltas of an answer. Ends after an error. Dropping it aborts what still runs.
pub struct Deltas {
    /// In a box: a stream is moved some times before it is read.
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

/// Runs a prompt to its end. Nothing is sent to the client before that, so a worker may die at any
/// time.
///
/// # Errors
/// Those of [`Generation::start`].
pub async fn collect(
    pipeline: &Arc<Pipeline>,
    prepared: &Prepared,
) -> Result<(Vec<FinishedChoice>, RouteOutcome), RequestError> {
    let mut attempts = Attempts::begin(pipeline, prepared)?;
    loop {
        match collect_once(pipeline, prepared, &attempts).await {
            Ok(done) => return Ok(done),
            Err((failure, after)) => {
                attempts = after;
                attempts.again(pipeline, prepared, failure).await?;
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
