//! Messages that are on their way here: counted as their bytes come, whatever length is claimed.

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

use super::shares::{Held, Shares};
use crate::peer::Peer;
use crate::{CHUNK, MOST_MESSAGE_BYTES, job};

/// Bytes of all messages that have begun to come and are not whole, of all frontends.
pub(super) const MOST_ARRIVING: u64 = 512 << 20;
/// Bytes of a message that is no job, nor anything else about jobs: files and tensors come in
/// pieces.
const MOST_SHORT: usize = 4 * CHUNK;
/// What stands before each message of gRPC: whether it is compressed, and its length.
const PREFIX: usize = 5;
/// An empty message.
const EMPTY: &[u8] = &[0; PREFIX];
/// Bytes of each message that are not counted: what ends a job always comes, and of one without
/// room its number.
const START: usize = 64;
/// Bytes that came together and are kept as they came. Less may be part of much more memory.
const KEPT_AS_IT_CAME: usize = 8 << 10;

/// The jobs of a call whose messages have found no room. In the place of each an empty message
/// comes.
#[derive(Clone, Default)]
pub(super) struct WithoutRoom(Arc<Mutex<Vec<u64>>>);

impl WithoutRoom {
    fn add(&self, job: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(job);
    }

    /// Those of which this has not told before.
    pub(super) fn take(&self) -> Vec<u64> {
        mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A service whose callers' messages are counted while they come, and passed on when they are
/// whole. A job that there is no room for is left out, and goes to another agent: nothing waits for
/// room, so that who holds some always gets on. Of other calls, each of which is about one thing,
/// that ends the call. A frontend's messages are whole within milliseconds: what takes much longer
/// ends its call, and holds room no more.
#[derive(Clone)]
pub(super) struct Counting<S> {
    service: S,
    arriving: Shares,
    /// How long a message may take to become whole.
    within: Duration,
}

impl<S> Counting<S> {
    /// What callers send is counted in `arriving`, each message for as long as `within` at most.
    pub(super) fn new(service: S, arriving: Shares, within: Duration) -> Self {
        Self { service, arriving, within }
    }
}

impl<S: NamedService> NamedService for Counting<S> {
    const NAME: &'static str = S::NAME;
}

impl<S: Service<http::Request<Body>>> Service<http::Request<Body>> for Counting<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> S::Future {
        let is_jobs = request.uri().path().ends_with("/Generate");
        let most = if is_jobs { MOST_MESSAGE_BYTES } else { MOST_SHORT };
        let from = request.extensions().get::<Peer>().copied().unwrap_or_default();
        let without_room = is_jobs.then(WithoutRoom::default);
        if let Some(jobs) = &without_room {
            request.extensions_mut().insert(jobs.clone());
        }
        let message = Message::new(self.arriving.of(from).nothing(), most, without_room);
        let message = Arc::new(Mutex::new(message));
        let within = self.within;
        self.service
            .call(request.map(|body| Body::new(Counted { body, message, within, deadline: None })))
    }
}

/// What a caller sends.
struct Counted {
    body: Body,
    message: Arc<Mutex<Message>>,
    /// How long a message may take to become whole.
    within: Duration,
    /// Ends the wait for the one that has begun.
    deadline: Option<Deadline>,
}

/// What happens after a while, unless this is dropped before.
struct Deadline(JoinHandle<()>);

impl Drop for Deadline {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Deadline {
    /// Gives up the message that is coming then. A task of its own does that: while a caller does
    /// not read what it is told, nobody asks for what it sends.
    fn after(within: Duration, message: Arc<Mutex<Message>>) -> Self {
        Self(tokio::spawn(async move {
            sleep(within).await;
            lock(&message).give_up();
        }))
    }
}

fn lock(message: &Mutex<Message>) -> MutexGuard<'_, Message> {
    message.lock().unwrap_or_else(PoisonError::into_inner)
}

impl http_body::Body for Counted {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Self { body, message: shared, within, deadline } = &mut *self;
        let mut message = lock(shared);
        loop {
            if let Some(bytes) = message.whole.pop_front() {
                *deadline = None;
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            if message.is_late {
                let why = format!("a message was not whole after {} s", within.as_secs());
                return Poll::Ready(Some(Err(Status::deadline_exceeded(why))));
            }
            match Pin::new(&mut *body).poll_frame(context)? {
                Poll::Ready(Some(frame)) => match frame.into_data() {
                    Ok(bytes) => message.take(bytes)?,
                    Err(other) => return Poll::Ready(Some(Ok(other))),
                },
                Poll::Ready(None) if message.is_begun() => {
                    return Poll::Ready(Some(Err(Status::internal("a message is cut off"))));
                }
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => {
                    if message.is_begun() {
                        message.asker = Some(context.waker().clone());
                        deadline.get_or_insert_with(|| Deadline::after(*within, shared.clone()));
                    } else {
                        // One that is left out ends without its being passed on.
                        *deadline = None;
                    }
                    return Poll::Pending;
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        let message = lock(&self.message);
        message.whole.is_empty() && !message.is_begun() && self.body.is_end_stream()
    }
}

/// The message that is coming.
struct Message {
    prefix: [u8; PREFIX],
    /// How many bytes of the prefix have come.
    begun: usize,
    /// How many bytes come after it yet.
    missing: usize,
    /// How many may.
    most: usize,
    /// What has come of it, its prefix included.
    came: Pieces,
    /// Counts that.
    held: Held,
    /// There was no room for it: what comes of it is let go.
    is_left_out: bool,
    /// It took too long: nothing comes any more.
    is_late: bool,
    /// Is woken then.
    asker: Option<Waker>,
    /// Whole ones, that are to be passed on.
    whole: VecDeque<Bytes>,
    /// Takes the numbers of jobs that are left out, if these are jobs.
    without_room: Option<WithoutRoom>,
}

impl Message {
    fn new(held: Held, most: usize, without_room: Option<WithoutRoom>) -> Self {
        let (came, whole) = (Pieces::default(), VecDeque::new());
        Self {
            prefix: [0; PREFIX],
            begun: 0,
            missing: 0,
            most,
            came,
            held,
            is_left_out: false,
            is_late: false,
            asker: None,
            whole,
            without_room,
        }
    }

    fn is_begun(&self) -> bool {
        self.begun > 0
    }

    /// Lets go of the message that is coming, if it is not whole by now, and of all that would come
    /// after it.
    fn give_up(&mut self) {
        if !self.is_begun() {
            return;
        }
        self.came = Pieces::default();
        self.held.clear();
        self.is_late = true;
        self.asker.take().into_iter().for_each(Waker::wake);
    }

    /// More has come, of this message and perhaps of later ones. What is whole is its reader's to
    /// count.
    fn take(&mut self, mut bytes: Bytes) -> Result<(), Status> {
        if self.is_left_out {
            let now = bytes.len().min(self.missing);
            bytes.advance(now);
            self.missing -= now;
            if self.missing > 0 {
                return Ok(());
            }
            (self.is_left_out, self.begun) = (false, 0);
        }
        let whole = bytes.split_to(self.whole_bytes(&bytes)?);
        if !whole.is_empty() {
            self.whole.extend(self.came.take());
            self.whole.push_back(whole);
            self.held.clear();
        }
        if bytes.is_empty() {
            return Ok(());
        }
        self.came.push(bytes);
        let more = (self.came.bytes.saturating_sub(START) as u64).saturating_sub(self.held.count());
        if more == 0 { Ok(()) } else { self.held.grow(more).or_else(|_| self.leave_out()) }
    }

    /// How many of these bytes belong to messages that are whole with them.
    fn whole_bytes(&mut self, bytes: &[u8]) -> Result<usize, Status> {
        let (mut at, mut whole) = (0, 0);
        while at < bytes.len() {
            let rest = bytes.len() - at;
            if self.begun < PREFIX {
                let now = rest.min(PREFIX - self.begun);
                self.prefix[self.begun..self.begun + now].copy_from_slice(&bytes[at..at + now]);
                (self.begun, at) = (self.begun + now, at + now);
                let [_, length @ ..] = self.prefix;
                self.missing =
                    if self.begun == PREFIX { u32::from_be_bytes(length) as usize } else { 0 };
                if self.missing > self.most {
                    return Err(Status::out_of_range(format!(
                        "a message has {} bytes at most",
                        self.most
                    )));
                }
            } else {
                let now = rest.min(self.missing);
                (self.missing, at) = (self.missing - now, at + now);
            }
            if self.begun == PREFIX && self.missing == 0 {
                (self.begun, whole) = (0, at);
            }
        }
        Ok(whole)
    }

    /// Lets go of the message that is coming, if it is a job.
    fn leave_out(&mut self) -> Result<(), Status> {
        let full = || Status::resource_exhausted("too much is on its way there");
        let jobs = self.without_room.as_ref().ok_or_else(full)?;
        let start = self.came.take().flatten().take(START).collect::<Vec<_>>();
        jobs.add(job::number_at(&start[PREFIX..]).ok_or_else(full)?);
        self.held.clear();
        self.is_left_out = true;
        self.whole.push_back(Bytes::from_static(EMPTY));
        Ok(())
    }
}

/// What has come of a message.
#[derive(Default)]
struct Pieces {
    kept: Vec<Bytes>,
    /// What came in small pieces since.
    small: BytesMut,
    bytes: usize,
}

impl Pieces {
    fn push(&mut self, piece: Bytes) {
        self.bytes += piece.len();
        if piece.len() < KEPT_AS_IT_CAME {
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

    /// All that has come, which is gone here then.
    fn take(&mut self) -> impl Iterator<Item = Bytes> + use<> {
        self.join();
        self.bytes = 0;
        mem::take(&mut self.kept).into_iter()
    }
}

#[cfg(test)]
mod tests;
