//! One job on an engine: a request per continuation, and sending again what the engine turned out
//! to lack.

use std::sync::Arc;
use std::task::{Context, Poll};

use chiasm_backend::unread::{Unread, UnreadJob};
use chiasm_backend::{
    Content, Death, Delivered, Embeddings, Finish, Job, JobError, Left, Output, Prefill,
    PromptLogprobs, RunningJob, Stage, TokenLogprob,
};
use chiasm_types::TokenId;
use futures_util::future::{BoxFuture, FutureExt, ready};

use super::media::{Tensors, Wanted};
use super::request::{self, RequestParts};
use super::{Engine, adapters, stage};
use crate::client::OutputStream;
use crate::error::EngineError;
use crate::launch::Complaint;
use crate::wire::output::Brought;
use crate::wire::{
    EngineCoreOutput, ExtraArgs, FinishReason, Logprobs, LoraRequest, RequestError, SamplingParams,
    StopReason,
};

/// Times that one continuation is sent again because the engine lacked media items. More would mean
/// a fault of ours.
const MAX_MISSES: usize = 2;

/// A job and the requests that it became.
pub(super) struct RunningEngineJob {
    /// First: what still runs is aborted before the job lets go of its adapter.
    continuations: Vec<Continuation>,
    sender: Sender,
    /// The continuation whose output is looked for first: none may starve the others.
    next: usize,
    /// Media items whose embeddings should have been there.
    unfound: usize,
    /// What a job that prefills has left.
    left: Option<Left>,
    /// What a job that encodes has left.
    embeddings: Vec<Embeddings>,
}

struct Continuation {
    state: State,
    /// How the media items travelled, when they were sent last.
    delivered: Delivered,
    has_output: bool,
    misses: usize,
    /// The engine may not be able to read slots.
    unread: bool,
}

impl Continuation {
    /// Returns the id of the running request, which outputs arrive without; empty if none runs.
    fn request_id(&self) -> String {
        match &self.state {
            State::Running(stream) => stream.request_id().to_owned(),
            State::SendingAgain(_) | State::Explaining(_) | State::Ended => String::new(),
        }
    }
}

enum State {
    Running(OutputStream),
    SendingAgain(BoxFuture<'static, Result<OutputStream, JobError>>),
    /// It has failed, and the reason is looked for.
    Explaining(BoxFuture<'static, JobError>),
    Ended,
}

impl RunningEngineJob {
    /// Sends one request per continuation, with the media items that the engine lacks.
    pub(super) async fn start(
        engine: Arc<Engine>,
        job: Arc<Job>,
        prompt: Arc<Vec<TokenId>>,
    ) -> Result<Self, JobError> {
        let lora = job.adapter.as_deref().map(adapters::request).map(Arc::new);
        let extra_args = stage::extra_args(&job.stage, engine.private_network)?;
        let unfound = look_for_embeddings(&engine, &job);
        let unread = Unread::of_process().job();
        let sender = Sender { engine, job, prompt, lora, extra_args, unread };
        let streams = sender.send(0..sender.job.sampling.n, false).await?;
        let continuations = streams.into_iter().map(|stream| Continuation {
            delivered: delivered(&stream),
            state: State::Running(stream),
            has_output: false,
            misses: 0,
            unread: false,
        });
        let continuations: Vec<_> = continuations.collect();
        Ok(Self { continuations, sender, next: 0, unfound, left: None, embeddings: Vec::new() })
    }

    /// The next output of one continuation. `Ready(None)` if it has ended.
    fn poll_one(
        &mut self,
        index: usize,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Output, JobError>>> {
        loop {
            let continuation = &mut self.continuations[index];
            let arrival = match &mut continuation.state {
                State::Ended => return Poll::Ready(None),
                State::SendingAgain(sending) => match sending.poll_unpin(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Err(error)) => return Poll::Ready(Some(Err(error))),
                    Poll::Ready(Ok(stream)) => {
                        continuation.delivered = delivered(&stream);
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
                Some(Ok(Brought::Tokens(tokens))) => {
                    return Poll::Ready(Some(Ok(self.tokens(index, tokens))));
                }
                Some(Ok(Brought::More(output))) => output,
                Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
                None => return Poll::Ready(Some(Err(JobError::Unfinished))),
            };
            match output.finish_reason {
                // We let go of requests that we abort, so this one was ended by an engine that is
                // shutting down.
                Some(FinishReason::Abort) => {
                    return Poll::Ready(Some(Err(JobError::Dead(Death::new(
                        "it is shutting down",
                    )))));
                }
                Some(FinishReason::Error | FinishReason::Other(_)) => {
                    let told = output.error.as_ref().and_then(told);
                    let request_id = continuation.request_id();
                    if let Err(error) = told.map_or_else(|| self.send_again(index, &output), Err) {
                        let reason = self.explain(error, output.error, request_id);
                        self.continuations[index].state = State::Explaining(reason);
                    }
                }
                _ => return Poll::Ready(Some(Ok(self.output(index, *output)))),
            }
        }
    }

    /// After an engine's error: it is not believed to hold the job's media items any more. If it
    /// was sent less than all their tensors, that may have been the reason, and the continuation is
    /// sent once more.
    fn send_again(&mut self, index: usize, output: &EngineCoreOutput) -> Result<(), JobError> {
        let Engine { client, observer, .. } = &*self.sender.engine;
        let names: Vec<String> = self.sender.job.media.iter().map(|item| item.name()).collect();
        let missed = &output.mm_cache_miss_hashes;
        let lacking = if missed.is_empty() { &names } else { missed };
        client.forget_media(lacking.iter().map(String::as_str));
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
                items = lacking.len(),
                "engine lacks media items that it was believed to hold, sending them again"
            );
            observer.missed(lacking.len());
        } else if continuation.delivered.shared_memory > 0 && !continuation.unread {
            // Slots may have been the reason: now everything goes in the message.
            continuation.unread = true;
        } else {
            return Err(JobError::Failed);
        }
        let (sender, unread) = (self.sender.clone(), continuation.unread);
        continuation.state = State::SendingAgain(
            async move {
                let streams = sender.send(index..index + 1, unread).await?;
                streams.into_iter().next().ok_or(JobError::Unfinished)
            }
            .boxed(),
        );
        Ok(())
    }

    /// Adds the field of the constraint and the engine's own words to a failure. The words come
    /// from its output (since vLLM 0.33), or else from the log of a launched engine. The job is
    /// refused only if they blame the constraint.
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
        let failed = |words: &str, field: String| {
            let message = format!("the engine failed on an answer that is held to this: {words}");
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
                    let complaint = match &engine.log {
                        Some(log) => log.complaint(&request_id).await,
                        None => None,
                    };
                    match complaint {
                        Some(Complaint { words, blames_constraint: true }) => {
                            let message = format!("the engine can't compile this: {words}");
                            JobError::Refused { field, message }
                        }
                        Some(Complaint { words, blames_constraint: false }) => {
                            failed(&words, field)
                        }
                        None => failed("it gives no reason, its log may", field),
                    }
                }
                error => error,
            }
        }
        .boxed()
    }

    /// An output of tokens and nothing else.
    fn tokens(&mut self, index: usize, tokens: Vec<TokenId>) -> Output {
        self.continuations[index].has_output = true;
        let logprobs = self.sender.job.sampling.logprobs.map(|_| Vec::new());
        let content = Content::Tokens { tokens, logprobs };
        Output { choice: index, content, finish: None, prefill: None, prompt_logprobs: None }
    }

    fn output(&mut self, index: usize, output: EngineCoreOutput) -> Output {
        let continuation = &mut self.continuations[index];
        continuation.has_output = true;
        let finish = finish_of(&output);
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
            // In `finish` and `queued`.
            finish_reason: _,
            stop_reason: _,
            events: _,
            // These come with failures, which are no outputs.
            mm_cache_miss_hashes: _,
            error: _,
            // The registry has found the continuation by it.
            request_id: _,
            // Not reported.
            num_nans_in_logits: _,
        } = output;
        let Engine { private_network, embeddings: store, .. } = &*self.sender.engine;
        match self.sender.job.stage {
            Stage::Prefill => {
                let left = || {
                    kv_transfer_params.as_ref().and_then(|said| stage::left(said, *private_network))
                };
                self.left = self.left.take().or_else(left);
            }
            Stage::Encode => {
                let (said, items) = (ec_transfer_params.iter(), &self.sender.job.media);
                self.embeddings
                    .extend(said.flat_map(|said| stage::embeddings(said, items, store.as_deref())));
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
            match self.poll_one(index, context) {
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

    fn delivered(&self) -> Delivered {
        let mut all = Delivered { unfound: self.unfound, ..Delivered::default() };
        self.continuations.iter().for_each(|continuation| all += continuation.delivered);
        all
    }

    fn left(&mut self) -> Option<Left> {
        self.left.take()
    }

    fn embeddings(&mut self) -> Vec<Embeddings> {
        std::mem::take(&mut self.embeddings)
    }
}

/// How many items there are whose embeddings an engine should find on its machine and does not, as
/// far as that can be told: it encodes them itself.
fn look_for_embeddings(engine: &Engine, job: &Job) -> usize {
    let Some(store) = engine.embeddings.as_deref().filter(|store| store.folder().is_some()) else {
        return 0;
    };
    let unfound =
        job.embedded.iter().filter(|item| store.bytes_of(&item.to_string()).is_none()).count();
    for _ in 0..unfound {
        engine.observer.stepped_down(
            "no_embeddings",
            &"embeddings of an item are not there any more: it is encoded again",
        );
    }
    unfound
}

/// Sends continuations of one job.
#[derive(Clone)]
struct Sender {
    engine: Arc<Engine>,
    job: Arc<Job>,
    prompt: Arc<Vec<TokenId>>,
    lora: Option<Arc<LoraRequest>>,
    extra_args: Option<ExtraArgs>,
    /// Counts the bytes of the answer that nobody has read yet.
    unread: UnreadJob,
}

impl Sender {
    /// Sends these continuations. Those that were sent are aborted if one can't be.
    async fn send(
        &self,
        choices: std::ops::Range<usize>,
        refused: bool,
    ) -> Result<Vec<OutputStream>, JobError> {
        let Self { engine, job, .. } = self;
        let mut tensors = Tensors::default();
        tensors.get(engine, job, refused, &Wanted::Lacking).await?;
        let streams = loop {
            let features = tensors.features(job);
            // Engines forbid an id that is in use, and what comes of an aborted request may still
            // be under way: so each try has an id of its own, which begins with the one that people
            // know.
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
                        sampling_params: SamplingParams {
                            extra_args,
                            ..SamplingParams::for_choice(&job.sampling, choice)
                        },
                    };
                    let request = request::from_job(job, parts);
                    engine.client.submit_one_of(job.sampling.n, &self.unread, request)
                })
                .collect();
            match sent {
                // What the engine held a moment ago has just been evicted, or could be by the
                // request itself. Each turn has more tensors than the one before, so there are no
                // more turns than items.
                Err(EngineError::NeedsData { keys }) => {
                    let had = tensors.len();
                    tensors.get(engine, job, refused, &Wanted::These(keys.into())).await?;
                    if tensors.len() == had {
                        return Err(JobError::KeepsLosingMedia);
                    }
                }
                sent => break sent?,
            }
        };
        for stream in &streams {
            let how = stream.delivered();
            if how != crate::Delivered::default() {
                engine.observer.delivered(delivered(stream));
            }
            for _ in 0..how.no_lease {
                engine.observer.stepped_down("no_lease", &"all leases of the arena are in use");
            }
        }
        Ok(streams)
    }
}

fn delivered(stream: &OutputStream) -> Delivered {
    // What had no lease is counted apart, when it is sent.
    let crate::Delivered { cached, shm, inline, no_lease: _ } = stream.delivered();
    Delivered { cached, shared_memory: shm, inline, unfound: 0 }
}

/// What an engine's own words about an error mean, where they tell more than that the request
/// failed.
fn told(error: &RequestError) -> Option<JobError> {
    let RequestError { code, message, retryable } = error;
    if *retryable {
        return Some(JobError::NotTaken(Death::new(message)));
    }
    if code == RequestError::VALIDATION {
        return Some(JobError::Refused { field: "body".to_owned(), message: message.clone() });
    }
    tracing::warn!(code, message, "an engine could not do a request");
    None
}

/// Why the engine ended the continuation, if it did. Ends that are failures are no finish.
fn finish_of(output: &EngineCoreOutput) -> Option<Finish> {
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

/// Per new token: its own log probability and the first `top` distinct candidates, the token itself
/// among them.
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
