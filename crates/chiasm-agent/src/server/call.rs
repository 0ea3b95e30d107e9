//! The call over which a frontend gives an engine jobs.

use std::collections::HashMap;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use chiasm_backend::{Death, JobError};
use futures_util::future::{AbortHandle, Abortable, BoxFuture, FutureExt};
use futures_util::stream::FuturesUnordered;
use futures_util::{Stream, StreamExt};
use prost::Message;
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use super::arriving::WithoutRoom;
use super::jobs::{Place, Teller, run};
use super::shares::Held;
use crate::MOST_MESSAGE_BYTES;
use crate::answer::failure_to_message;
use crate::job::{self, MOST_CHOICES};
use crate::proto::generate_request::Request;
use crate::proto::job_event::Event;
use crate::proto::{self, GenerateReply, GenerateRequest, JobEvent, Stop};

/// Jobs that one frontend may have on one engine. More are for another engine.
const MOST_JOBS: usize = 16_384;
/// Bytes that a job takes beside what it was sent, about: most of them are what it remembers while
/// it runs.
const RUNNING_BYTES: u64 = 8 << 10;

/// Events in one message: as many as an engine tells of in one step.
const MOST_EVENTS: usize = 1024;
/// Bytes of a message that has more than one event.
const FULL_MESSAGE: usize = 256 << 10;
/// The largest event that is told. With what is around it, it fits into a message.
const MOST_EVENT_BYTES: usize = MOST_MESSAGE_BYTES - 64;

/// The jobs of one frontend on one engine, as what it is told of them. They go on for as long as
/// somebody asks, all in the task that does, so that what an engine tells in a step is told
/// together. When this is dropped they are aborted: the frontend is gone.
pub(super) struct JobCall {
    place: Arc<Place>,
    requests: Streaming<GenerateRequest>,
    /// Jobs in whose place an empty request comes.
    without_room: WithoutRoom,
    running: FuturesUnordered<Abortable<BoxFuture<'static, u64>>>,
    /// Of the jobs that run, by their numbers.
    handles: HashMap<u64, Handle>,
    events: mpsc::UnboundedReceiver<JobEvent>,
    told_by: mpsc::UnboundedSender<JobEvent>,
    /// Had no room in the last message.
    held: Option<JobEvent>,
    /// The agent goes down.
    over: BoxFuture<'static, ()>,
    /// No jobs run, and none are taken: what is yet to be told is the last.
    is_over: bool,
}

struct Handle {
    abort: AbortHandle,
    /// Takes continuations that are to end.
    stop: mpsc::UnboundedSender<usize>,
    /// The continuations that nobody has ended: each can be ended once.
    open: Vec<bool>,
    /// Counts what the job holds.
    _charge: Held,
}

impl Handle {
    /// A job of `n` continuations, and those that are to end.
    fn new(abort: AbortHandle, n: usize, charge: Held) -> (Self, mpsc::UnboundedReceiver<usize>) {
        let (stop, stops) = mpsc::unbounded_channel();
        (Self { abort, stop, open: vec![true; n], _charge: charge }, stops)
    }

    /// A job may wait for its media and take none: more than it has continuations must not gather.
    fn stop(&mut self, choice: u32) {
        if let Some(open) = self.open.get_mut(choice as usize)
            && mem::take(open)
        {
            let _ = self.stop.send(choice as usize);
        }
    }
}

impl JobCall {
    /// No jobs yet, and those that the frontend asks for.
    pub(super) fn new(
        place: Place,
        requests: Streaming<GenerateRequest>,
        without_room: WithoutRoom,
    ) -> Self {
        let (told_by, events) = mpsc::unbounded_channel();
        let over = place.drain.over().boxed();
        Self {
            place: Arc::new(place),
            requests,
            without_room,
            running: FuturesUnordered::new(),
            handles: HashMap::new(),
            events,
            told_by,
            held: None,
            over,
            is_over: false,
        }
    }

    fn take(&mut self, request: Request) -> Result<(), Status> {
        match request {
            Request::Open(_) => return Err(Status::invalid_argument("the call is open")),
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
        let head = job::head(&message).ok_or_else(malformed)?;
        let number = head.number;
        if self.handles.contains_key(&number) {
            return Err(Status::invalid_argument("a job has the number of another one"));
        }
        let teller = Teller { job: number, events: self.told_by.clone() };
        let fail = |error| teller.tell(Event::Failure(failure_to_message(&error)));
        if let Err(refused) = head.check() {
            fail(refused);
            return Ok(());
        }
        let not_taken = |why| fail(JobError::NotTaken(Death::new(why)));
        if self.handles.len() == MOST_JOBS {
            not_taken(format!("this frontend has {MOST_JOBS} jobs there"));
            return Ok(());
        }
        // Nothing waits for room.
        let full = |_| {
            not_taken(
                "the agent has no memory for more jobs from there (--max-bytes-in-flight)"
                    .to_owned(),
            )
        };
        let Ok(mut charge) = self.place.memory.take(RUNNING_BYTES + head.bytes).map_err(full)
        else {
            return Ok(());
        };
        let job = proto::Job::decode(message).map_err(|_| malformed())?;
        if charge.grow(job::claimed_bytes(&job)).map_err(full).is_err() {
            return Ok(());
        }
        let (abort, registration) = AbortHandle::new_pair();
        let n = job.sampling.as_ref().map_or(0, |sampling| sampling.n as usize);
        let (handle, stops) = Handle::new(abort, n.min(MOST_CHOICES), charge);
        let running = run(self.place.clone(), job, stops, teller).map(move |()| number);
        self.running.push(Abortable::new(running.boxed(), registration));
        self.handles.insert(number, handle);
        Ok(())
    }

    /// Tells of jobs that there was no room for while they came.
    fn leave_out(&mut self) {
        for job in self.without_room.take() {
            let why = Death::new("the agent has no room for more that is on its way from there");
            let failure = failure_to_message(&JobError::NotTaken(why));
            Teller { job, events: self.told_by.clone() }.tell(Event::Failure(failure));
        }
    }

    fn abort(&mut self, job: u64) {
        if let Some(handle) = self.handles.remove(&job) {
            handle.abort.abort();
        }
    }

    /// Takes no more jobs, and ends those that run.
    fn end(&mut self) {
        self.is_over = true;
        self.handles.clear();
        self.running.clear();
    }

    /// The same for a frontend that is there: if it has heard nothing of a job then, no engine has
    /// had it.
    fn go_down(&mut self) {
        let failure = failure_to_message(&JobError::Dead(Death::new("its agent went down")));
        for job in self.handles.keys() {
            Teller { job: *job, events: self.told_by.clone() }
                .tell(Event::Failure(failure.clone()));
        }
        self.end();
    }

    /// What there is to be told, as much as goes into one message.
    fn poll_events(&mut self, context: &mut Context<'_>) -> Poll<Vec<JobEvent>> {
        let (mut events, mut bytes) = (Vec::new(), 0);
        while events.len() < MOST_EVENTS {
            let next = match self.held.take() {
                Some(event) => Poll::Ready(Some(event)),
                None => self.events.poll_recv(context),
            };
            // A sender is here.
            let Poll::Ready(Some(mut event)) = next else { break };
            let mut length = event.encoded_len();
            if length > MOST_EVENT_BYTES {
                tracing::warn!(length, "what an engine says of a job fits into no message");
                self.abort(event.job);
                event.event = Some(Event::Failure(failure_to_message(&JobError::Failed)));
                length = event.encoded_len();
            }
            if !events.is_empty() && bytes + length > FULL_MESSAGE {
                self.held = Some(event);
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
        while !this.is_over
            && let Poll::Ready(request) = this.requests.poll_next_unpin(context)
        {
            let taken = match request {
                Some(Ok(GenerateRequest { request: Some(request) })) => {
                    this.take(request).map_err(Some)
                }
                // It stands for a job that is left out, or is what a later version may ask for.
                Some(Ok(GenerateRequest { request: None })) => {
                    this.leave_out();
                    Ok(())
                }
                Some(Err(status)) => Err(Some(status)),
                None => Err(None),
            };
            if let Err(status) = taken {
                this.end();
                return Poll::Ready(status.map(Err));
            }
        }
        while let Poll::Ready(Some(ended)) = this.running.poll_next_unpin(context) {
            // Those that were aborted are not among them any more.
            if let Ok(number) = ended {
                this.handles.remove(&number);
            }
        }
        // Behind all that the frontend has asked for so far.
        if !this.is_over && this.over.poll_unpin(context).is_ready() {
            this.go_down();
        }
        match this.poll_events(context) {
            Poll::Ready(events) => Poll::Ready(Some(Ok(GenerateReply { events }))),
            // A task that has done much may be told that there is nothing, and is asked again.
            Poll::Pending if this.is_over && this.events.is_empty() => Poll::Ready(None),
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
    fn a_continuation_is_ended_once() {
        let charge = Shares::new(ByteBudget::new(0), 1).of(Peer::default()).nothing();
        let (mut handle, mut stops) = Handle::new(AbortHandle::new_pair().0, 2, charge);
        for choice in [1, 1, 2, u32::MAX, 0, 1, 0] {
            handle.stop(choice);
        }
        drop(handle);
        assert_eq!(std::iter::from_fn(|| stops.try_recv().ok()).collect::<Vec<_>>(), [1, 0]);
    }
}
