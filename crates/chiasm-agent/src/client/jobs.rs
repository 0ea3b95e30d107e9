//! The call that carries jobs to an engine of an agent.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use chiasm_backend::inbox::{HeapBytes, MAX_UNREAD_BYTES_PER_JOB, Receiver, Sender, inbox};
use chiasm_backend::unread::UnreadBudget;
use chiasm_backend::{DeathReason, JobError};
use foldhash::fast::RandomState;
use prost::Message;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Status, Streaming};

use super::{AgentLink, CALL_TIMEOUT, connection_lost};
use crate::proto::generate_request::Request;
use crate::proto::job_event::Event;
use crate::proto::{GenerateReply, GenerateRequest, Job, JobEvent, Open, Stop};
use crate::{MAX_MESSAGE_BYTES, job};

/// The maximum size of an encoded job, in bytes. With its envelope it fits into a message.
const MAX_JOB_BYTES: usize = MAX_MESSAGE_BYTES - 64;

/// An event of a job, or the error that ended it.
pub(super) type JobUpdate = Result<Event, JobError>;

/// The jobs on one start of an engine, until its end.
pub(super) struct Jobs {
    requests: mpsc::UnboundedSender<GenerateRequest>,
    running: Arc<RunningJobs>,
    last_number: AtomicU64,
    /// The task that receives events from the agent.
    _receiving: JoinSet<()>,
}

/// The jobs that have not ended.
#[derive(Default)]
struct RunningJobs {
    jobs: Mutex<HashMap<u64, JobListener, RandomState>>,
    /// The death reason of an engine that has ended. There are no jobs then, and no new ones.
    /// Changed while the jobs are locked.
    ended: watch::Sender<Option<DeathReason>>,
}

/// The receiver of a job's events.
struct JobListener {
    sender: Sender<JobUpdate>,
    /// `true` if the agent has sent any event of the job.
    has_events: bool,
}

/// The fate of the jobs without any event.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SilentJobs {
    /// An engine may have taken them.
    Lost,
    /// No engine has taken them: the agent has ended the call, and it sends an event of each job
    /// that it has taken.
    NotTaken,
}

impl Jobs {
    /// Opens the call.
    ///
    /// # Errors
    /// The agent's status.
    pub(super) async fn open(link: &AgentLink, engine: u32, life: u64) -> Result<Self, Status> {
        let (requests, queued) = mpsc::unbounded_channel();
        let _ =
            requests.send(message(Request::Open(Open { engine, life, frontend: link.frontend })));
        let mut client = link.jobs.clone();
        let call = client.generate(UnboundedReceiverStream::new(queued));
        let replies = tokio::time::timeout(CALL_TIMEOUT, call).await;
        let replies =
            replies.map_err(|_| Status::deadline_exceeded("no answer in time"))??.into_inner();
        let running = Arc::<RunningJobs>::default();
        let mut receiving = JoinSet::new();
        let receiver = running.clone();
        let aborts = requests.clone();
        receiving.spawn(async move {
            receiver.receive(replies, &aborts).await;
        });
        Ok(Self { requests, running, last_number: AtomicU64::new(0), _receiving: receiving })
    }

    /// Sends the agent a job, with a number chosen here.
    ///
    /// # Errors
    /// [`JobError::NotTaken`] if the engine has ended. [`JobError::Refused`] if the job does not
    /// fit into a message, or if the agent would refuse it before decoding.
    pub(super) fn begin(self: &Arc<Self>, job: Job) -> Result<JobHandle, JobError> {
        let number = self.last_number.fetch_add(1, Relaxed) + 1;
        let job = Bytes::from(Job { number, ..job }.encode_to_vec());
        if job.len() > MAX_JOB_BYTES {
            return Err(JobError::Refused {
                field: "body".to_owned(),
                message: "is too long".to_owned(),
            });
        }
        if let Some(head) = job::parse_head(&job) {
            head.check()?;
        }
        let (sender, events) = inbox(MAX_UNREAD_BYTES_PER_JOB, &UnreadBudget::global().new_share());
        {
            let mut jobs = self.running.jobs();
            if let Some(death) = self.ended() {
                return Err(JobError::NotTaken(death));
            }
            jobs.insert(number, JobListener { sender, has_events: false });
        }
        self.send(Request::Begin(job));
        Ok(JobHandle { jobs: self.clone(), number, events })
    }

    /// Ends all jobs and takes no more. A second call does nothing.
    pub(super) fn end(&self, death: DeathReason) {
        self.running.end(death, SilentJobs::Lost);
    }

    /// Returns the engine's death reason if it has ended.
    pub(super) fn ended(&self) -> Option<DeathReason> {
        self.running.ended.borrow().clone()
    }

    /// Returns a receiver of the engine's death reason.
    pub(super) fn watch_end(&self) -> watch::Receiver<Option<DeathReason>> {
        self.running.ended.subscribe()
    }

    /// Ends a job with an error, and aborts it at the agent.
    pub(super) fn fail(&self, number: u64, error: JobError) {
        if let Some(job) = self.running.jobs().remove(&number) {
            self.send(Request::Abort(number));
            job.sender.send(Err(error));
        }
    }

    fn send(&self, request: Request) {
        // If the call is over, the jobs have been ended with an error already.
        let _ = self.requests.send(message(request));
    }
}

impl HeapBytes for Event {
    fn heap_bytes(&self) -> usize {
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
            // Other events are rare and mostly text.
            other => other.encoded_len(),
        }
    }
}

fn message(request: Request) -> GenerateRequest {
    GenerateRequest { request: Some(request) }
}

impl RunningJobs {
    /// Passes on events until the call ends, then ends all jobs.
    async fn receive(
        &self,
        mut replies: Streaming<GenerateReply>,
        aborts: &mpsc::UnboundedSender<GenerateRequest>,
    ) {
        loop {
            let events = match replies.message().await {
                Ok(Some(GenerateReply { events })) => events,
                Ok(None) => {
                    let death = DeathReason::new("the agent ended the call of its jobs");
                    return self.end(death, SilentJobs::NotTaken);
                }
                Err(status) => return self.end(connection_lost(&status), SilentJobs::Lost),
            };
            let mut jobs = self.jobs();
            for JobEvent { job: number, event } in events {
                // Skips kinds of events that only later versions know.
                let Some(event) = event else { continue };
                // Skips events of jobs that have ended here.
                let Some(job) = jobs.get_mut(&number) else { continue };
                job.has_events = true;
                if matches!(event, Event::Ended(_) | Event::Failure(_)) {
                    job.sender.send(Ok(event));
                    jobs.remove(&number);
                } else if !job.sender.try_send(Ok(event)) {
                    job.sender.send(Err(JobError::Unread));
                    jobs.remove(&number);
                    let _ = aborts.send(message(Request::Abort(number)));
                }
            }
        }
    }

    fn end(&self, death: DeathReason, silent_jobs: SilentJobs) {
        let mut jobs = self.jobs();
        self.ended.send_if_modified(|ended| {
            let is_new = ended.is_none();
            ended.get_or_insert_with(|| death.clone());
            is_new
        });
        for (_, JobListener { sender, has_events }) in jobs.drain() {
            let death = death.clone();
            let is_taken = has_events || silent_jobs == SilentJobs::Lost;
            sender.send(Err(if is_taken {
                JobError::Dead(death)
            } else {
                JobError::NotTaken(death)
            }));
        }
    }

    fn jobs(&self) -> MutexGuard<'_, HashMap<u64, JobListener, RandomState>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running job. Dropping this aborts the job, unless it has ended.
pub(super) struct JobHandle {
    jobs: Arc<Jobs>,
    number: u64,
    events: Receiver<JobUpdate>,
}

impl JobHandle {
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Polls for the job's next event. Returns [`JobError::Unfinished`] after the last one.
    pub(super) fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<JobUpdate> {
        let update = std::task::ready!(self.events.poll_next(context));
        let end =
            || Err(if self.events.is_cut() { JobError::Unread } else { JobError::Unfinished });
        Poll::Ready(update.unwrap_or_else(end))
    }

    /// Stops one continuation while others go on.
    pub(super) fn stop(&self, choice: usize) {
        self.jobs.send(Request::Stop(Stop { job: self.number, choice: choice as u32 }));
    }

    /// Forgets the job without aborting it, as all its outputs have arrived.
    pub(super) fn finish(self) {
        self.jobs.running.jobs().remove(&self.number);
    }
}

impl Drop for JobHandle {
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
    fn jobs_without_events_are_not_taken_if_the_agent_ends_the_call() {
        for (silent_jobs, is_taken) in [(SilentJobs::NotTaken, false), (SilentJobs::Lost, true)] {
            let running = RunningJobs::default();
            let mut jobs = [true, false].map(|has_events| {
                let (sender, events) =
                    inbox(MAX_UNREAD_BYTES_PER_JOB, &UnreadBudget::global().new_share());
                running.jobs().insert(has_events.into(), JobListener { sender, has_events });
                events
            });
            running.end(DeathReason::new("the agent shut down"), silent_jobs);
            let ends = jobs.each_mut().map(|job| {
                let update = poll_fn(|context| job.poll_next(context)).now_or_never().flatten();
                matches!(update, Some(Err(JobError::Dead(_))))
            });
            assert_eq!(ends, [true, is_taken]);
        }
    }
}
