//! A running job: one request per continuation, which is sent again if the engine lacks media
//! items.

use std::sync::Arc;
use std::task::{Context, Poll};

use chiasm_backend::unread::{UnreadBudget, UnreadShare};
use chiasm_backend::{
    Content, DeathReason, Finish, Job, JobError, KvTransferParams, MediaDelivery, Output, Prefill,
    PromptLogprobs, RunningJob, Stage, StoredEmbeddings, TokenLogprob,
};
use chiasm_types::TokenId;
use futures_util::future::{BoxFuture, FutureExt, ready};

use super::media::{ItemFilter, Tensors};
use super::request::{self, RequestParts};
use super::{Engine, adapters, stage};
use crate::client::{ItemDelivery, OutputStream};
use crate::error::EngineError;
use crate::launch::LoggedFailure;
use crate::wire::coordinator::STALE_WAVE;
use crate::wire::output::Payload;
use crate::wire::{
    EngineCoreOutput, ExtraArgs, FinishReason, Logprobs, LoraRequest, RequestError, SamplingParams,
    StopReason,
};

/// The maximum number of times that one continuation is sent again because the engine lacked media
/// items. More misses would be a bug.
const MAX_MISSES: usize = 2;

/// A job and its requests.
pub(super) struct RunningEngineJob {
    /// The first field, so that running requests are aborted before the job releases its adapter.
    continuations: Vec<Continuation>,
    sender: RequestSender,
    /// The continuation to poll first, so that none starves the others.
    next: usize,
    /// The number of media items whose stored embeddings are missing.
    unfound: usize,
    /// The result of a prefill job for the decode stage.
    kv_transfer_params: Option<KvTransferParams>,
    /// The result of an encode job.
    embeddings: Vec<StoredEmbeddings>,
}

struct Continuation {
    state: State,
    /// The delivery of the media items, when the request was last sent.
    delivered: MediaDelivery,
    has_output: bool,
    misses: usize,
    /// `true` if tensors are sent in the message, because the engine may not be able to read slots.
    without_slots: bool,
}

impl Continuation {
    /// Returns the id of the running request, which outputs do not have; empty if none runs.
    fn request_id(&self) -> String {
        match &self.state {
            State::Running(stream) => stream.request_id().to_owned(),
            State::Resending(_) | State::Explaining(_) | State::Ended => String::new(),
        }
    }
}

enum State {
    Running(OutputStream),
    /// The request is being sent again.
    Resending(BoxFuture<'static, Result<OutputStream, JobError>>),
    /// The request has failed, and the reason is being determined.
    Explaining(BoxFuture<'static, JobError>),
    Ended,
}

impl RunningEngineJob {
    /// Sends one request per continuation, with the media items that the engine does not hold.
    ///
    /// # Errors
    /// The job is not valid, a media source fails, or the engine is dead.
    pub(super) async fn start(
        engine: Arc<Engine>,
        job: Arc<Job>,
        prompt: Arc<Vec<TokenId>>,
    ) -> Result<Self, JobError> {
        let lora = job.adapter.as_deref().map(adapters::to_lora_request).map(Arc::new);
        let extra_args = stage::extra_args(&job.stage, engine.private_network)?;
        let unfound = count_missing_embeddings(&engine, &job);
        let unread = UnreadBudget::global().new_share();
        let sender = RequestSender { engine, job, prompt, lora, extra_args, unread };
        let streams = sender.send(0..sender.job.sampling.n, false).await?;
        let continuations = streams.into_iter().map(|stream| Continuation {
            delivered: media_delivery(&stream),
            state: State::Running(stream),
            has_output: false,
            misses: 0,
            without_slots: false,
        });
        Ok(Self {
            continuations: continuations.collect(),
            sender,
            next: 0,
            unfound,
            kv_transfer_params: None,
            embeddings: Vec::new(),
        })
    }

    /// Polls one continuation for its next output. Returns `Ready(None)` if it has ended.
    fn poll_continuation(
        &mut self,
        index: usize,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Output, JobError>>> {
        loop {
            let continuation = &mut self.continuations[index];
            let arrival = match &mut continuation.state {
                State::Ended => return Poll::Ready(None),
                State::Resending(sending) => match sending.poll_unpin(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Err(error)) => return Poll::Ready(Some(Err(error))),
                    Poll::Ready(Ok(stream)) => {
                        continuation.delivered = media_delivery(&stream);
                        continuation.state = State::Running(stream);
                        continue;
                    }
                },
                State::Explaining(reason) => {
                    let error = std::task::ready!(reason.poll_unpin(context));
                    continuation.state = State::Ended;
                    return Poll::Ready(Some(Err(error)));
                }
                State::Running(stream) => std::task::ready!(stream.poll_next(context)),
            };
            let output = match arrival {
                Some(Ok(Payload::Tokens(tokens))) => {
                    return Poll::Ready(Some(Ok(self.tokens_output(index, tokens))));
                }
                Some(Ok(Payload::Full(output))) => output,
                Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
                None => return Poll::Ready(Some(Err(JobError::Unfinished))),
            };
            match output.finish_reason {
                // Streams of requests that we abort are dropped, so the engine aborted this one
                // because it is shutting down.
                Some(FinishReason::Abort) => {
                    return Poll::Ready(Some(Err(JobError::Dead(DeathReason::new(
                        "it is shutting down",
                    )))));
                }
                Some(FinishReason::Error | FinishReason::Other(_)) => {
                    let request_id = continuation.request_id();
                    let result = match output.error.as_ref().and_then(to_job_error) {
                        Some(error) => Err(error),
                        None => self.send_again(index, &output),
                    };
                    if let Err(error) = result {
                        let reason = self.explain(error, output.error, request_id);
                        self.continuations[index].state = State::Explaining(reason);
                    }
                }
                _ => return Poll::Ready(Some(Ok(self.convert_output(index, *output)))),
            }
        }
    }

    /// Handles an engine's error: removes the job's media items from the mirror, and sends the
    /// continuation again if it was not sent with all its tensors in the message.
    ///
    /// # Errors
    /// Missing tensors can't be the cause, or the engine lacked items too often.
    fn send_again(&mut self, index: usize, output: &EngineCoreOutput) -> Result<(), JobError> {
        let Engine { client, observer, .. } = &*self.sender.engine;
        let names: Vec<String> = self.sender.job.media.iter().map(|item| item.name()).collect();
        let reported = &output.mm_cache_miss_hashes;
        let missing = if reported.is_empty() { &names } else { reported };
        client.forget_media(missing.iter().map(String::as_str));
        let continuation = &mut self.continuations[index];
        if continuation.has_output {
            return Err(JobError::Failed);
        }
        if continuation.delivered.cached > 0 {
            if continuation.misses == MAX_MISSES {
                return Err(JobError::KeepsLosingMedia);
            }
            continuation.misses += 1;
            tracing::warn!(
                items = missing.len(),
                "engine lacks media items that its mirror has, sending them again"
            );
            observer.missed(missing.len());
        } else if continuation.delivered.shared_memory > 0 && !continuation.without_slots {
            // The engine may have failed to read the slots, so all tensors go in the message.
            continuation.without_slots = true;
        } else {
            return Err(JobError::Failed);
        }
        let sender = self.sender.clone();
        let without_slots = continuation.without_slots;
        continuation.state = State::Resending(
            async move {
                let streams = sender.send(index..index + 1, without_slots).await?;
                streams.into_iter().next().ok_or(JobError::Unfinished)
            }
            .boxed(),
        );
        Ok(())
    }

    /// Adds the field of the constraint and the engine's reason to a failure. The reason is in the
    /// output since vLLM 0.33, and before that in the log of a launched engine. The job is refused
    /// only if the reason blames the constraint.
    fn explain(
        &self,
        error: JobError,
        reported: Option<RequestError>,
        request_id: String,
    ) -> BoxFuture<'static, JobError> {
        let Some(structured) = &self.sender.job.sampling.structured else {
            return ready(error).boxed();
        };
        let field = structured.field.to_owned();
        let engine = self.sender.engine.clone();
        let failed = |reason: &str, field: String| {
            let message = format!("the engine failed on an answer that is held to this: {reason}");
            JobError::ConstraintFailed { field, message }
        };
        async move {
            match error {
                JobError::Refused { message, .. } => {
                    JobError::Refused { field, message: message.trim_end().to_owned() }
                }
                JobError::Failed => {
                    if let Some(RequestError { code, message, .. }) = reported {
                        return failed(&format!("{} ({code})", message.trim_end()), field);
                    }
                    let logged = match &engine.log {
                        Some(log) => log.failure(&request_id).await,
                        None => None,
                    };
                    match logged {
                        Some(LoggedFailure { reason, blames_constraint: true }) => {
                            let message = format!("the engine can't compile this: {reason}");
                            JobError::Refused { field, message }
                        }
                        Some(LoggedFailure { reason, blames_constraint: false }) => {
                            failed(&reason, field)
                        }
                        None => failed("it gives no reason, its log may", field),
                    }
                }
                error => error,
            }
        }
        .boxed()
    }

    /// Converts an output that has tokens only.
    fn tokens_output(&mut self, index: usize, tokens: Vec<TokenId>) -> Output {
        self.continuations[index].has_output = true;
        let logprobs = self.sender.job.sampling.logprobs.map(|_| Vec::new());
        let content = Content::Tokens { tokens, logprobs };
        Output { choice: index, content, finish: None, prefill: None, prompt_logprobs: None }
    }

    /// Converts an output, and stores the results of a prefill or encode job.
    fn convert_output(&mut self, index: usize, output: EngineCoreOutput) -> Output {
        let continuation = &mut self.continuations[index];
        continuation.has_output = true;
        let finish = finish(&output);
        if finish.is_some() {
            continuation.state = State::Ended;
        }
        let queued = output.time_in_queue();
        let EngineCoreOutput {
            new_token_ids,
            new_logprobs,
            prompt_logprobs,
            kv_transfer_params,
            ec_transfer_params,
            prefill_stats,
            // Already read into `finish` and `queued`.
            finish_reason: _,
            stop_reason: _,
            events: _,
            // Only failures have these.
            mm_cache_miss_hashes: _,
            error: _,
            // Empty: the registry took it to find the stream.
            request_id: _,
            // Chiasm reports no such count.
            num_nans_in_logits: _,
        } = output;
        let Engine { private_network, embeddings: store, .. } = &*self.sender.engine;
        match self.sender.job.stage {
            Stage::Prefill => {
                if self.kv_transfer_params.is_none()
                    && let Some(params) = &kv_transfer_params
                {
                    self.kv_transfer_params = stage::kv_transfer_params(params, *private_network);
                }
            }
            Stage::Encode => {
                if let Some(params) = &ec_transfer_params {
                    let items = &self.sender.job.media;
                    let stored = stage::stored_embeddings(params, items, store.as_deref());
                    self.embeddings.extend(stored);
                }
            }
            Stage::Whole | Stage::Decode(_) => {}
        }
        let top = self.sender.job.sampling.logprobs;
        let logprobs = top.map(|top| {
            new_logprobs
                .as_ref()
                .map(|logprobs| top_logprobs(logprobs, top as usize))
                .unwrap_or_default()
        });
        let prefill = prefill_stats.as_ref().map(|stats| Prefill {
            cached_tokens: stats.num_cached_tokens as usize,
            created_tokens: Some(stats.num_cache_creation_tokens as usize),
            queued,
        });
        let prompt_logprobs =
            prompt_logprobs.map(|Logprobs { width, token_ids, logprobs, ranks }| PromptLogprobs {
                width,
                tokens: token_ids,
                logprobs,
                ranks,
            });
        let content = Content::Tokens { tokens: new_token_ids, logprobs };
        Output { choice: index, content, finish, prefill, prompt_logprobs }
    }
}

impl RunningJob for RunningEngineJob {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Output, JobError>>> {
        let count = self.continuations.len();
        let mut all_ended = true;
        for turn in 0..count {
            let index = (self.next + turn) % count;
            match self.poll_continuation(index, context) {
                Poll::Ready(Some(output)) => {
                    self.next = index + 1;
                    return Poll::Ready(Some(output));
                }
                Poll::Ready(None) => {}
                Poll::Pending => all_ended = false,
            }
        }
        if all_ended { Poll::Ready(None) } else { Poll::Pending }
    }

    fn stop(&mut self, choice: usize) {
        if let Some(continuation) = self.continuations.get_mut(choice) {
            continuation.state = State::Ended;
        }
    }

    fn delivered(&self) -> MediaDelivery {
        let mut all = MediaDelivery { unfound: self.unfound, ..MediaDelivery::default() };
        self.continuations.iter().for_each(|continuation| all += continuation.delivered);
        all
    }

    fn kv_transfer_params(&mut self) -> Option<KvTransferParams> {
        self.kv_transfer_params.take()
    }

    fn stored_embeddings(&mut self) -> Vec<StoredEmbeddings> {
        std::mem::take(&mut self.embeddings)
    }
}

/// Returns the number of items whose embeddings should be in the store and are not, so that the
/// engine encodes them itself. Returns 0 if the store has no folder.
fn count_missing_embeddings(engine: &Engine, job: &Job) -> usize {
    let Some(store) = engine.embeddings.as_deref().filter(|store| store.folder().is_some()) else {
        return 0;
    };
    let unfound =
        job.embedded.iter().filter(|item| store.item_bytes(&item.to_string()).is_none()).count();
    for _ in 0..unfound {
        engine.observer.stepped_down(
            "no_embeddings",
            &"the stored embeddings of an item are gone: it is encoded again",
        );
    }
    unfound
}

/// The sender of one job's requests.
#[derive(Clone)]
struct RequestSender {
    engine: Arc<Engine>,
    job: Arc<Job>,
    prompt: Arc<Vec<TokenId>>,
    lora: Option<Arc<LoraRequest>>,
    extra_args: Option<ExtraArgs>,
    /// The count of the job's unread bytes.
    unread: UnreadShare,
}

impl RequestSender {
    /// Sends these continuations. If one can't be sent, aborts the others.
    async fn send(
        &self,
        choices: std::ops::Range<usize>,
        without_slots: bool,
    ) -> Result<Vec<OutputStream>, JobError> {
        let Self { engine, job, .. } = self;
        let mut tensors = Tensors::default();
        tensors.fetch(engine, job, without_slots, &ItemFilter::NotHeld).await?;
        let streams = loop {
            let features = tensors.features(job);
            // Engines refuse an id in use, and outputs of an aborted request may still arrive. So
            // each attempt has a new id, which starts with the job's id.
            let id = format!("{}-{:08x}", job.id, rand::random::<u32>());
            let sent: Result<Vec<_>, _> = choices
                .clone()
                .map(|choice| {
                    let extra_args = self.extra_args.clone();
                    let parts = RequestParts {
                        request_id: format!("{id}-{choice}"),
                        prompt_token_ids: self.prompt.clone(),
                        mm_features: features.clone(),
                        lora_request: self.lora.clone(),
                        current_wave: if engine.is_in_group { STALE_WAVE } else { 0 },
                        sampling_params: SamplingParams {
                            extra_args,
                            ..SamplingParams::for_choice(&job.sampling, choice)
                        },
                    };
                    let request = request::from_job(job, parts);
                    engine.client.submit_shared(job.sampling.n, &self.unread, request)
                })
                .collect();
            match sent {
                // An item in the engine's cache has just been evicted, or the request could evict
                // it. Each round fetches at least one more item, which bounds the rounds.
                Err(EngineError::NeedsData { keys }) => {
                    let fetched_before = tensors.len();
                    let filter = ItemFilter::Named(keys.into());
                    tensors.fetch(engine, job, without_slots, &filter).await?;
                    if tensors.len() == fetched_before {
                        return Err(JobError::KeepsLosingMedia);
                    }
                }
                sent => break sent?,
            }
        };
        for stream in &streams {
            let delivery = stream.delivered();
            if delivery != ItemDelivery::default() {
                engine.observer.delivered(media_delivery(stream));
            }
            for _ in 0..delivery.no_lease {
                engine.observer.stepped_down("no_lease", &"all leases of the arena are in use");
            }
        }
        Ok(streams)
    }
}

fn media_delivery(stream: &OutputStream) -> MediaDelivery {
    // Tensors without a lease are reported separately, when they are sent.
    let ItemDelivery { cached, shm, inline, no_lease: _ } = stream.delivered();
    MediaDelivery { cached, shared_memory: shm, inline, unfound: 0 }
}

/// Converts an engine's error to a job's; `None`, logged, if it only means that the request failed.
fn to_job_error(error: &RequestError) -> Option<JobError> {
    let RequestError { code, message, retryable } = error;
    if *retryable {
        return Some(JobError::NotTaken(DeathReason::new(message)));
    }
    if code == RequestError::VALIDATION {
        return Some(JobError::Refused { field: "body".to_owned(), message: message.clone() });
    }
    tracing::warn!(code, message, "an engine failed a request");
    None
}

/// Returns the reason for which the engine finished the continuation; `None` if it has not, or has
/// failed it.
fn finish(output: &EngineCoreOutput) -> Option<Finish> {
    match output.finish_reason? {
        FinishReason::Stop => Some(match &output.stop_reason {
            Some(StopReason::Token(token)) => Finish::StopToken(*token),
            Some(StopReason::Text(text)) => Finish::StopString(text.clone()),
            None => Finish::Eos,
        }),
        FinishReason::Length => Some(Finish::Length),
        FinishReason::Repetition => Some(Finish::Repetition),
        FinishReason::Abort | FinishReason::Error | FinishReason::Other(_) => None,
    }
}

/// Returns the log probability of each new token, with the first `top` distinct candidates
/// including the token.
fn top_logprobs(logprobs: &Logprobs, top: usize) -> Vec<TokenLogprob> {
    logprobs
        .positions()
        .filter_map(|position| {
            let mut candidates: Vec<(TokenId, f32)> = Vec::with_capacity(position.token_ids.len());
            for (&token, &logprob) in position.token_ids.iter().zip(position.logprobs) {
                if !candidates.iter().any(|&(seen, _)| seen == token) {
                    candidates.push((token, logprob));
                }
            }
            let &(token, logprob) = candidates.first()?;
            candidates.truncate(top);
            Some(TokenLogprob { token, logprob, top: candidates })
        })
        .collect()
}
