//! A job that runs at a server.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use chiasm_backend::{
    Content, DeathReason, Input, Job, JobError, MediaDelivery, Output, Prefill, RunningJob,
};
use chiasm_types::TokenId;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::StreamExt;
use reqwest::Response;

use crate::chunk::{Chunk, ChunkChoice, End};
use crate::events::{Events, TooLong};
use crate::pieces::Pieces;
use crate::shared::Shared;

/// The data of the event that ends a streamed answer.
pub(crate) const DONE: &[u8] = b"[DONE]";

/// A running job and its outputs that were not polled yet.
pub(crate) struct RunningUpstreamJob {
    shared: Arc<Shared>,
    job: Arc<Job>,
    /// `None` once the answer is complete. Dropping the body closes the connection, and the server
    /// then aborts the request.
    body: Option<Pieces>,
    events: Events,
    ready: VecDeque<Output>,
    /// The last output of the last choice. It is held back until the server's usage, which follows
    /// all answers.
    held: Option<Output>,
    choices: Vec<ChoiceState>,
    delivered: MediaDelivery,
    /// Completes at the end of the server, which may be known before its connection fails.
    ended: BoxFuture<'static, DeathReason>,
}

#[derive(Clone, Copy, Debug, Default)]
struct ChoiceState {
    has_ended: bool,
    /// `true` if the client needs no more of this choice.
    is_stopped: bool,
    tokens: usize,
}

impl RunningUpstreamJob {
    pub(crate) fn new(
        shared: Arc<Shared>,
        job: Arc<Job>,
        response: Response,
        delivered: MediaDelivery,
    ) -> Self {
        Self {
            ended: shared.when_ended(),
            choices: vec![ChoiceState::default(); job.sampling.n],
            events: shared.server.events(),
            shared,
            job,
            body: Some(Pieces::new(response)),
            ready: VecDeque::new(),
            held: None,
            delivered,
        }
    }

    fn is_over(&self) -> bool {
        self.choices.iter().all(|choice| choice.has_ended || choice.is_stopped)
    }

    /// Builds the error for an answer that violates the protocol.
    fn protocol_error(&self, what: &str) -> JobError {
        JobError::Dead(DeathReason::new(format!("the server violates the protocol: {what}")))
    }

    /// Parses received bytes.
    fn take(&mut self, bytes: &[u8]) -> Result<(), JobError> {
        self.events.push(bytes).map_err(|TooLong| self.protocol_error("an event is too long"))?;
        while let Some(data) = self.events.next() {
            if data[..] == *DONE {
                self.release(None);
                self.body = None;
                return if self.is_over() { Ok(()) } else { Err(JobError::Unfinished) };
            }
            let chunk = serde_json::from_slice(&data)
                .map_err(|error| self.protocol_error(&error.to_string()))?;
            self.take_chunk(chunk)?;
        }
        Ok(())
    }

    fn take_chunk(&mut self, chunk: Chunk) -> Result<(), JobError> {
        let Chunk { choices, usage, prompt_token_ids, error } = chunk;
        if let Some(error) = error {
            tracing::warn!(
                server = self.shared.name,
                server_message = error.message,
                "a server failed to answer a request"
            );
            return Err(match error.code {
                Some(status @ 400..=599) => self.shared.refusal(status, &error.message, &self.job),
                _ => JobError::Failed,
            });
        }
        if let Some(prompt) = prompt_token_ids {
            self.compare(&prompt);
        }
        for choice in choices {
            self.take_choice(choice)?;
        }
        if let Some(prefill) = usage.and_then(|usage| usage.prefill()) {
            self.release(Some(prefill));
        }
        Ok(())
    }

    fn take_choice(&mut self, choice: ChunkChoice) -> Result<(), JobError> {
        let index = choice.index;
        let max_tokens = self.job.sampling.max_tokens as usize;
        let Some(state) = self.choices.get_mut(index).filter(|state| !state.has_ended) else {
            return Err(self.protocol_error("an unknown or ended continuation"));
        };
        let tokens: Vec<TokenId> =
            choice.token_ids.iter().flatten().copied().map(TokenId).collect();
        state.tokens += tokens.len();
        if state.tokens > max_tokens {
            return Err(self.protocol_error("more tokens than requested"));
        }
        let finish = match choice.end() {
            Some(End::Finished(finish)) => Some(finish),
            Some(End::Failed) => return Err(JobError::Unfinished),
            None => None,
        };
        state.has_ended = finish.is_some();
        let is_stopped = state.is_stopped;
        let logprobs = match self.job.sampling.logprobs {
            Some(top) => {
                let logprobs = choice.logprobs(top as usize);
                let logprobs = logprobs.filter(|logprobs| logprobs.len() == tokens.len());
                Some(
                    logprobs
                        .ok_or_else(|| self.protocol_error("no log probabilities or too few"))?,
                )
            }
            None => None,
        };
        if is_stopped {
            return Ok(());
        }
        let content = Content::Tokens { tokens, logprobs };
        let output =
            Output { choice: index, content, finish, prefill: None, prompt_logprobs: None };
        if self.is_over() {
            self.held = Some(output);
        } else {
            self.ready.push_back(output);
        }
        Ok(())
    }

    /// Releases the held output, with the server's usage.
    fn release(&mut self, prefill: Option<Prefill>) {
        if let Some(output) = self.held.take() {
            self.ready.push_back(Output { prefill, ..output });
        }
    }

    /// Compares the server's prompt with the expected one.
    fn compare(&self, prompt: &[u32]) {
        let Input::Marked { expanded, .. } = &self.job.input else { return };
        if expanded.iter().map(|token| token.0).eq(prompt.iter().copied()) {
            return;
        }
        let difference = expanded.iter().zip(prompt).position(|(ours, theirs)| ours.0 != *theirs);
        let difference = difference.unwrap_or(expanded.len().min(prompt.len()));
        self.shared.distrust(format!(
            "the server expanded a prompt with media items to {} tokens where {} were expected; \
             they differ from token {difference} on",
            prompt.len(),
            expanded.len()
        ));
    }
}

impl RunningJob for RunningUpstreamJob {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Output, JobError>>> {
        loop {
            if let Some(output) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(output)));
            }
            let Some(body) = &mut self.body else { return Poll::Ready(None) };
            let taken = match body.poll_next_unpin(context) {
                Poll::Ready(Some(Ok(bytes))) => self.take(&bytes),
                // All choices are complete; the rest of the stream is not needed.
                Poll::Ready(_) if self.is_over() => {
                    self.release(None);
                    self.body = None;
                    Ok(())
                }
                Poll::Ready(Some(Err(error))) => {
                    Err(JobError::Dead(DeathReason::new(format!("the server: {error}"))))
                }
                Poll::Ready(None) => {
                    Err(JobError::Dead(DeathReason::new("the server ended its answer too early")))
                }
                Poll::Pending => Err(JobError::Dead(ready!(self.ended.poll_unpin(context)))),
            };
            if let Err(error) = taken {
                self.body = None;
                self.ready.clear();
                return Poll::Ready(Some(Err(error)));
            }
        }
    }

    fn stop(&mut self, choice: usize) {
        let Some(state) = self.choices.get_mut(choice) else { return };
        state.is_stopped = true;
        self.ready.retain(|output| output.choice != choice);
        self.held = self.held.take().filter(|output| output.choice != choice);
        if self.is_over() && self.held.is_none() {
            self.body = None;
        }
    }

    fn delivered(&self) -> MediaDelivery {
        self.delivered
    }
}
