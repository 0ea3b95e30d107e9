//! One job that runs: an answer for each of its continuations.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll};

use chiasm_backend::{
    Content, Death, Delivered, Finish, Input, Job, JobError, Output, Prefill, RunningJob,
};
use chiasm_types::TokenId;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{self, BoxStream, StreamExt};

use crate::answer::{Answer, AnswerError};
use crate::output::{End, EngineOutput};
use crate::shared::{InFlight, Shared};
use crate::tensors::Packed;

/// A job, and what has come of it that nobody has asked for yet.
pub(crate) struct RunningDynamoJob {
    shared: Arc<Shared>,
    job: Arc<Job>,
    continuations: Vec<Continuation>,
    came: VecDeque<Output>,
    /// The end of the worker, which may be known before its connections fail.
    ended: BoxFuture<'static, Death>,
    delivered: Delivered,
    /// Until all answers have begun: then the worker has copied them.
    packed: Option<Packed>,
    _counted: InFlight,
}

struct Continuation {
    /// `None` once it has ended or is not wanted. Dropping it tells the worker.
    answer: Option<BoxStream<'static, Result<EngineOutput, AnswerError>>>,
    tokens: usize,
    has_begun: bool,
    /// Whether it was told how the prompt was computed.
    is_told: bool,
    has_ended: bool,
}

impl RunningDynamoJob {
    /// The job whose continuations these are the answers of.
    pub(crate) fn new(
        shared: Arc<Shared>,
        job: Arc<Job>,
        answers: Vec<Answer>,
        counted: InFlight,
        delivered: Delivered,
        packed: Option<Packed>,
    ) -> Self {
        let continuation = |answer: Answer| {
            let outputs = stream::try_unfold(answer, |mut answer| async move {
                Ok(answer.next::<EngineOutput>().await?.map(|output| (output, answer)))
            });
            Continuation {
                answer: Some(outputs.boxed()),
                tokens: 0,
                has_begun: false,
                is_told: false,
                has_ended: false,
            }
        };
        Self {
            ended: shared.when_ended(),
            shared,
            job,
            continuations: answers.into_iter().map(continuation).collect(),
            came: VecDeque::new(),
            delivered,
            packed,
            _counted: counted,
        }
    }

    /// Takes in what has come of one continuation.
    fn take(&mut self, choice: usize, output: EngineOutput) -> Result<(), JobError> {
        let nonsense =
            |what: &str| JobError::Dead(Death::new(format!("it tells nonsense: {what}")));
        let sampling = &self.job.sampling;
        let Some(continuation) = self.continuations.get_mut(choice) else { return Ok(()) };
        if continuation.has_ended {
            return Err(nonsense("more of an answer that has ended"));
        }
        continuation.tokens += output.token_ids.len();
        continuation.has_begun = true;
        if continuation.tokens > sampling.max_tokens as usize {
            return Err(nonsense("more tokens than were asked for"));
        }
        let mut finish = match output.end(sampling.eos_token) {
            None => None,
            Some(End::Finished(finish)) => Some(finish),
            Some(End::Cancelled) => return Err(JobError::Unfinished),
            Some(End::Failed(why)) => {
                tracing::warn!(worker = self.shared.name, why, "a worker could not do a request");
                return Err(JobError::Failed);
            }
        };
        let logprobs = match sampling.logprobs {
            None => None,
            Some(top) => Some(output.logprobs(top as usize).ok_or_else(|| JobError::Refused {
                field: "logprobs".to_owned(),
                message: format!("are not told by {}", self.shared.name),
            })?),
        };
        if let (Input::Marked { expanded, .. }, Some(told)) =
            (&self.job.input, output.prompt_tokens())
            && told != expanded.len()
        {
            let expected = expanded.len();
            let why = format!(
                "it makes {told} tokens of a prompt with media items that was expected to have {expected}"
            );
            self.shared.distrust(why);
        }
        continuation.has_ended = finish.is_some();
        let cached = output.cached_tokens().filter(|_| !continuation.is_told);
        continuation.is_told |= cached.is_some();
        let prefill = cached.map(|cached_tokens| Prefill {
            cached_tokens,
            created_tokens: None,
            queued: None,
        });
        let tokens: Vec<TokenId> = output.token_ids.into_iter().map(TokenId).collect();
        // The token that ends a text is no part of it. Some workers keep it to themselves.
        let ending = match &finish {
            Some(Finish::Eos) => sampling.eos_token,
            Some(Finish::StopToken(token)) => Some(*token),
            _ => None,
        };
        let is_kept = ending.is_some() && !tokens.is_empty() && tokens.last().copied() != ending;
        let last = finish.take_if(|_| is_kept);
        let content = Content::Tokens { tokens, logprobs };
        self.came.push_back(Output { choice, content, finish, prefill, prompt_logprobs: None });
        if last.is_some() {
            let content = Content::Tokens {
                tokens: Vec::new(),
                logprobs: sampling.logprobs.map(|_| Vec::new()),
            };
            self.came.push_back(Output {
                choice,
                content,
                finish: last,
                prefill: None,
                prompt_logprobs: None,
            });
        }
        Ok(())
    }

    /// Lets go of tensors that no worker has still to copy.
    fn unpack(&mut self) {
        let is_done =
            |continuation: &Continuation| continuation.has_begun || continuation.answer.is_none();
        if self.continuations.iter().all(is_done)
            && let Some(packed) = self.packed.take()
        {
            packed.let_go();
        }
    }

    /// What comes of the next continuation that has something.
    fn poll_answers(&mut self, context: &mut Context<'_>) -> Poll<Result<(), JobError>> {
        let mut is_over = true;
        for choice in 0..self.continuations.len() {
            let Some(answer) = &mut self.continuations[choice].answer else { continue };
            is_over = false;
            match answer.poll_next_unpin(context) {
                Poll::Pending => {}
                Poll::Ready(Some(Ok(output))) => return Poll::Ready(self.take(choice, output)),
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(self.failed(error))),
                Poll::Ready(None) => {
                    self.continuations[choice].answer = None;
                    let has_ended = self.continuations[choice].has_ended;
                    return Poll::Ready(if has_ended { Ok(()) } else { Err(JobError::Unfinished) });
                }
            }
        }
        if is_over { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn failed(&self, error: AnswerError) -> JobError {
        match error {
            AnswerError::Failed(why) => {
                tracing::warn!(worker = self.shared.name, why, "a worker could not do a request");
                JobError::Failed
            }
            error => JobError::Dead(Death::new(error.to_string())),
        }
    }
}

impl Drop for RunningDynamoJob {
    fn drop(&mut self) {
        if let Some(packed) = self.packed.take() {
            packed.let_go();
        }
    }
}

impl RunningJob for RunningDynamoJob {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Output, JobError>>> {
        loop {
            if let Some(output) = self.came.pop_front() {
                return Poll::Ready(Some(Ok(output)));
            }
            if self.continuations.iter().all(|continuation| continuation.answer.is_none()) {
                return Poll::Ready(None);
            }
            let taken = match self.poll_answers(context) {
                Poll::Ready(taken) => taken,
                Poll::Pending => match self.ended.poll_unpin(context) {
                    Poll::Ready(death) => Err(JobError::Dead(death)),
                    Poll::Pending => return Poll::Pending,
                },
            };
            self.unpack();
            if let Err(error) = taken {
                self.continuations.clear();
                self.came.clear();
                return Poll::Ready(Some(Err(error)));
            }
        }
    }

    fn stop(&mut self, choice: usize) {
        let Some(continuation) = self.continuations.get_mut(choice) else { return };
        continuation.answer = None;
        self.unpack();
        self.came.retain(|output| output.choice != choice);
    }

    fn delivered(&self) -> Delivered {
        self.delivered
    }
}
