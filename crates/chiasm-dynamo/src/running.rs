//! A running job, with an answer for each of its choices.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll};

use chiasm_backend::{
    Content, DeathReason, Finish, Input, Job, JobError, MediaDelivery, Output, Prefill, RunningJob,
};
use chiasm_types::TokenId;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{self, BoxStream, StreamExt};

use crate::answer::{Answer, AnswerError};
use crate::output::{End, EngineOutput};
use crate::shared::{InFlight, Shared};
use crate::tensors::PackedTensors;

/// A running job and its outputs that were not polled yet.
pub(crate) struct RunningDynamoJob {
    shared: Arc<Shared>,
    job: Arc<Job>,
    choices: Vec<ChoiceState>,
    ready: VecDeque<Output>,
    /// Completes at the end of the worker, which may be known before its connections fail.
    ended: BoxFuture<'static, DeathReason>,
    delivered: MediaDelivery,
    /// The tensors until all answers have begun: then the worker has copied them.
    packed: Option<PackedTensors>,
    _counted: InFlight,
}

struct ChoiceState {
    /// `None` once the answer is complete or not needed. Dropping it tells the worker to stop.
    answer: Option<BoxStream<'static, Result<EngineOutput, AnswerError>>>,
    tokens: usize,
    has_begun: bool,
    /// `true` once an output has reported how the prompt was computed.
    has_prefill: bool,
    has_ended: bool,
}

impl RunningDynamoJob {
    /// Creates a job from the answers for its choices.
    pub(crate) fn new(
        shared: Arc<Shared>,
        job: Arc<Job>,
        answers: Vec<Answer>,
        counted: InFlight,
        delivered: MediaDelivery,
        packed: Option<PackedTensors>,
    ) -> Self {
        let choice = |answer: Answer| {
            let outputs = stream::try_unfold(answer, |mut answer| async move {
                Ok(answer.next::<EngineOutput>().await?.map(|output| (output, answer)))
            });
            ChoiceState {
                answer: Some(outputs.boxed()),
                tokens: 0,
                has_begun: false,
                has_prefill: false,
                has_ended: false,
            }
        };
        Self {
            ended: shared.when_ended(),
            shared,
            job,
            choices: answers.into_iter().map(choice).collect(),
            ready: VecDeque::new(),
            delivered,
            packed,
            _counted: counted,
        }
    }

    /// Processes an output of one choice.
    fn on_output(&mut self, choice: usize, output: EngineOutput) -> Result<(), JobError> {
        let protocol_error = |what: &str| {
            JobError::Dead(DeathReason::new(format!("the worker violates the protocol: {what}")))
        };
        let sampling = &self.job.sampling;
        let Some(state) = self.choices.get_mut(choice) else { return Ok(()) };
        if state.has_ended {
            return Err(protocol_error("an output after the answer has ended"));
        }
        state.tokens += output.token_ids.len();
        state.has_begun = true;
        if state.tokens > sampling.max_tokens as usize {
            return Err(protocol_error("more tokens than requested"));
        }
        let mut finish = match output.end(sampling.eos_token) {
            None => None,
            Some(End::Finished(finish)) => Some(finish),
            Some(End::Cancelled) => return Err(JobError::Unfinished),
            Some(End::Failed(why)) => {
                tracing::warn!(
                    worker = self.shared.name,
                    why,
                    "a worker failed to execute a request"
                );
                return Err(JobError::Failed);
            }
        };
        let logprobs = match sampling.logprobs {
            None => None,
            Some(top) => Some(output.logprobs(top as usize).ok_or_else(|| JobError::Refused {
                field: "logprobs".to_owned(),
                message: format!("are not reported by {}", self.shared.name),
            })?),
        };
        if let (Input::Marked { expanded, .. }, Some(count)) =
            (&self.job.input, output.prompt_tokens())
            && count != expanded.len()
        {
            let expected = expanded.len();
            let why = format!(
                "the worker expanded a prompt with media items to {count} tokens where \
                 {expected} were expected"
            );
            self.shared.distrust(why);
        }
        state.has_ended = finish.is_some();
        let cached = output.cached_tokens().filter(|_| !state.has_prefill);
        state.has_prefill |= cached.is_some();
        let prefill = cached.map(|cached_tokens| Prefill {
            cached_tokens,
            created_tokens: None,
            queued: None,
        });
        let tokens: Vec<TokenId> = output.token_ids.into_iter().map(TokenId).collect();
        // The ending token is not part of the text. Some workers do not send it; the finish then
        // follows in an output without tokens.
        let ending = match &finish {
            Some(Finish::Eos) => sampling.eos_token,
            Some(Finish::StopToken(token)) => Some(*token),
            _ => None,
        };
        let is_withheld =
            ending.is_some() && !tokens.is_empty() && tokens.last().copied() != ending;
        let last = finish.take_if(|_| is_withheld);
        let content = Content::Tokens { tokens, logprobs };
        self.ready.push_back(Output { choice, content, finish, prefill, prompt_logprobs: None });
        if last.is_some() {
            let content = Content::Tokens {
                tokens: Vec::new(),
                logprobs: sampling.logprobs.map(|_| Vec::new()),
            };
            self.ready.push_back(Output {
                choice,
                content,
                finish: last,
                prefill: None,
                prompt_logprobs: None,
            });
        }
        Ok(())
    }

    /// Releases the tensors once the worker has copied them for all choices.
    fn release_tensors(&mut self) {
        let is_done = |state: &ChoiceState| state.has_begun || state.answer.is_none();
        if self.choices.iter().all(is_done)
            && let Some(packed) = self.packed.take()
        {
            packed.release();
        }
    }

    /// Polls the answers and processes the first output that is ready.
    fn poll_answers(&mut self, context: &mut Context<'_>) -> Poll<Result<(), JobError>> {
        let mut is_over = true;
        for choice in 0..self.choices.len() {
            let Some(answer) = &mut self.choices[choice].answer else { continue };
            is_over = false;
            match answer.poll_next_unpin(context) {
                Poll::Pending => {}
                Poll::Ready(Some(Ok(output))) => {
                    return Poll::Ready(self.on_output(choice, output));
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(self.failed(error))),
                Poll::Ready(None) => {
                    self.choices[choice].answer = None;
                    let has_ended = self.choices[choice].has_ended;
                    return Poll::Ready(if has_ended { Ok(()) } else { Err(JobError::Unfinished) });
                }
            }
        }
        if is_over { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn failed(&self, error: AnswerError) -> JobError {
        match error {
            AnswerError::Failed(why) => {
                tracing::warn!(
                    worker = self.shared.name,
                    why,
                    "a worker failed to execute a request"
                );
                JobError::Failed
            }
            error => JobError::Dead(DeathReason::new(error.to_string())),
        }
    }
}

impl Drop for RunningDynamoJob {
    fn drop(&mut self) {
        if let Some(packed) = self.packed.take() {
            packed.release();
        }
    }
}

impl RunningJob for RunningDynamoJob {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Output, JobError>>> {
        loop {
            if let Some(output) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(output)));
            }
            if self.choices.iter().all(|state| state.answer.is_none()) {
                return Poll::Ready(None);
            }
            let polled = match self.poll_answers(context) {
                Poll::Ready(polled) => polled,
                Poll::Pending => match self.ended.poll_unpin(context) {
                    Poll::Ready(death) => Err(JobError::Dead(death)),
                    Poll::Pending => return Poll::Pending,
                },
            };
            self.release_tensors();
            if let Err(error) = polled {
                self.choices.clear();
                self.ready.clear();
                return Poll::Ready(Some(Err(error)));
            }
        }
    }

    fn stop(&mut self, choice: usize) {
        let Some(state) = self.choices.get_mut(choice) else { return };
        state.answer = None;
        self.release_tensors();
        self.ready.retain(|output| output.choice != choice);
    }

    fn delivered(&self) -> MediaDelivery {
        self.delivered
    }
}
