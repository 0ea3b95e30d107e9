//! One job that runs.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use chiasm_backend::{Content, Death, Delivered, Input, Job, JobError, Output, RunningJob};
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{self, BoxStream, StreamExt, TryStreamExt};
use reqwest::Response;
use tokio::sync::watch;

use super::answer::{Event, MetaInfo, News, Stopped};
use super::request::{self, Asking};
use super::{GENERATE, Manner};
use crate::events::{Events, TooLong};
use crate::pieces::Pieces;
use crate::request::headers;
use crate::running::DONE;
use crate::shared::Shared;

/// A job, and its outputs that have come and were not polled yet.
pub(crate) struct RunningSglangJob {
    shared: Arc<Shared>,
    job: Arc<Job>,
    /// One for each continuation.
    answers: Vec<Answer>,
    /// `true` once the prompt is computed. The other continuations wait for that, so that they find
    /// the prompt in the cache.
    is_computed: watch::Sender<bool>,
    /// The index of the answer that is polled first. It rotates, so that no answer starves.
    turn: usize,
    delivered: Delivered,
    /// The end of the server, which may be known before its connections fail.
    ended: BoxFuture<'static, Death>,
}

type Body = BoxStream<'static, Result<Bytes, JobError>>;

struct Answer {
    /// `None` once all has come, or nothing more is wanted. Dropping it ends the connection, which
    /// makes the server abort.
    body: Option<Body>,
    events: Events,
    came: VecDeque<Output>,
    has_ended: bool,
    /// Tokens that have come.
    tokens: usize,
}

/// Sends a job's requests to a server. Returns with the head of the first answer.
///
/// # Errors
/// The errors of [`Backend::start`](chiasm_backend::Backend::start).
pub(crate) async fn begin(
    shared: &Arc<Shared>,
    manner: &Manner,
    job: Arc<Job>,
) -> Result<RunningSglangJob, JobError> {
    request::check(&job, manner)?;
    let asking = Asking {
        lower_is_earlier: manner.lower_is_earlier,
        mark: rand::random(),
        tells_prompt: !job.media.is_empty() && manner.compares_next(),
    };
    let first = ask(shared.clone(), job.clone(), asking, 0).await?;
    let delivered = shared.delivered(job.media.len() * job.sampling.n);
    let is_computed = watch::Sender::new(false);
    let later = (1..job.sampling.n).map(|choice| {
        let shared = shared.clone();
        let job = job.clone();
        let mut is_computed = is_computed.subscribe();
        let asked = async move {
            // The sender lives as long as the job.
            let _ = is_computed.wait_for(|is_computed| *is_computed).await;
            let response = ask(shared, job, asking, choice).await.map_err(|error| match error {
                // The server has begun with the first request of the job, so none of these errors
                // means that it did not begin.
                JobError::NotTaken(death) => JobError::Dead(death),
                JobError::KeyRefused { status, message }
                | JobError::Overloaded { status, message, .. } => {
                    JobError::ServerFailed { status, message }
                }
                error => error,
            });
            Ok(chunks(response?))
        };
        stream::once(asked).try_flatten().boxed()
    });
    let first = chunks(first).boxed();
    let answer = |body| Answer {
        body: Some(body),
        events: shared.server.events(),
        came: VecDeque::new(),
        has_ended: false,
        tokens: 0,
    };
    let answers: Vec<Answer> = std::iter::once(first).chain(later).map(answer).collect();
    let ended = shared.when_ended();
    let shared = shared.clone();
    Ok(RunningSglangJob { shared, job, answers, is_computed, turn: 0, delivered, ended })
}

async fn ask(
    shared: Arc<Shared>,
    job: Arc<Job>,
    asking: Asking,
    choice: usize,
) -> Result<Response, JobError> {
    let body = request::of(&job, asking, choice)?;
    shared.ask(GENERATE, body, headers(&job.id, job.trace.as_ref()), &job).await
}

/// Returns the body of an answer as it comes.
fn chunks(response: Response) -> impl stream::Stream<Item = Result<Bytes, JobError>> + Send {
    Pieces::of(response).map_err(|error| JobError::Dead(Death::new(format!("the server: {error}"))))
}

impl RunningSglangJob {
    /// Builds the error for an answer that no server of this kind gives.
    fn nonsense(&self, what: &str) -> JobError {
        JobError::Dead(Death::new(format!("the server tells nonsense: {what}")))
    }

    /// Parses the bytes that have come of one continuation.
    fn take(&mut self, choice: usize, bytes: &[u8]) -> Result<(), JobError> {
        let pushed = self.answers[choice].events.push(bytes);
        pushed.map_err(|TooLong| self.nonsense("an event is too long"))?;
        while let Some(data) = self.answers[choice].events.next() {
            if data[..] == *DONE {
                let answer = &mut self.answers[choice];
                answer.body = None;
                return if answer.has_ended { Ok(()) } else { Err(JobError::Unfinished) };
            }
            let event: Event =
                serde_json::from_slice(&data).map_err(|error| self.nonsense(&error.to_string()))?;
            self.take_event(choice, &event)?;
            if self.answers[choice].body.is_none() {
                // The continuation was cut off here: later tokens are not wanted.
                break;
            }
        }
        Ok(())
    }

    fn take_event(&mut self, choice: usize, event: &Event) -> Result<(), JobError> {
        let answer = &self.answers[choice];
        if answer.has_ended {
            return Err(self.nonsense("more behind the end"));
        }
        let told = answer.tokens;
        let News { tokens, logprobs, finish } =
            event.news(told, &self.job.sampling).map_err(|why| match why {
                Stopped::Refused(status, message) => {
                    self.shared.refusal(status, &message, &self.job)
                }
                Stopped::Aborted => JobError::Unfinished,
                Stopped::Nonsense(what) => self.nonsense(what),
            })?;
        if told == 0 && choice == 0 {
            self.compare(event);
        }
        self.is_computed.send_replace(true);
        let prefill = event.meta_info.as_ref().and_then(MetaInfo::prefill).filter(|_| told == 0);
        let answer = &mut self.answers[choice];
        answer.tokens += tokens.len();
        answer.has_ended = finish.is_some();
        let is_cut = answer.has_ended && event.goes_on();
        let content = Content::Tokens { tokens, logprobs };
        answer.came.push_back(Output { choice, content, finish, prefill, prompt_logprobs: None });
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
        let why = match &event.prompt_token_ids {
            Some(prompt) if count == prompt.len() => {
                let differs = |(ours, theirs): (&chiasm_types::TokenId, &u32)| ours.0 != *theirs;
                expected
                    .iter()
                    .zip(prompt)
                    .position(differs)
                    .map(|place| format!(", others from token {place} on"))
            }
            _ => None,
        };
        if why.is_some() || count != expected.len() {
            let all = expected.len();
            let why = why.unwrap_or_default();
            self.shared.distrust(format!(
                "it makes {count} tokens of a prompt that was expected to have {all}{why}"
            ));
        }
    }

    /// Takes the next output of any continuation.
    fn next_output(&mut self) -> Option<Output> {
        self.answers.iter_mut().find_map(|answer| answer.came.pop_front())
    }

    /// Polls all connections once. Returns `true` if anything has come.
    fn look(&mut self, context: &mut Context<'_>) -> Result<bool, JobError> {
        let mut has_come = false;
        self.turn += 1;
        for at in 0..self.answers.len() {
            let choice = (self.turn + at) % self.answers.len();
            let Some(body) = &mut self.answers[choice].body else { continue };
            match body.poll_next_unpin(context) {
                Poll::Pending => continue,
                Poll::Ready(Some(Ok(bytes))) => self.take(choice, &bytes)?,
                // All of the continuation has come; the server's last word is not needed.
                Poll::Ready(_) if self.answers[choice].has_ended => {
                    self.answers[choice].body = None
                }
                Poll::Ready(Some(Err(error))) => return Err(error),
                Poll::Ready(None) => {
                    return Err(JobError::Dead(Death::new(
                        "the server ended its answer too early",
                    )));
                }
            }
            has_come = true;
        }
        Ok(has_come)
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
            let looked = match self.look(context) {
                Ok(true) => continue,
                Ok(false) => JobError::Dead(ready!(self.ended.poll_unpin(context))),
                Err(error) => error,
            };
            for answer in &mut self.answers {
                answer.body = None;
                answer.came.clear();
            }
            return Poll::Ready(Some(Err(looked)));
        }
    }

    fn stop(&mut self, choice: usize) {
        let Some(answer) = self.answers.get_mut(choice) else { return };
        answer.body = None;
        answer.came.clear();
        // The others need not wait for it any more.
        self.is_computed.send_replace(true);
    }

    fn delivered(&self) -> Delivered {
        self.delivered
    }
}
