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

fn shares(limit: u64) -> (ByteBudget, Shares) {
    let budget = ByteBudget::new(limit);
    (budget.clone(), Shares::new(budget, 1))
}

fn peer(number: u8) -> Peer {
    Peer::from_address(IpAddr::V4(Ipv4Addr::new(10, 0, 0, number)))
}

fn message(shares: &Shares, max_bytes: usize, jobs: Option<&LeftOutJobs>) -> IncomingMessage {
    IncomingMessage::new(shares.for_peer(peer(1)).empty(), max_bytes, jobs.cloned())
}

fn framed(message: &[u8]) -> Vec<u8> {
    [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat()
}

/// Returns the message of a job of some more than `bytes` bytes.
fn job(number: u64, bytes: usize) -> Vec<u8> {
    let job = proto::Job { number, tokens: vec![7; bytes].into(), ..proto::Job::default() };
    framed(
        &proto::GenerateRequest { request: Some(Request::Begin(job.encode_to_vec().into())) }
            .encode_to_vec(),
    )
}

#[test]
fn incomplete_message_is_counted() {
    let (budget, shares) = shares(1000);
    let sent = [300, 0, 500, 1].map(|length| framed(&vec![7; length])).concat();
    for piece in [1, 2, 5, 7, 99, 305, 400, sent.len()] {
        let mut incoming = message(&shares, 500, None);
        let mut max_held = 0;
        let mut passed_on = Vec::new();
        for bytes in sent.chunks(piece) {
            incoming.add(Bytes::copy_from_slice(bytes)).unwrap();
            max_held = max_held.max(budget.held());
            passed_on.extend(incoming.complete.drain(..).flatten());
        }
        // The last piece of the longest message is never held, as it completes the message.
        assert!(max_held < 500 && (piece > 400 || max_held > 0), "{piece}: {max_held}");
        assert_eq!((budget.held(), &passed_on), (0, &sent), "{piece}");
    }
}

#[test]
fn received_bytes_count_not_claimed_ones() {
    let (budget, shares) = shares(2000);
    let claim = Bytes::from(
        [&[0][..], &u32::MAX.to_be_bytes(), &[7; 395 + UNCOUNTED_BYTES - PREFIX_BYTES]].concat(),
    );
    let mut incoming: Vec<_> = (0..3).map(|_| message(&shares, usize::MAX, None)).collect();
    let added = incoming
        .iter_mut()
        .map(|message| message.add(claim.clone()).map_err(|status| status.code()));
    assert_eq!(added.collect::<Vec<_>>(), [Ok(()), Ok(()), FULL]);
    assert_eq!(budget.held(), 790);
    drop(incoming);
    let error = message(&shares, 500, None).add(claim).unwrap_err();
    assert_eq!(error.code(), tonic::Code::OutOfRange);
    assert_eq!(budget.held(), 0);
}

#[test]
fn only_jobs_without_room_are_left_out() {
    for piece in [1, 7, 63, 4000, 20_000] {
        let (budget, shares) = shares(20_000);
        let jobs = LeftOutJobs::default();
        let mut incoming = message(&shares, usize::MAX, Some(&jobs));
        // One address gets half of the budget.
        let sent = [job(1, 9000), job(1 << 40, 30_000), job(3, 100), job(4, 30_000), job(5, 9000)]
            .concat();
        let mut passed_on = Vec::new();
        for bytes in sent.chunks(piece) {
            incoming.add(Bytes::copy_from_slice(bytes)).unwrap();
            passed_on.extend(incoming.complete.drain(..).flatten());
        }
        let expected = [
            job(1, 9000),
            EMPTY_MESSAGE.to_vec(),
            job(3, 100),
            EMPTY_MESSAGE.to_vec(),
            job(5, 9000),
        ]
        .concat();
        assert!(passed_on == expected, "{piece}");
        assert_eq!(
            (jobs.take(), budget.held(), jobs.take()),
            (vec![1 << 40, 4], 0, vec![]),
            "{piece}"
        );
    }
}

#[test]
fn abort_gets_through_a_full_budget() {
    let (budget, shares) = shares(1000);
    let _full = budget.charge(1000).unwrap();
    let jobs = LeftOutJobs::default();
    let mut incoming = message(&shares, usize::MAX, Some(&jobs));
    let abort =
        framed(&proto::GenerateRequest { request: Some(Request::Abort(u64::MAX)) }.encode_to_vec());
    for byte in &abort {
        incoming.add(Bytes::copy_from_slice(&[*byte])).unwrap();
    }
    assert_eq!(incoming.complete.drain(..).flatten().collect::<Vec<_>>(), abort);
    // A job without a number can't be left out.
    let added = incoming.add(job(0, 1000)[..500].to_vec().into());
    assert_eq!(added.map_err(|status| status.code()), FULL);
    assert!(jobs.take().is_empty());
}

#[test]
fn largest_messages_of_one_address_leave_room_for_others() {
    let (_, shares) = shares(MAX_INCOMING_BYTES);
    let largest = |number: u8| shares.for_peer(peer(number)).acquire(MAX_MESSAGE_BYTES as u64).ok();
    let greedy: Vec<_> = std::iter::from_fn(|| largest(1)).collect();
    let others: Vec<_> = std::iter::from_fn(|| largest(2)).collect();
    assert_eq!((greedy.len(), others.len()), (4, 2));
}

/// A body fed by a channel.
struct ChannelBody(mpsc::UnboundedReceiver<Bytes>);

impl http_body::Body for ChannelBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.0.poll_recv(context).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}

/// Returns a body whose messages have to be complete within `timeout`, and its sender.
fn counted(
    message: IncomingMessage,
    timeout: Duration,
) -> (mpsc::UnboundedSender<Bytes>, CountedBody) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let message = Arc::new(Mutex::new(message));
    let body = Body::new(ChannelBody(receiver));
    (sender, CountedBody { body, message, timeout, deadline: None })
}

/// Returns the next frame's length or error; `None` if there is none within `time`.
async fn next_frame(body: &mut CountedBody, time: Duration) -> Option<Result<usize, tonic::Code>> {
    let mut frames =
        futures_util::stream::poll_fn(|context| Pin::new(&mut *body).poll_frame(context));
    let next = timeout(time, frames.next()).await.ok()?.unwrap();
    Some(next.map(|frame| frame.into_data().unwrap().len()).map_err(|status| status.code()))
}

const SOON: Duration = Duration::from_secs(10);

#[tokio::test(start_paused = true)]
async fn incomplete_message_is_dropped_after_the_timeout() {
    let (budget, shares) = shares(2000);
    let timeout = Duration::from_secs(30);
    let part = Bytes::from(framed(&[7; 900])).slice(..500);
    for is_polled in [true, false] {
        let (sender, mut body) = counted(message(&shares, 1000, None), timeout);
        sender.send(part.clone()).unwrap();
        assert_eq!(next_frame(&mut body, SOON).await, None);
        assert_eq!(budget.held(), 500 - UNCOUNTED_BYTES as u64);
        // Further bytes do not extend the timeout.
        sender.send(Bytes::from_static(&[7])).unwrap();
        if is_polled {
            assert_eq!(next_frame(&mut body, SOON).await, None);
        } else {
            sleep(2 * timeout).await;
            assert_eq!(budget.held(), 0);
        }
        assert_eq!(next_frame(&mut body, timeout).await, Some(Err(tonic::Code::DeadlineExceeded)));
        assert_eq!(budget.held(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn each_message_has_its_own_timeout() {
    let (_, shares) = shares(2000);
    let (sender, mut body) = counted(message(&shares, 1000, None), Duration::from_secs(30));
    let bytes = Bytes::from(framed(&[7; 900]));
    for _ in 0..5 {
        sender.send(bytes.slice(..500)).unwrap();
        assert_eq!(next_frame(&mut body, 2 * SOON).await, None);
        sender.send(bytes.slice(500..)).unwrap();
        assert_eq!(next_frame(&mut body, SOON).await, Some(Ok(500)));
        assert_eq!(next_frame(&mut body, SOON).await, Some(Ok(405)));
    }
    assert_eq!(next_frame(&mut body, 100 * SOON).await, None);
}

#[tokio::test(start_paused = true)]
async fn left_out_message_has_no_timeout() {
    let (_, shares) = shares(2000);
    let jobs = LeftOutJobs::default();
    let (sender, mut body) =
        counted(message(&shares, usize::MAX, Some(&jobs)), Duration::from_secs(30));
    let job = Bytes::from(job(1, 9000));
    sender.send(job.slice(..5000)).unwrap();
    assert_eq!(next_frame(&mut body, SOON).await, Some(Ok(EMPTY_MESSAGE.len())));
    assert_eq!(next_frame(&mut body, SOON).await, None);
    sender.send(job.slice(5000..)).unwrap();
    assert_eq!(next_frame(&mut body, 100 * SOON).await, None);
    assert_eq!(jobs.take(), [1]);
}
