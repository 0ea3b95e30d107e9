//! A running job.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use chiasm_backend::{
    Content, DeathReason, Input, Job, JobError, MediaDelivery, Output, RunningJob,
};
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{self, BoxStream, StreamExt, TryStreamExt};
use reqwest::Response;
use tokio::sync::watch;

use super::answer::{AnswerError, Delta, Event, MetaInfo};
use super::request::{self, RequestOptions};
use super::{GENERATE, RequestRules};
use crate::events::{Events, TooLong};
use crate::pieces::Pieces;
use crate::request::headers;
use crate::running::DONE;
use crate::shared::Shared;

/// A running job and its outputs that were not polled yet.
pub(crate) struct RunningSglangJob {
    shared: Arc<Shared>,
    job: Arc<Job>,
    /// One answer for each choice.
    answers: Vec<Answer>,
    /// `true` once the prompt is computed. The requests of the other choices wait for that, so that
    /// they find the prompt in the cache.
    is_computed: watch::Sender<bool>,
    /// The index of the answer that is polled first. It rotates, so that no answer starves.
    first_polled: usize,
    delivered: MediaDelivery,
    /// Completes at the end of the server, which may be known before its connections fail.
    ended: BoxFuture<'static, DeathReason>,
}

type Body = BoxStream<'static, Result<Bytes, JobError>>;

/// The answer to the request of one choice.
struct Answer {
    /// `None` once the answer is complete, or no more of it is needed. Dropping the body closes the
    /// connection, and the server then aborts the request.
    body: Option<Body>,
    events: Events,
    ready: VecDeque<Output>,
    has_ended: bool,
    /// The number of tokens received so far.
    tokens: usize,
}

/// Sends a job's requests to a server and returns with the head of the first answer.
///
/// # Errors
/// Returns the errors of [`Backend::start`](chiasm_backend::Backend::start).
pub(crate) async fn begin(
    shared: &Arc<Shared>,
    rules: &RequestRules,
    job: Arc<Job>,
) -> Result<RunningSglangJob, JobError> {
    request::check(&job, rules)?;
    let options = RequestOptions {
        lower_is_earlier: rules.lower_is_earlier,
        nonce: rand::random(),
        returns_prompt: !job.media.is_empty() && rules.compares_next(),
    };
    let first = send(shared.clone(), job.clone(), options, 0).await?;
    let delivered = shared.delivered(job.media.len() * job.sampling.n);
    let is_computed = watch::Sender::new(false);
    let later = (1..job.sampling.n).map(|choice| {
        let shared = shared.clone();
        let job = job.clone();
        let mut is_computed = is_computed.subscribe();
        let pieces = async move {
            // The sender lives as long as the job.
            let _ = is_computed.wait_for(|is_computed| *is_computed).await;
            let response = send(shared, job, options, choice).await.map_err(|error| match error {
                // The server has begun with the first request of the job, so none of these errors
                // means that the server did not begin.
                JobError::NotTaken(death) => JobError::Dead(death),
                JobError::KeyRefused { status, message }
                | JobError::Overloaded { status, message, .. } => {
                    JobError::ServerFailed { status, message }
                }
                error => error,
            });
            Ok(body_pieces(response?))
        };
        stream::once(pieces).try_flatten().boxed()
    });
    let first = body_pieces(first).boxed();
    let answer = |body| Answer {
        body: Some(body),
        events: shared.server.events(),
        ready: VecDeque::new(),
        has_ended: false,
        tokens: 0,
    };
    let answers: Vec<Answer> = std::iter::once(first).chain(later).map(answer).collect();
    let ended = shared.when_ended();
    let shared = shared.clone();
    Ok(RunningSglangJob { shared, job, answers, is_computed, first_polled: 0, delivered, ended })
}

async fn send(
    shared: Arc<Shared>,
    job: Arc<Job>,
    options: RequestOptions,
    choice: usize,
) -> Result<Response, JobError> {
    let body = request::build(&job, options, choice)?;
    shared.send_job(GENERATE, body, headers(&job.id, job.trace.as_ref()), &job).await
}

/// Returns the body of an answer piece by piece.
fn body_pieces(response: Response) -> impl stream::Stream<Item = Result<Bytes, JobError>> + Send {
    Pieces::new(response)
        .map_err(|error| JobError::Dead(DeathReason::new(format!("the server: {error}"))))
}

impl RunningSglangJob {
    /// Builds the error for an answer that violates the protocol.
    fn protocol_error(&self, what: &str) -> JobError {
        JobError::Dead(DeathReason::new(format!("the server violates the protocol: {what}")))
    }

    /// Parses received bytes of one choice.
    fn take(&mut self, choice: usize, bytes: &[u8]) -> Result<(), JobError> {
        let pushed = self.answers[choice].events.push(bytes);
        pushed.map_err(|TooLong| self.protocol_error("an event is too long"))?;
        while let Some(data) = self.answers[choice].events.next() {
            if data[..] == *DONE {
                let answer = &mut self.answers[choice];
                answer.body = None;
                return if answer.has_ended { Ok(()) } else { Err(JobError::Unfinished) };
            }
            let event: Event = serde_json::from_slice(&data)
                .map_err(|error| self.protocol_error(&error.to_string()))?;
            self.take_event(choice, &event)?;
            if self.answers[choice].body.is_none() {
                // The choice was cut off here: later tokens are not needed.
                break;
            }
        }
        Ok(())
    }

    fn take_event(&mut self, choice: usize, event: &Event) -> Result<(), JobError> {
        let answer = &self.answers[choice];
        if answer.has_ended {
            return Err(self.protocol_error("an event after the end"));
        }
        let known_tokens = answer.tokens;
        let Delta { tokens, logprobs, finish } =
            event.delta(known_tokens, &self.job.sampling).map_err(|error| match error {
                AnswerError::Refused(status, message) => {
                    self.shared.refusal(status, &message, &self.job)
                }
                AnswerError::Aborted => JobError::Unfinished,
                AnswerError::Protocol(what) => self.protocol_error(what),
            })?;
        if known_tokens == 0 && choice == 0 {
            self.compare(event);
        }
        self.is_computed.send_replace(true);
        let prefill =
            event.meta_info.as_ref().and_then(MetaInfo::prefill).filter(|_| known_tokens == 0);
        let answer = &mut self.answers[choice];
        answer.tokens += tokens.len();
        answer.has_ended = finish.is_some();
        let is_cut = answer.has_ended && event.is_unfinished();
        let content = Content::Tokens { tokens, logprobs };
        answer.ready.push_back(Output { choice, content, finish, prefill, prompt_logprobs: None });
        if is_cut {
            answer.body = None;
        }
        Ok(())
    }

    /// Compares the server's prompt with the expected one.
    fn compare(&self, event: &Event) {
        let expected = match &self.job.input {
            Input::Marked { expanded, .. } => expanded,
            Input::Tokens(tokens) => tokens,
            Input::Messages(_) => return,
        };
        let count = event.meta_info.as_ref().map_or(0, |meta| meta.prompt_tokens);
        let difference = match &event.prompt_token_ids {
            Some(prompt) if count == prompt.len() => {
                let differs = |(ours, theirs): (&chiasm_types::TokenId, &u32)| ours.0 != *theirs;
                expected
                    .iter()
                    .zip(prompt)
                    .position(differs)
                    .map(|position| format!("; they differ from token {position} on"))
            }
            _ => None,
        };
        if difference.is_some() || count != expected.len() {
            let all = expected.len();
            let difference = difference.unwrap_or_default();
            self.shared.distrust(format!(
                "the server expanded a prompt to {count} tokens where {all} were \
                 expected{difference}"
            ));
        }
    }

    /// Takes the next output of any choice.
    fn next_output(&mut self) -> Option<Output> {
        self.answers.iter_mut().find_map(|answer| answer.ready.pop_front())
    }

    /// Polls all connections once and returns `true` if any of them made progress.
    fn poll_bodies(&mut self, context: &mut Context<'_>) -> Result<bool, JobError> {
        let mut has_progressed = false;
        self.first_polled += 1;
        for at in 0..self.answers.len() {
            let choice = (self.first_polled + at) % self.answers.len();
            let Some(body) = &mut self.answers[choice].body else { continue };
            match body.poll_next_unpin(context) {
                Poll::Pending => continue,
                Poll::Ready(Some(Ok(bytes))) => self.take(choice, &bytes)?,
                // The choice is complete; the rest of the stream is not needed.
                Poll::Ready(_) if self.answers[choice].has_ended => {
                    self.answers[choice].body = None
                }
                Poll::Ready(Some(Err(error))) => return Err(error),
                Poll::Ready(None) => {
                    return Err(JobError::Dead(DeathReason::new(
                        "the server ended its answer too early",
                    )));
                }
            }
            has_progressed = true;
        }
        Ok(has_progressed)
    }
}

impl RunningJob for RunningSglangJob {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Output, JobError>>> {
        loop {
            if let Some(output) = self.next_output() {
                return Poll::Ready(Some(Ok(output)));
            }
            if self.answers.iter().all(|answer| answer.body.is_none()) {
                return Poll::Ready(None);
            }
            let error = match self.poll_bodies(context) {
                Ok(true) => continue,
                Ok(false) => JobError::Dead(ready!(self.ended.poll_unpin(context))),
                Err(error) => error,
            };
            for answer in &mut self.answers {
                answer.body = None;
                answer.ready.clear();
            }
            return Poll::Ready(Some(Err(error)));
        }
    }

    fn stop(&mut self, choice: usize) {
        let Some(answer) = self.answers.get_mut(choice) else { return };
        answer.body = None;
        answer.ready.clear();
        // The other choices no longer wait for this one.
        self.is_computed.send_replace(true);
    }

    fn delivered(&self) -> MediaDelivery {
        self.delivered
    }
}
