//! The call over which a frontend sends jobs to an engine.

use std::collections::HashMap;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use chiasm_backend::{DeathReason, JobError};
use futures_util::future::{AbortHandle, Abortable, BoxFuture, FutureExt};
use futures_util::stream::FuturesUnordered;
use futures_util::{Stream, StreamExt};
use prost::Message;
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use super::arriving::LeftOutJobs;
use super::jobs::{JobContext, JobSender, run};
use super::shares::ShareGuard;
use crate::MAX_MESSAGE_BYTES;
use crate::answer::failure_to_message;
use crate::job::{self, MAX_CHOICES};
use crate::proto::generate_request::Request;
use crate::proto::job_event::Event;
use crate::proto::{self, GenerateReply, GenerateRequest, JobEvent, Stop};

/// The maximum number of jobs of one frontend on one engine. Further jobs are for another engine.
const MAX_JOBS: usize = 16_384;
/// The approximate memory of a job beside its message, in bytes; most of it is its state while it
/// runs.
const JOB_STATE_BYTES: u64 = 8 << 10;

/// The maximum number of events in one message: as many as an engine emits in one step.
const MAX_EVENTS: usize = 1024;
/// The maximum size of a message with more than one event, in bytes.
const MAX_BATCH_BYTES: usize = 256 << 10;
/// The maximum size of an event, in bytes. With its envelope it fits into a message.
const MAX_EVENT_BYTES: usize = MAX_MESSAGE_BYTES - 64;

/// The jobs of one frontend on one engine, as the stream of their events.
///
/// Jobs only make progress while this stream is polled, all in one task, so that the events of an
/// engine step are sent together. Dropping this aborts the jobs, as the frontend is gone.
pub(super) struct JobCall {
    context: Arc<JobContext>,
    requests: Streaming<GenerateRequest>,
    /// The jobs that were replaced by an empty request.
    left_out_jobs: LeftOutJobs,
    running: FuturesUnordered<Abortable<BoxFuture<'static, u64>>>,
    /// The handles of running jobs, by number.
    handles: HashMap<u64, Handle>,
    events: mpsc::UnboundedReceiver<JobEvent>,
    event_sender: mpsc::UnboundedSender<JobEvent>,
    /// The event that did not fit into the last message.
    deferred: Option<JobEvent>,
    /// Resolves when the agent goes down.
    calls_ended: BoxFuture<'static, ()>,
    /// `true` if no jobs run and none are taken, so that only queued events are left to send.
    has_ended: bool,
}

struct Handle {
    abort: AbortHandle,
    /// Takes the continuations to stop.
    stop: mpsc::UnboundedSender<usize>,
    /// `true` for each continuation that was not stopped: each can be stopped once.
    open: Vec<bool>,
    /// The job's share of memory.
    _charge: ShareGuard,
}

impl Handle {
    /// Creates the handle of a job with `n` continuations, and the receiver of those to stop.
    fn new(
        abort: AbortHandle,
        n: usize,
        charge: ShareGuard,
    ) -> (Self, mpsc::UnboundedReceiver<usize>) {
        let (stop, stops) = mpsc::unbounded_channel();
        (Self { abort, stop, open: vec![true; n], _charge: charge }, stops)
    }

    /// Stops a continuation once. A job that waits for its media does not read stops, so repeated
    /// ones must not pile up.
    fn stop(&mut self, choice: u32) {
        if let Some(open) = self.open.get_mut(choice as usize)
            && mem::take(open)
        {
            let _ = self.stop.send(choice as usize);
        }
    }
}

impl JobCall {
    /// Creates a call without jobs yet.
    pub(super) fn new(
        context: JobContext,
        requests: Streaming<GenerateRequest>,
        left_out_jobs: LeftOutJobs,
    ) -> Self {
        let (event_sender, events) = mpsc::unbounded_channel();
        let calls_ended = context.drain.wait_calls_ended().boxed();
        Self {
            context: Arc::new(context),
            requests,
            left_out_jobs,
            running: FuturesUnordered::new(),
            handles: HashMap::new(),
            events,
            event_sender,
            deferred: None,
            calls_ended,
            has_ended: false,
        }
    }

    fn handle_request(&mut self, request: Request) -> Result<(), Status> {
        match request {
            Request::Open(_) => return Err(Status::invalid_argument("the call is already open")),
            Request::Begin(job) => self.begin(job)?,
            Request::Stop(Stop { job, choice }) => {
                if let Some(handle) = self.handles.get_mut(&job) {
                    handle.stop(choice);
                }
            }
            Request::Abort(job) => self.abort(job),
        }
        Ok(())
    }

    fn begin(&mut self, message: Bytes) -> Result<(), Status> {
        let malformed = || Status::invalid_argument("a job is malformed");
        let head = job::parse_head(&message).ok_or_else(malformed)?;
        let number = head.number;
        if self.handles.contains_key(&number) {
            return Err(Status::invalid_argument("the number of a job is already in use"));
        }
        let sender = JobSender { job: number, events: self.event_sender.clone() };
        let fail = |error| sender.send(Event::Failure(failure_to_message(&error)));
        if let Err(refused) = head.check() {
            fail(refused);
            return Ok(());
        }
        let not_taken = |why| fail(JobError::NotTaken(DeathReason::new(why)));
        if self.handles.len() == MAX_JOBS {
            not_taken(format!("this frontend has the maximum of {MAX_JOBS} jobs on the engine"));
            return Ok(());
        }
        // A job never waits for memory.
        let full = |_| {
            not_taken(
                "the agent has no memory for more jobs of this frontend (--max-bytes-in-flight)"
                    .to_owned(),
            )
        };
        let Ok(mut charge) =
            self.context.memory.acquire(JOB_STATE_BYTES + head.bytes).map_err(full)
        else {
            return Ok(());
        };
        let job = proto::Job::decode(message).map_err(|_| malformed())?;
        if charge.grow(job::claimed_bytes(&job)).map_err(full).is_err() {
            return Ok(());
        }
        let (abort, registration) = AbortHandle::new_pair();
        let n = job.sampling.as_ref().map_or(0, |sampling| sampling.n as usize);
        let (handle, stops) = Handle::new(abort, n.min(MAX_CHOICES), charge);
        let running = run(self.context.clone(), job, stops, sender).map(move |()| number);
        self.running.push(Abortable::new(running.boxed(), registration));
        self.handles.insert(number, handle);
        Ok(())
    }

    /// Reports jobs that were left out because there was no memory for their messages.
    fn report_left_out(&mut self) {
        for job in self.left_out_jobs.take() {
            let why =
                DeathReason::new("the agent has no memory for more messages of this frontend");
            let failure = failure_to_message(&JobError::NotTaken(why));
            JobSender { job, events: self.event_sender.clone() }.send(Event::Failure(failure));
        }
    }

    fn abort(&mut self, job: u64) {
        if let Some(handle) = self.handles.remove(&job) {
            handle.abort.abort();
        }
    }

    /// Ends the running jobs and takes no more.
    fn end(&mut self) {
        self.has_ended = true;
        self.handles.clear();
        self.running.clear();
    }

    /// Ends the running jobs because the agent goes down, and tells the frontend. Jobs without any
    /// event until then were not taken by an engine.
    fn shut_down(&mut self) {
        let failure = failure_to_message(&JobError::Dead(DeathReason::new("the agent shut down")));
        for job in self.handles.keys() {
            JobSender { job: *job, events: self.event_sender.clone() }
                .send(Event::Failure(failure.clone()));
        }
        self.end();
    }

    /// Polls for events, as many as fit into one message.
    fn poll_events(&mut self, context: &mut Context<'_>) -> Poll<Vec<JobEvent>> {
        let mut events = Vec::new();
        let mut bytes = 0;
        while events.len() < MAX_EVENTS {
            let next = match self.deferred.take() {
                Some(event) => Poll::Ready(Some(event)),
                None => self.events.poll_recv(context),
            };
            // Never `None`, as `event_sender` is a sender.
            let Poll::Ready(Some(mut event)) = next else { break };
            let mut length = event.encoded_len();
            if length > MAX_EVENT_BYTES {
                tracing::warn!(length, "an event of a job is too long for a message");
                self.abort(event.job);
                event.event = Some(Event::Failure(failure_to_message(&JobError::Failed)));
                length = event.encoded_len();
            }
            if !events.is_empty() && bytes + length > MAX_BATCH_BYTES {
                self.deferred = Some(event);
                break;
            }
            bytes += length;
            events.push(event);
        }
        if events.is_empty() { Poll::Pending } else { Poll::Ready(events) }
    }
}

impl Stream for JobCall {
    type Item = Result<GenerateReply, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        while !this.has_ended
            && let Poll::Ready(request) = this.requests.poll_next_unpin(context)
        {
            let handled = match request {
                Some(Ok(GenerateRequest { request: Some(request) })) => {
                    this.handle_request(request).map_err(Some)
                }
                // A job that was left out, or a kind of request that only later versions know.
                Some(Ok(GenerateRequest { request: None })) => {
                    this.report_left_out();
                    Ok(())
                }
                Some(Err(status)) => Err(Some(status)),
                None => Err(None),
            };
            if let Err(status) = handled {
                this.end();
                return Poll::Ready(status.map(Err));
            }
        }
        while let Poll::Ready(Some(ended)) = this.running.poll_next_unpin(context) {
            // Aborted jobs have been removed already.
            if let Ok(number) = ended {
                this.handles.remove(&number);
            }
        }
        // Checked after the requests, so that those received so far are handled.
        if !this.has_ended && this.calls_ended.poll_unpin(context).is_ready() {
            this.shut_down();
        }
        match this.poll_events(context) {
            Poll::Ready(events) => Poll::Ready(Some(Ok(GenerateReply { events }))),
            // The channel is checked, as tokio's cooperative budget may also cause `Pending`.
            Poll::Pending if this.has_ended && this.events.is_empty() => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use chiasm_media::ByteBudget;

    use super::*;
    use crate::peer::Peer;
    use crate::server::shares::Shares;

    #[test]
    fn continuation_is_stopped_once() {
        let charge = Shares::new(ByteBudget::new(0), 1).for_peer(Peer::default()).empty();
        let (mut handle, mut stops) = Handle::new(AbortHandle::new_pair().0, 2, charge);
        for choice in [1, 1, 2, u32::MAX, 0, 1, 0] {
            handle.stop(choice);
        }
        drop(handle);
        assert_eq!(std::iter::from_fn(|| stops.try_recv().ok()).collect::<Vec<_>>(), [1, 0]);
    }
}
