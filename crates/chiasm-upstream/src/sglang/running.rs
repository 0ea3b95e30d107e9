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
use crate::backend::Shared;
use crate::events::{Events, TooLong};
use crate::pieces::Pieces;
use crate::request::headers;
use crate::running::DONE;

/// A job, and what has come of it that nobody has asked for yet.
pub(crate) struct RunningSglangJob {
    shared: Arc<Shared>,
    job: Arc<Job>,
    /// One for each continuation.
    answers: Vec<Answer>,
    /// Whether the prompt is computed, which the other continuations wait for: then they find it in the cache.
    is_computed: watch::Sender<bool>,
    /// Which answer is looked at first, so that none waits for the others.
    turn: usize,
    delivered: Delivered,
    /// The end of the server, which may be known before its connections fail.
    ended: BoxFuture<'static, Death>,
}

type Body = BoxStream<'static, Result<Bytes, JobError>>;

struct Answer {
    /// `None` once all has come, or nothing more is wanted. Dropping it ends the connection, by which the server knows.
    body: Option<Body>,
    events: Events,
    came: VecDeque<Output>,
    has_ended: bool,
    /// Tokens that have come.
    tokens: usize,
}

/// Asks a server for what a job wants. Returns once the server has the first of its requests.
///
/// # Errors
/// Those of [`Backend::start`](chiasm_backend::Backend::start).
pub(crate) async fn begin(shared: &Arc<Shared>, manner: &Manner, job: Arc<Job>) -> Result<RunningSglangJob, JobError> {
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
        let (shared, job, mut is_computed) = (shared.clone(), job.clone(), is_computed.subscribe());
        let asked = async move {
            // It is gone with the job alone.
            let _ = is_computed.wait_for(|is_computed| *is_computed).await;
            let response = ask(shared, job, asking, choice).await.map_err(|error| match error {
                // It had the others.
                JobError::NotTaken(death) => JobError::Dead(death),
                JobError::KeyRefused { status, message } | JobError::Overloaded { status, message, .. } => {
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
    let (shared, ended) = (shared.clone(), shared.when_ended());
    Ok(RunningSglangJob { shared, job, answers, is_computed, turn: 0, delivered, ended })
}

async fn ask(shared: Arc<Shared>, job: Arc<Job>, asking: Asking, choice: usize) -> Result<Response, JobError> {
    let body = request::of(&job, asking, choice)?;
    shared.ask(GENERATE, body, headers(&job.id, job.trace.as_ref()), &job).await
}

/// The rest of an answer, as it comes.
fn chunks(response: Response) -> impl stream::Stream<Item = Result<Bytes, JobError>> + Send {
    Pieces::of(response).map_err(|error| JobError::Dead(Death::new(format!("the server: {error}"))))
}

impl RunningSglangJob {
    /// A server that says what no server of its kind says: what it has is not to be trusted.
    fn nonsense(&self, what: &str) -> JobError {
        JobError::Dead(Death::new(format!("the server tells nonsense: {what}")))
    }

    /// Takes in what has come of one continuation.
    fn take(&mut self, choice: usize, bytes: &[u8]) -> Result<(), JobError> {
        let pushed = self.answers[choice].events.push(bytes);
        pushed.map_err(|TooLong| self.nonsense("an event is too long"))?;
        while let Some(data) = self.answers[choice].events.next() {
            if data[..] == *DONE {
                let answer = &mut self.answers[choice];
                answer.body = None;
                return if answer.has_ended { Ok(()) } else { Err(JobError::Unfinished) };
            }
            let event: Event = serde_json::from_slice(&data).map_err(|error| self.nonsense(&error.to_string()))?;
            self.take_event(choice, &event)?;
            if self.answers[choice].body.is_none() {
                // It was cut off: what comes after is not wanted.
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
        let News { tokens, logprobs, finish } = event.news(told, &self.job.sampling).map_err(|why| match why {
            Stopped::Refused(status, message) => self.shared.refusal(status, &message, &self.job),
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

    /// Holds what the server made of the prompt against what was expected.
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
                expected.iter().zip(prompt).position(differs).map(|place| format!(", others from token {place} on"))
            }
            _ => None,
        };
        if why.is_some() || count != expected.len() {
            let (all, why) = (expected.len(), why.unwrap_or_default());
            self.shared.distrust(format!("it makes {count} tokens of a prompt that was expected to have {all}{why}"));
        }
    }

    /// What has come, of whichever continuation.
    fn next_output(&mut self) -> Option<Output> {
        self.answers.iter_mut().find_map(|answer| answer.came.pop_front())
    }

    /// Looks at all connections once; whether anything has come.
    fn look(&mut self, context: &mut Context<'_>) -> Result<bool, JobError> {
        let mut has_come = false;
        self.turn += 1;
        for at in 0..self.answers.len() {
            let choice = (self.turn + at) % self.answers.len();
            let Some(body) = &mut self.answers[choice].body else { continue };
            match body.poll_next_unpin(context) {
                Poll::Pending => continue,
                Poll::Ready(Some(bytes)) => self.take(choice, &bytes?)?,
                // It ends without its last word.
                Poll::Ready(None) if self.answers[choice].has_ended => self.answers[choice].body = None,
                Poll::Ready(None) => {
                    return Err(JobError::Dead(Death::new("the server ended its answer too early")));
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
