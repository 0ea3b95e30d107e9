//! The call over which an engine of an agent is given jobs.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use chiasm_backend::inbox::{Held, MOST_UNREAD_BYTES, Receiver, Sender, inbox};
use chiasm_backend::unread::Unread;
use chiasm_backend::{Death, JobError};
use foldhash::fast::RandomState;
use prost::Message;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Status, Streaming};

use super::{AgentLink, HELLO_WITHIN, lost};
use crate::proto::generate_request::Request;
use crate::proto::job_event::Event;
use crate::proto::{GenerateReply, GenerateRequest, Job, JobEvent, Open, Stop};
use crate::{MOST_MESSAGE_BYTES, job};

/// The largest job that is sent. With what is around it, it fits into a message.
const MOST_JOB_BYTES: usize = MOST_MESSAGE_BYTES - 64;

/// What an agent says of a job, or why it says no more.
pub(super) type Told = Result<Event, JobError>;

/// All jobs on one start of an engine, until its end.
pub(super) struct Jobs {
    requests: mpsc::UnboundedSender<GenerateRequest>,
    running: Arc<Running>,
    last: AtomicU64,
    /// Hears what the agent says.
    _hearing: JoinSet<()>,
}

/// The jobs that have not ended.
#[derive(Default)]
struct Running {
    jobs: Mutex<HashMap<u64, Hearer, RandomState>>,
    /// How the engine went, if it did: there are no jobs then, and no new ones. Changed with the
    /// jobs locked.
    ended: watch::Sender<Option<Death>>,
}

/// Who hears of a job.
struct Hearer {
    sender: Sender<Told>,
    /// Whether anything has been told.
    has_heard: bool,
}

/// What becomes of the jobs that nothing was told of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unheard {
    /// An engine may have had them.
    Lost,
    /// The agent has ended the call: it has told of all that it had taken.
    NotTaken,
}

impl Jobs {
    /// Makes the call.
    ///
    /// # Errors
    /// The agent's.
    pub(super) async fn open(link: &AgentLink, engine: u32, life: u64) -> Result<Self, Status> {
        let (requests, sent) = mpsc::unbounded_channel();
        let _ =
            requests.send(message(Request::Open(Open { engine, life, frontend: link.frontend })));
        let mut client = link.jobs.clone();
        let call = client.generate(UnboundedReceiverStream::new(sent));
        let replies = tokio::time::timeout(HELLO_WITHIN, call).await;
        let replies =
            replies.map_err(|_| Status::deadline_exceeded("it does not answer"))??.into_inner();
        let running = Arc::<Running>::default();
        let mut hearing = JoinSet::new();
        let hears = running.clone();
        let aborts = requests.clone();
        hearing.spawn(async move {
            hears.hear(replies, &aborts).await;
        });
        Ok(Self { requests, running, last: AtomicU64::new(0), _hearing: hearing })
    }

    /// Gives the agent a job, of a number that is chosen here.
    ///
    /// # Errors
    /// [`JobError::NotTaken`] if the engine has ended, and [`JobError::Refused`] if no message has
    /// room for the job, or the agent would refuse it before it has read it.
    pub(super) fn begin(self: &Arc<Self>, job: Job) -> Result<Call, JobError> {
        let number = self.last.fetch_add(1, Relaxed) + 1;
        let job = Bytes::from(Job { number, ..job }.encode_to_vec());
        if job.len() > MOST_JOB_BYTES {
            return Err(JobError::Refused {
                field: "body".to_owned(),
                message: "is too long".to_owned(),
            });
        }
        if let Some(head) = job::head(&job) {
            head.check()?;
        }
        let (sender, events) = inbox(MOST_UNREAD_BYTES, &Unread::of_process().job());
        {
            let mut jobs = self.running.jobs();
            if let Some(death) = self.ended() {
                return Err(JobError::NotTaken(death));
            }
            jobs.insert(number, Hearer { sender, has_heard: false });
        }
        self.send(Request::Begin(job));
        Ok(Call { jobs: self.clone(), number, events })
    }

    /// Ends all jobs, and takes no more. Nothing if that was done before.
    pub(super) fn end(&self, death: Death) {
        self.running.end(death, Unheard::Lost);
    }

    /// How the engine went, if it did.
    pub(super) fn ended(&self) -> Option<Death> {
        self.running.ended.borrow().clone()
    }

    /// Tells how the engine went, once it has.
    pub(super) fn when_ended(&self) -> watch::Receiver<Option<Death>> {
        self.running.ended.subscribe()
    }

    /// Ends a job that can't go on.
    pub(super) fn fail(&self, number: u64, error: JobError) {
        if let Some(job) = self.running.jobs().remove(&number) {
            self.send(Request::Abort(number));
            job.sender.send(Err(error));
        }
    }

    fn send(&self, request: Request) {
        // Whoever waits for an answer is told if the call is over.
        let _ = self.requests.send(message(request));
    }
}

impl Held for Event {
    fn held_bytes(&self) -> usize {
        match self {
            Self::Output(output) => {
                let logprobs = output.logprobs.iter().map(|logprob| {
                    size_of_val(logprob)
                        + size_of_val(&logprob.top_tokens[..])
                        + size_of_val(&logprob.top_logprobs[..])
                });
                let prompt = output.prompt_logprobs.as_ref().map_or(0, |prompt| {
                    size_of_val(&prompt.tokens[..])
                        + size_of_val(&prompt.logprobs[..])
                        + size_of_val(&prompt.ranks[..])
                });
                size_of_val(&output.tokens[..]) + logprobs.sum::<usize>() + prompt
            }
            // Seldom, and mostly words.
            other => other.encoded_len(),
        }
    }
}

fn message(request: Request) -> GenerateRequest {
    GenerateRequest { request: Some(request) }
}

impl Running {
    /// Passes on what is told, to the end of the call, and ends all jobs then.
    async fn hear(
        &self,
        mut replies: Streaming<GenerateReply>,
        aborts: &mpsc::UnboundedSender<GenerateRequest>,
    ) {
        loop {
            let events = match replies.message().await {
                Ok(Some(GenerateReply { events })) => events,
                Ok(None) => {
                    let death = Death::new("its agent says no more of its jobs");
                    return self.end(death, Unheard::NotTaken);
                }
                Err(status) => return self.end(lost(&status), Unheard::Lost),
            };
            let mut jobs = self.jobs();
            for JobEvent { job: number, event } in events {
                // A kind of event that a later version tells of.
                let Some(event) = event else { continue };
                // Otherwise nobody wants to know any more.
                let Some(job) = jobs.get_mut(&number) else { continue };
                job.has_heard = true;
                if matches!(event, Event::Ended(_) | Event::Failure(_)) {
                    job.sender.send(Ok(event));
                    jobs.remove(&number);
                } else if !job.sender.offer(Ok(event)) {
                    job.sender.send(Err(JobError::Unread));
                    jobs.remove(&number);
                    let _ = aborts.send(message(Request::Abort(number)));
                }
            }
        }
    }

    fn end(&self, death: Death, unheard: Unheard) {
        let mut jobs = self.jobs();
        self.ended.send_if_modified(|ended| {
            let is_new = ended.is_none();
            ended.get_or_insert_with(|| death.clone());
            is_new
        });
        for (_, Hearer { sender, has_heard }) in jobs.drain() {
            let death = death.clone();
            let is_taken = has_heard || unheard == Unheard::Lost;
            sender.send(Err(if is_taken {
                JobError::Dead(death)
            } else {
                JobError::NotTaken(death)
            }));
        }
    }

    fn jobs(&self) -> MutexGuard<'_, HashMap<u64, Hearer, RandomState>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One job. It is aborted when this is dropped, unless it has ended.
pub(super) struct Call {
    jobs: Arc<Jobs>,
    number: u64,
    events: Receiver<Told>,
}

impl Call {
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// What the agent says next. [`JobError::Unfinished`] after the last.
    pub(super) fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Told> {
        let told = std::task::ready!(self.events.poll_next(context));
        let nothing_more =
            || Err(if self.events.is_cut() { JobError::Unread } else { JobError::Unfinished });
        Poll::Ready(told.unwrap_or_else(nothing_more))
    }

    /// Has a continuation end whose others go on.
    pub(super) fn stop(&self, choice: usize) {
        self.jobs.send(Request::Stop(Stop { job: self.number, choice: choice as u32 }));
    }

    /// All that is of interest has been told.
    pub(super) fn finish(self) {
        self.jobs.running.jobs().remove(&self.number);
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if self.jobs.running.jobs().remove(&self.number).is_some() {
            self.jobs.send(Request::Abort(self.number));
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use futures_util::future::poll_fn;

    use super::*;

    #[test]
    fn what_an_agent_said_nothing_of_before_it_ended_the_call_was_not_taken() {
        for (unheard, is_taken) in [(Unheard::NotTaken, false), (Unheard::Lost, true)] {
            let running = Running::default();
            let mut jobs = [true, false].map(|has_heard| {
                let (sender, events) = inbox(MOST_UNREAD_BYTES, &Unread::of_process().job());
                running.jobs().insert(has_heard.into(), Hearer { sender, has_heard });
                events
            });
            running.end(Death::new("it went down"), unheard);
            let ends = jobs.each_mut().map(|job| {
                let told = poll_fn(|context| job.poll_next(context)).now_or_never().flatten();
                matches!(told, Some(Err(JobError::Dead(_))))
            });
            assert_eq!(ends, [true, is_taken]);
        }
    }
}
