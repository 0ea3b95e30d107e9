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
use crate::wire::Peer;
use crate::{CHUNK, MOST_MESSAGE_BYTES, job};

/// Bytes of all messages that have begun to come and are not whole, of all frontends.
pub(super) const MOST_ARRIVING: u64 = 512 << 20;
/// Bytes of a message that is no job, nor anything else about jobs: files and tensors come in pieces.
const MOST_SHORT: usize = 4 * CHUNK;
/// What stands before each message of gRPC: whether it is compressed, and its length.
const PREFIX: usize = 5;
/// An empty message.
const EMPTY: &[u8] = &[0; PREFIX];
/// Bytes of each message that are not counted: what ends a job always comes, and of one without room its number.
const START: usize = 64;
/// Bytes that came together and are kept as they came. Less may be part of much more memory.
const KEPT_AS_IT_CAME: usize = 8 << 10;

/// The jobs of a call whose messages have found no room. In the place of each an empty message comes.
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

/// A service whose callers' messages are counted while they come, and passed on when they are whole. A job that there is no room for is
/// left out, and goes to another agent: nothing waits for room, so that who holds some always gets on. Of other calls, each of which is
/// about one thing, that ends the call. A frontend's messages are whole within milliseconds: what takes much longer ends its call, and
/// holds room no more.
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
        self.service.call(request.map(|body| Body::new(Counted { body, message, within, deadline: None })))
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
    /// Gives up the message that is coming then. A task of its own does that: while a caller does not read what it is told, nobody asks
    /// for what it sends.
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

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
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

    /// Lets go of the message that is coming, if it is not whole by now, and of all that would come after it.
    fn give_up(&mut self) {
        if !self.is_begun() {
            return;
        }
        self.came = Pieces::default();
        self.held.clear();
        self.is_late = true;
        self.asker.take().into_iter().for_each(Waker::wake);
    }

    /// More has come, of this message and perhaps of later ones. What is whole is its reader's to count.
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
                self.missing = if self.begun == PREFIX { u32::from_be_bytes(length) as usize } else { 0 };
                if self.missing > self.most {
                    return Err(Status::out_of_range(format!("a message has {} bytes at most", self.most)));
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
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use chiasm_media::ByteBudget;
    use futures_util::StreamExt;
    use http_body::Body as _;
    use prost::Message as _;
    use tokio::sync::mpsc;
    use tokio::time::timeout;

    use super::*;
    use crate::proto;
    use crate::proto::generate_request::Request;

    const FULL: Result<(), tonic::Code> = Err(tonic::Code::ResourceExhausted);

    fn arriving(most: u64) -> (ByteBudget, Shares) {
        let all = ByteBudget::new(most);
        (all.clone(), Shares::new(all, 1))
    }

    fn peer(number: u8) -> Peer {
        Peer::at(IpAddr::V4(Ipv4Addr::new(10, 0, 0, number)))
    }

    fn of(shares: &Shares, most: usize, jobs: Option<&WithoutRoom>) -> Message {
        Message::new(shares.of(peer(1)).nothing(), most, jobs.cloned())
    }

    fn framed(message: &[u8]) -> Vec<u8> {
        [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat()
    }

    /// A job of so many bytes and some more.
    fn job(number: u64, bytes: usize) -> Vec<u8> {
        let job = proto::Job { number, tokens: vec![7; bytes].into(), ..proto::Job::default() };
        framed(&proto::GenerateRequest { request: Some(Request::Begin(job.encode_to_vec().into())) }.encode_to_vec())
    }

    #[test]
    fn what_has_come_of_a_message_is_counted_until_it_is_whole() {
        let (all, shares) = arriving(1000);
        let sent = [300, 0, 500, 1].map(|length| framed(&vec![7; length])).concat();
        for piece in [1, 2, 5, 7, 99, 305, 400, sent.len()] {
            let mut coming = of(&shares, 500, None);
            let (mut most, mut passed_on) = (0, Vec::new());
            for bytes in sent.chunks(piece) {
                coming.take(Bytes::copy_from_slice(bytes)).unwrap();
                most = most.max(all.held());
                passed_on.extend(coming.whole.drain(..).flatten());
            }
            // The last piece of the longest is never held: it is whole then.
            assert!(most < 500 && (piece > 400 || most > 0), "{piece}: {most}");
            assert_eq!((all.held(), &passed_on), (0, &sent), "{piece}");
        }
    }

    #[test]
    fn who_claims_much_and_sends_little_holds_little_and_all_hold_no_more_than_there_is() {
        let (all, shares) = arriving(2000);
        let claim = Bytes::from([&[0][..], &u32::MAX.to_be_bytes(), &[7; 395 + START - PREFIX]].concat());
        let mut coming: Vec<_> = (0..3).map(|_| of(&shares, usize::MAX, None)).collect();
        let taken = coming.iter_mut().map(|message| message.take(claim.clone()).map_err(|status| status.code()));
        assert_eq!(taken.collect::<Vec<_>>(), [Ok(()), Ok(()), FULL]);
        assert_eq!(all.held(), 790);
        drop(coming);
        assert_eq!(of(&shares, 500, None).take(claim).unwrap_err().code(), tonic::Code::OutOfRange);
        assert_eq!(all.held(), 0);
    }

    #[test]
    fn a_job_without_room_is_left_out_alone() {
        for piece in [1, 7, 63, 4000, 20_000] {
            let (all, shares) = arriving(20_000);
            let jobs = WithoutRoom::default();
            let mut coming = of(&shares, usize::MAX, Some(&jobs));
            // One address has half.
            let sent = [job(1, 9000), job(1 << 40, 30_000), job(3, 100), job(4, 30_000), job(5, 9000)].concat();
            let mut passed_on = Vec::new();
            for bytes in sent.chunks(piece) {
                coming.take(Bytes::copy_from_slice(bytes)).unwrap();
                passed_on.extend(coming.whole.drain(..).flatten());
            }
            let expected = [job(1, 9000), EMPTY.to_vec(), job(3, 100), EMPTY.to_vec(), job(5, 9000)].concat();
            assert!(passed_on == expected, "{piece}");
            assert_eq!((jobs.take(), all.held(), jobs.take()), (vec![1 << 40, 4], 0, vec![]), "{piece}");
        }
    }

    #[test]
    fn what_ends_a_job_comes_whether_there_is_room_or_not_and_no_job_without_a_number() {
        let (all, shares) = arriving(1000);
        let _all_of_it = all.charge(1000).unwrap();
        let jobs = WithoutRoom::default();
        let mut coming = of(&shares, usize::MAX, Some(&jobs));
        let end = framed(&proto::GenerateRequest { request: Some(Request::Abort(u64::MAX)) }.encode_to_vec());
        for byte in &end {
            coming.take(Bytes::copy_from_slice(&[*byte])).unwrap();
        }
        assert_eq!(coming.whole.drain(..).flatten().collect::<Vec<_>>(), end);
        let taken = coming.take(job(0, 1000)[..500].to_vec().into());
        assert_eq!(taken.map_err(|status| status.code()), FULL);
        assert!(jobs.take().is_empty());
    }

    #[test]
    fn one_address_may_send_the_largest_messages_and_leaves_room_for_those_of_others() {
        let (_, shares) = arriving(MOST_ARRIVING);
        let largest = |number: u8| shares.of(peer(number)).take(MOST_MESSAGE_BYTES as u64).ok();
        let greedy: Vec<_> = std::iter::from_fn(|| largest(1)).collect();
        let others: Vec<_> = std::iter::from_fn(|| largest(2)).collect();
        assert_eq!((greedy.len(), others.len()), (4, 2));
    }

    /// A body of what is sent to it.
    struct Sent(mpsc::UnboundedReceiver<Bytes>);

    impl http_body::Body for Sent {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            self.0.poll_recv(context).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
        }
    }

    /// A body whose messages may take as long to become whole.
    fn counted(message: Message, within: Duration) -> (mpsc::UnboundedSender<Bytes>, Counted) {
        let (sender, sent) = mpsc::unbounded_channel();
        let message = Arc::new(Mutex::new(message));
        (sender, Counted { body: Body::new(Sent(sent)), message, within, deadline: None })
    }

    /// What comes next, or nothing for now.
    async fn next_of(body: &mut Counted, within: Duration) -> Option<Result<usize, tonic::Code>> {
        let mut frames = futures_util::stream::poll_fn(|context| Pin::new(&mut *body).poll_frame(context));
        let next = timeout(within, frames.next()).await.ok()?.unwrap();
        Some(next.map(|frame| frame.into_data().unwrap().len()).map_err(|status| status.code()))
    }

    const SOON: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn a_message_that_does_not_become_whole_is_let_go_whether_somebody_asks_for_it_or_not() {
        let (all, shares) = arriving(2000);
        let within = Duration::from_secs(30);
        let begun = Bytes::from(framed(&[7; 900])).slice(..500);
        for is_asked_for in [true, false] {
            let (sender, mut body) = counted(of(&shares, 1000, None), within);
            sender.send(begun.clone()).unwrap();
            assert_eq!(next_of(&mut body, SOON).await, None);
            assert_eq!(all.held(), 500 - START as u64);
            // A byte now and then changes nothing.
            sender.send(Bytes::from_static(&[7])).unwrap();
            if is_asked_for {
                assert_eq!(next_of(&mut body, SOON).await, None);
            } else {
                sleep(2 * within).await;
                assert_eq!(all.held(), 0);
            }
            assert_eq!(next_of(&mut body, within).await, Some(Err(tonic::Code::DeadlineExceeded)));
            assert_eq!(all.held(), 0);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn each_message_has_a_time_of_its_own_and_none_is_waited_for_in_vain() {
        let (_, shares) = arriving(2000);
        let (sender, mut body) = counted(of(&shares, 1000, None), Duration::from_secs(30));
        let message = Bytes::from(framed(&[7; 900]));
        for _ in 0..5 {
            sender.send(message.slice(..500)).unwrap();
            assert_eq!(next_of(&mut body, 2 * SOON).await, None);
            sender.send(message.slice(500..)).unwrap();
            assert_eq!(next_of(&mut body, SOON).await, Some(Ok(500)));
            assert_eq!(next_of(&mut body, SOON).await, Some(Ok(405)));
        }
        assert_eq!(next_of(&mut body, 100 * SOON).await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_that_was_left_out_is_not_waited_for_any_more() {
        let (_, shares) = arriving(2000);
        let jobs = WithoutRoom::default();
        let (sender, mut body) = counted(of(&shares, usize::MAX, Some(&jobs)), Duration::from_secs(30));
        let job = Bytes::from(job(1, 9000));
        sender.send(job.slice(..5000)).unwrap();
        assert_eq!(next_of(&mut body, SOON).await, Some(Ok(EMPTY.len())));
        assert_eq!(next_of(&mut body, SOON).await, None);
        sender.send(job.slice(5000..)).unwrap();
        assert_eq!(next_of(&mut body, 100 * SOON).await, None);
        assert_eq!(jobs.take(), [1]);
    }
}
