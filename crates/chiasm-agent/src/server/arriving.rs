//! Accounting of incomplete messages: their bytes count as they arrive, whatever length is claimed.

use std::collections::VecDeque;
use std::mem;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http_body::Frame;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower_service::Service;

use super::shares::{ShareGuard, Shares};
use crate::peer::Peer;
use crate::{CHUNK_BYTES, MAX_MESSAGE_BYTES, job};

/// The maximum number of bytes of all incomplete messages, from all frontends.
pub(super) const MAX_INCOMING_BYTES: u64 = 512 << 20;
/// The maximum size in bytes of a message of calls other than those of jobs: files and tensors are
/// sent in pieces.
const MAX_SHORT_MESSAGE_BYTES: usize = 4 * CHUNK_BYTES;
/// The length of the prefix of a gRPC message: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;
/// An empty message.
const EMPTY_MESSAGE: &[u8] = &[0; PREFIX_BYTES];
/// The number of uncounted bytes of each message. So a message that ends a job always gets through,
/// and the number of a left-out job can be read.
const UNCOUNTED_BYTES: usize = 64;
/// The size in bytes from which a piece is kept as it is. A smaller piece may be part of a much
/// larger buffer.
const MIN_KEPT_PIECE_BYTES: usize = 8 << 10;

/// The jobs of a call that were left out because there was no room for their messages. Each is
/// replaced by an empty message.
#[derive(Clone, Default)]
pub(super) struct LeftOutJobs(Arc<Mutex<Vec<u64>>>);

impl LeftOutJobs {
    fn add(&self, job: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(job);
    }

    /// Takes the numbers of the jobs that were left out since the last call.
    pub(super) fn take(&self) -> Vec<u64> {
        mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A service that counts callers' messages while they arrive, and passes them on when they are
/// complete.
///
/// A job without room is left out, and goes to another agent. No message waits for room, so
/// messages that hold some always make progress. Other calls transfer one thing each: a message
/// without room ends the call. A frontend's messages are complete within milliseconds. A message
/// that takes much longer ends its call, which releases its room.
#[derive(Clone)]
pub(super) struct CountingService<S> {
    service: S,
    arriving: Shares,
    /// The time in which a message has to be complete.
    timeout: Duration,
}

impl<S> CountingService<S> {
    /// Counts messages in `arriving`, each for at most `timeout`.
    pub(super) fn new(service: S, arriving: Shares, timeout: Duration) -> Self {
        Self { service, arriving, timeout }
    }
}

impl<S: NamedService> NamedService for CountingService<S> {
    const NAME: &'static str = S::NAME;
}

impl<S: Service<http::Request<Body>>> Service<http::Request<Body>> for CountingService<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> S::Future {
        let is_jobs = request.uri().path().ends_with("/Generate");
        let max_bytes = if is_jobs { MAX_MESSAGE_BYTES } else { MAX_SHORT_MESSAGE_BYTES };
        let peer = request.extensions().get::<Peer>().copied().unwrap_or_default();
        let left_out_jobs = is_jobs.then(LeftOutJobs::default);
        if let Some(jobs) = &left_out_jobs {
            request.extensions_mut().insert(jobs.clone());
        }
        let guard = self.arriving.for_peer(peer).empty();
        let message = IncomingMessage::new(guard, max_bytes, left_out_jobs);
        let message = Arc::new(Mutex::new(message));
        let timeout = self.timeout;
        let request =
            request.map(|body| Body::new(CountedBody { body, message, timeout, deadline: None }));
        self.service.call(request)
    }
}

/// A request body whose messages are counted.
struct CountedBody {
    body: Body,
    message: Arc<Mutex<IncomingMessage>>,
    /// The time in which a message has to be complete.
    timeout: Duration,
    /// The deadline of the message that has begun.
    deadline: Option<Deadline>,
}

/// A timer that is cancelled on drop.
struct Deadline(JoinHandle<()>);

impl Drop for Deadline {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Deadline {
    /// Gives up the current message after `timeout`, in a task of its own: while a caller does not
    /// read its answers, its request body is not polled.
    fn new(timeout: Duration, message: Arc<Mutex<IncomingMessage>>) -> Self {
        Self(tokio::spawn(async move {
            sleep(timeout).await;
            lock(&message).give_up();
        }))
    }
}

fn lock(message: &Mutex<IncomingMessage>) -> MutexGuard<'_, IncomingMessage> {
    message.lock().unwrap_or_else(PoisonError::into_inner)
}

impl http_body::Body for CountedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Self { body, message: shared, timeout, deadline } = &mut *self;
        let mut message = lock(shared);
        loop {
            if let Some(bytes) = message.complete.pop_front() {
                *deadline = None;
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            if message.is_late {
                let reason = format!("a message was not complete after {} s", timeout.as_secs());
                return Poll::Ready(Some(Err(Status::deadline_exceeded(reason))));
            }
            match Pin::new(&mut *body).poll_frame(context)? {
                Poll::Ready(Some(frame)) => match frame.into_data() {
                    Ok(bytes) => message.add(bytes)?,
                    Err(other) => return Poll::Ready(Some(Ok(other))),
                },
                Poll::Ready(None) if message.is_begun() => {
                    return Poll::Ready(Some(Err(Status::internal("a message is truncated"))));
                }
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => {
                    if message.is_begun() {
                        message.waker = Some(context.waker().clone());
                        deadline.get_or_insert_with(|| Deadline::new(*timeout, shared.clone()));
                    } else {
                        // A left-out message ends without being passed on.
                        *deadline = None;
                    }
                    return Poll::Pending;
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        let message = lock(&self.message);
        message.complete.is_empty() && !message.is_begun() && self.body.is_end_stream()
    }
}

/// The message that is arriving, and the complete messages before it.
struct IncomingMessage {
    prefix: [u8; PREFIX_BYTES],
    /// The number of prefix bytes that have arrived.
    prefix_received: usize,
    /// The number of bytes after the prefix that are missing.
    missing: usize,
    /// The maximum size of a message.
    max_bytes: usize,
    /// The received pieces of the message, including its prefix.
    received: Pieces,
    /// The share that these pieces count towards.
    guard: ShareGuard,
    /// `true` if there was no room for the message, so that the rest is discarded.
    is_left_out: bool,
    /// `true` if the message took too long, so that the body fails.
    is_late: bool,
    /// The waker of the body, woken when the message is late.
    waker: Option<Waker>,
    /// Complete messages to pass on.
    complete: VecDeque<Bytes>,
    /// Takes the numbers of left-out jobs; `None` if the messages are not jobs.
    left_out_jobs: Option<LeftOutJobs>,
}

impl IncomingMessage {
    fn new(guard: ShareGuard, max_bytes: usize, left_out_jobs: Option<LeftOutJobs>) -> Self {
        Self {
            prefix: [0; PREFIX_BYTES],
            prefix_received: 0,
            missing: 0,
            max_bytes,
            received: Pieces::default(),
            guard,
            is_left_out: false,
            is_late: false,
            waker: None,
            complete: VecDeque::new(),
            left_out_jobs,
        }
    }

    fn is_begun(&self) -> bool {
        self.prefix_received > 0
    }

    /// Drops the current message if it is still incomplete, and all later messages.
    fn give_up(&mut self) {
        if !self.is_begun() {
            return;
        }
        self.received = Pieces::default();
        self.guard.clear();
        self.is_late = true;
        self.waker.take().into_iter().for_each(Waker::wake);
    }

    /// Adds bytes of this message and perhaps of later messages. Complete messages are no longer
    /// counted here: their reader counts them.
    fn add(&mut self, mut bytes: Bytes) -> Result<(), Status> {
        if self.is_left_out {
            let discarded = bytes.len().min(self.missing);
            bytes.advance(discarded);
            self.missing -= discarded;
            if self.missing > 0 {
                return Ok(());
            }
            self.is_left_out = false;
            self.prefix_received = 0;
        }
        let complete = bytes.split_to(self.complete_bytes(&bytes)?);
        if !complete.is_empty() {
            self.complete.extend(self.received.take());
            self.complete.push_back(complete);
            self.guard.clear();
        }
        if bytes.is_empty() {
            return Ok(());
        }
        self.received.push(bytes);
        let counted = self.received.bytes.saturating_sub(UNCOUNTED_BYTES) as u64;
        let more = counted.saturating_sub(self.guard.count());
        if more == 0 { Ok(()) } else { self.guard.grow(more).or_else(|_| self.leave_out()) }
    }

    /// Returns how many of these bytes belong to messages that are complete with them.
    fn complete_bytes(&mut self, bytes: &[u8]) -> Result<usize, Status> {
        let mut position = 0;
        let mut complete = 0;
        while position < bytes.len() {
            let rest = &bytes[position..];
            if self.prefix_received < PREFIX_BYTES {
                let end = PREFIX_BYTES.min(self.prefix_received + rest.len());
                let count = end - self.prefix_received;
                self.prefix[self.prefix_received..end].copy_from_slice(&rest[..count]);
                self.prefix_received = end;
                position += count;
                let [_, length @ ..] = self.prefix;
                self.missing =
                    if end == PREFIX_BYTES { u32::from_be_bytes(length) as usize } else { 0 };
                if self.missing > self.max_bytes {
                    return Err(Status::out_of_range(format!(
                        "a message may have at most {} bytes",
                        self.max_bytes
                    )));
                }
            } else {
                let count = rest.len().min(self.missing);
                self.missing -= count;
                position += count;
            }
            if self.prefix_received == PREFIX_BYTES && self.missing == 0 {
                self.prefix_received = 0;
                complete = position;
            }
        }
        Ok(complete)
    }

    /// Leaves out the current message if it is a job.
    fn leave_out(&mut self) -> Result<(), Status> {
        let full = || Status::resource_exhausted("the agent receives too many bytes");
        let jobs = self.left_out_jobs.as_ref().ok_or_else(full)?;
        let start = self.received.take().flatten().take(UNCOUNTED_BYTES).collect::<Vec<_>>();
        jobs.add(job::peek_number(&start[PREFIX_BYTES..]).ok_or_else(full)?);
        self.guard.clear();
        self.is_left_out = true;
        self.complete.push_back(Bytes::from_static(EMPTY_MESSAGE));
        Ok(())
    }
}

/// The received pieces of a message.
#[derive(Default)]
struct Pieces {
    kept: Vec<Bytes>,
    /// The small pieces since the last kept one, joined.
    small: BytesMut,
    /// The total size of all pieces.
    bytes: usize,
}

impl Pieces {
    fn push(&mut self, piece: Bytes) {
        self.bytes += piece.len();
        if piece.len() < MIN_KEPT_PIECE_BYTES {
            self.small.extend_from_slice(&piece);
        } else {
            self.join();
            self.kept.push(piece);
        }
    }

    fn join(&mut self) {
        if !self.small.is_empty() {
            self.kept.push(mem::take(&mut self.small).freeze());
        }
    }

    /// Takes all pieces.
    fn take(&mut self) -> impl Iterator<Item = Bytes> + use<> {
        self.join();
        self.bytes = 0;
        mem::take(&mut self.kept).into_iter()
    }
}

#[cfg(test)]
mod tests;
