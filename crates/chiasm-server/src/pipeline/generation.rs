//! A prepared prompt on a worker: pick it, hand over the pixels, and follow the answer. Another worker is tried when
//! one dies, as long as the client has not been sent a token.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use chiasm_engine::wire::{EngineCoreOutput, EngineCoreRequest, FinishReason, MmFeature};
use chiasm_engine::{DeathCause, Delivered, EngineError, OutputStream};
use chiasm_router::{Reservation, RouteItem, RouteRequest};
use chiasm_types::WorkerId;
use futures_util::future::select_all;
use futures_util::stream::{Stream, unfold};

use super::choice::{Choice, ChoiceDelta, FinishedChoice};
use super::pixels::Tensors;
use super::prepare::{MediaItem, Prepared};
use super::sampling::engine_params;
use crate::error::ApiError;
use crate::fleet::Worker;
use crate::frontend::Frontend;

/// Workers that are tried for one request before it fails.
const MAX_ATTEMPTS: usize = 3;
/// Times that one request is sent again because an engine lacked media items. More would mean a fault of ours.
const MAX_MISSES: usize = 2;

/// Where a request went and what it found there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempted {
    /// The worker.
    pub worker: WorkerId,
    /// Leading blocks of the prompt that the worker held when it was picked.
    pub overlap_blocks: usize,
    /// Full blocks of the prompt.
    pub total_blocks: usize,
    /// How the pixels travelled.
    pub transfer: Transfer,
    /// Prompt tokens that the engine found in its cache, by its own count; known with the first output.
    pub cached_tokens: usize,
}

/// How the tensors of a request's media items reach the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// There are none.
    None,
    /// Not at all: the engine's receiver cache holds every item.
    Cached,
    /// In shared memory, for one item at least, and none as frames.
    Shm,
    /// As frames of the request's message, for one item at least.
    Inline,
}

impl Transfer {
    /// The name in headers, metrics and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cached => "cached",
            Self::Shm => "shm",
            Self::Inline => "inline",
        }
    }
}

/// A running answer: all continuations of one prompt on one worker. Dropping it aborts what still runs.
pub struct Generation {
    frontend: Arc<Frontend>,
    worker: Arc<Worker>,
    /// Names of the request's media items.
    items: Vec<String>,
    running: Vec<Running>,
    reservation: Reservation,
    attempted: Attempted,
    prompt_tokens: usize,
    /// The first delta, which was awaited before the client was told anything.
    ahead: Option<ChoiceDelta>,
    started: Instant,
    has_output: bool,
}

struct Running {
    choice: Choice,
    /// `None` once the continuation has ended.
    stream: Option<OutputStream>,
    /// How the media items travelled.
    delivered: Delivered,
}

/// Why an attempt ended early.
enum Failure {
    /// The worker is gone; another one may do.
    Died(WorkerId, EngineError),
    /// The engine does not hold media items that it was believed to hold. They are forgotten: the next attempt sends
    /// their data.
    Missed(usize),
    /// The engine failed a request that had tensors in shared memory. They may have been the reason: the next attempt sends
    /// them in the message.
    Unread,
    /// The engine has to be sent the data of these media items too. Nothing was sent.
    NeedsData(Vec<String>),
    /// The request itself can't be served.
    Refused(ApiError),
}

/// What has been tried for a request.
#[derive(Default)]
struct Attempts {
    dead: Vec<WorkerId>,
    misses: usize,
    /// An engine may not be able to read slots.
    unread: bool,
}

impl Attempts {
    /// After a failed attempt: whether there is to be another one, else the error to tell.
    fn again(&mut self, frontend: &Frontend, failure: Failure) -> Result<(), ApiError> {
        match failure {
            Failure::Died(worker, error) if self.dead.len() + 1 < MAX_ATTEMPTS => {
                tracing::warn!(%worker, %error, "engine died before the client was sent a token, trying another");
                frontend.metrics.retries.inc();
                self.dead.push(worker);
                Ok(())
            }
            Failure::Missed(items) if self.misses < MAX_MISSES => {
                tracing::warn!(items, "engine lacks media items that it was believed to hold, sending them again");
                frontend.metrics.mm_cache_misses.inc_by(items as u64);
                self.misses += 1;
                Ok(())
            }
            Failure::Unread if !self.unread => {
                self.unread = true;
                Ok(())
            }
            Failure::Refused(error) if !self.dead.is_empty() && error.code == "unavailable" => {
                Err(ApiError::unavailable("the engine failed and no other can take the request"))
            }
            failure => Err(failure.into()),
        }
    }
}

impl Generation {
    /// Starts the answer and waits for its first output, trying other workers if one dies before that.
    pub async fn start(frontend: &Arc<Frontend>, prepared: &Prepared) -> Result<Self, ApiError> {
        let mut attempts = Attempts::default();
        loop {
            match Self::first_delta(frontend, prepared, &attempts).await {
                Ok(generation) => return Ok(generation),
                Err(failure) => attempts.again(frontend, failure)?,
            }
        }
    }

    async fn first_delta(frontend: &Arc<Frontend>, prepared: &Prepared, attempts: &Attempts) -> Result<Self, Failure> {
        let mut generation = Self::attempt(frontend, prepared, attempts).await?;
        generation.ahead = generation.next_delta().await?;
        Ok(generation)
    }

    /// Where the request went.
    pub fn attempted(&self) -> Attempted {
        self.attempted
    }

    /// The deltas of all continuations as they come, each marked with its continuation's index.
    pub fn into_deltas(self) -> impl Stream<Item = Result<ChoiceDelta, ApiError>> + Send {
        unfold(Some(self), |generation| async {
            let mut generation = generation?;
            match generation.next_delta().await {
                Ok(Some(delta)) => Some((Ok(delta), Some(generation))),
                Ok(None) => None,
                Err(failure) => Some((Err(failure.into()), None)),
            }
        })
    }

    async fn attempt(frontend: &Arc<Frontend>, prepared: &Prepared, before: &Attempts) -> Result<Self, Failure> {
        let started = Instant::now();
        let media: Vec<RouteItem> = prepared.items.iter().map(|item| item.to_route(&frontend.model)).collect();
        let route = RouteRequest {
            keys: &prepared.keys,
            prompt_tokens: prepared.tokens.len(),
            media: &media,
            session: prepared.session,
            exclude: &before.dead,
        };
        let router = frontend.fleet.router();
        let reservation = router.select(&route).map_err(|error| frontend.not_routed(error))?;
        let worker = frontend
            .fleet
            .worker(reservation.worker)
            .ok_or_else(|| Failure::Died(reservation.worker, EngineError::Dead { cause: DeathCause::Closed }))?;
        let mut attempted = Attempted {
            worker: reservation.worker,
            overlap_blocks: reservation.overlap_blocks,
            total_blocks: prepared.keys.len(),
            transfer: Transfer::None,
            cached_tokens: 0,
        };
        tracing::info!(
            "[ROUTING] best: {} with {}/{} blocks overlap",
            attempted.worker,
            attempted.overlap_blocks,
            attempted.total_blocks
        );
        frontend.metrics.routed(&attempted);

        let mut tensors = Tensors::new(frontend, &prepared.items, &worker, before.unread);
        tensors.make(|item| !worker.client.holds(&item.name())).await?;
        let running = loop {
            match submit(frontend, prepared, &worker, &tensors.features()) {
                // What the engine held a moment ago has just been evicted.
                Err(Failure::NeedsData(names)) => tensors.make(|item| names.contains(&item.name())).await?,
                submitted => break submitted?,
            }
        };
        if !prepared.items.is_empty() {
            let any = |how: fn(&Delivered) -> usize| running.iter().any(|running| how(&running.delivered) > 0);
            attempted.transfer = match (any(|items| items.inline), any(|items| items.shm)) {
                (true, _) => Transfer::Inline,
                (false, true) => Transfer::Shm,
                (false, false) => Transfer::Cached,
            };
            running.iter().for_each(|running| frontend.metrics.delivered(running.delivered));
        }
        Ok(Self {
            frontend: frontend.clone(),
            items: prepared.items.iter().map(MediaItem::name).collect(),
            worker,
            running,
            reservation,
            attempted,
            prompt_tokens: prepared.tokens.len(),
            ahead: None,
            started,
            has_output: false,
        })
    }

    async fn next_delta(&mut self) -> Result<Option<ChoiceDelta>, Failure> {
        if let Some(delta) = self.ahead.take() {
            return Ok(Some(delta));
        }
        let died = |error| Failure::Died(self.attempted.worker, error);
        let Some((index, output)) = next_output(&mut self.running).await else {
            return Ok(None);
        };
        let output = match output {
            // We let go of requests that we abort, so this one was ended by an engine that is shutting down.
            Some(Ok(output)) if output.finish_reason == Some(FinishReason::Abort) => {
                return Err(died(EngineError::Dead { cause: DeathCause::Exited("it is shutting down".to_owned()) }));
            }
            Some(Ok(output)) if output.finish_reason == Some(FinishReason::Error) => {
                return Err(self.failed(index, &output));
            }
            Some(Ok(output)) => output,
            Some(Err(error)) if error.is_dead() => return Err(died(error)),
            Some(Err(error)) => return Err(ApiError::from(error).into()),
            None => return Err(ApiError::from(EngineError::Ended).into()),
        };
        if !self.has_output {
            self.has_output = true;
            // Of several continuations the first tells what was cached before this request.
            self.attempted.cached_tokens =
                output.prefill_stats.as_ref().map_or(0, |stats| stats.num_cached_tokens as usize);
            if let Some(found) = output.prefill_stats.as_ref().map(|stats| stats.num_cached_tokens as usize) {
                let block_size = self.reservation.block_size.get();
                // The engine computes the last token of a prompt in any case.
                let most = (self.prompt_tokens - 1) / block_size;
                let predicted = self.attempted.overlap_blocks.min(most);
                self.frontend.metrics.overlap_found(predicted, found / block_size, self.reservation.knowledge);
            }
            self.reservation.first_token();
            self.frontend.metrics.first_token(self.started.elapsed());
        }
        let running = &mut self.running[index];
        let delta = running.choice.push(output)?;
        if delta.finish.is_some() {
            running.stream = None;
        }
        Ok(Some(delta))
    }

    /// After an engine's error: it is not believed to hold the request's media items any more. If it was sent less than
    /// all their tensors, that may have been the reason.
    fn failed(&self, index: usize, output: &EngineCoreOutput) -> Failure {
        let missed = &output.mm_cache_miss_hashes;
        let lacking = if missed.is_empty() { &self.items } else { missed };
        self.worker.client.forget_media(lacking.iter().map(String::as_str));
        let delivered = self.running[index].delivered;
        if delivered.cached > 0 {
            return Failure::Missed(lacking.len());
        }
        if delivered.shm > 0 {
            return Failure::Unread;
        }
        ApiError::internal("the engine could not process the request; its log says why").into()
    }
}

/// Runs a prompt to its end. Nothing is sent to the client before that, so a worker may die at any time.
pub async fn collect(
    frontend: &Arc<Frontend>,
    prepared: &Prepared,
) -> Result<(Vec<FinishedChoice>, Attempted), ApiError> {
    let mut attempts = Attempts::default();
    loop {
        match collect_once(frontend, prepared, &attempts).await {
            Ok(done) => return Ok(done),
            Err(failure) => attempts.again(frontend, failure)?,
        }
    }
}

async fn collect_once(
    frontend: &Arc<Frontend>,
    prepared: &Prepared,
    attempts: &Attempts,
) -> Result<(Vec<FinishedChoice>, Attempted), Failure> {
    let mut generation = Generation::attempt(frontend, prepared, attempts).await?;
    let mut partial: Vec<ChoiceDelta> = generation.running.iter().map(|_| ChoiceDelta::default()).collect();
    while let Some(delta) = generation.next_delta().await? {
        partial[delta.index].append(delta);
    }
    let choices = partial.into_iter().map(ChoiceDelta::into_finished).collect::<Result<_, _>>()?;
    Ok((choices, generation.attempted))
}

/// Sends one engine request per continuation.
fn submit(
    frontend: &Frontend,
    prepared: &Prepared,
    worker: &Worker,
    features: &[MmFeature],
) -> Result<Vec<Running>, Failure> {
    let id = rand::random::<u128>();
    let arrival_time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    (0..prepared.sampling.n)
        .map(|index| {
            let params =
                engine_params(&frontend.model, &prepared.sampling, prepared.tokens.len(), worker.max_model_len, index)?;
            let request = EngineCoreRequest {
                request_id: format!("{id:032x}-{index}"),
                prompt_token_ids: prepared.tokens.clone(),
                mm_features: features.to_vec(),
                sampling_params: params,
                arrival_time,
                cache_salt: prepared.cache_salt.clone(),
                priority: prepared.priority,
                ..EngineCoreRequest::default()
            };
            let stream = worker.client.submit(request).map_err(|error| match error {
                EngineError::NeedsData { keys } => Failure::NeedsData(keys),
                error if error.is_dead() => Failure::Died(worker.id, error),
                error => Failure::Refused(error.into()),
            })?;
            let choice = Choice::new(index as usize, &frontend.model.tokenizer, &prepared.tokens, &prepared.sampling);
            Ok(Running { choice, delivered: stream.delivered(), stream: Some(stream) })
        })
        .collect()
}

/// The next output of any continuation that still runs, and its index; `None` when all have ended.
async fn next_output(running: &mut [Running]) -> Option<(usize, Option<Result<EngineCoreOutput, EngineError>>)> {
    let mut live: Vec<_> =
        running.iter_mut().enumerate().filter_map(|(index, running)| Some((index, running.stream.as_mut()?))).collect();
    match live.as_mut_slice() {
        [] => None,
        [(index, stream)] => Some((*index, stream.next().await)),
        _ => {
            let nexts = live.into_iter().map(|(index, stream)| Box::pin(async move { (index, stream.next().await) }));
            Some(select_all(nexts).await.0)
        }
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self::Refused(error)
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Died(_, error) => error.into(),
            Failure::Missed(_) => Self::internal("the engine keeps losing the request's images"),
            Failure::Unread => Self::internal("the engine could not process the request; its log says why"),
            Failure::NeedsData(keys) => EngineError::NeedsData { keys }.into(),
            Failure::Refused(error) => error,
        }
    }
}
