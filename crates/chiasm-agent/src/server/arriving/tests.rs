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
    framed(
        &proto::GenerateRequest { request: Some(Request::Begin(job.encode_to_vec().into())) }
            .encode_to_vec(),
    )
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
    let claim =
        Bytes::from([&[0][..], &u32::MAX.to_be_bytes(), &[7; 395 + START - PREFIX]].concat());
    let mut coming: Vec<_> = (0..3).map(|_| of(&shares, usize::MAX, None)).collect();
    let taken = coming
        .iter_mut()
        .map(|message| message.take(claim.clone()).map_err(|status| status.code()));
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
        let sent = [job(1, 9000), job(1 << 40, 30_000), job(3, 100), job(4, 30_000), job(5, 9000)]
            .concat();
        let mut passed_on = Vec::new();
        for bytes in sent.chunks(piece) {
            coming.take(Bytes::copy_from_slice(bytes)).unwrap();
            passed_on.extend(coming.whole.drain(..).flatten());
        }
        let expected =
            [job(1, 9000), EMPTY.to_vec(), job(3, 100), EMPTY.to_vec(), job(5, 9000)].concat();
        assert!(passed_on == expected, "{piece}");
        assert_eq!(
            (jobs.take(), all.held(), jobs.take()),
            (vec![1 << 40, 4], 0, vec![]),
            "{piece}"
        );
    }
}

#[test]
fn what_ends_a_job_comes_whether_there_is_room_or_not_and_no_job_without_a_number() {
    let (all, shares) = arriving(1000);
    let _all_of_it = all.charge(1000).unwrap();
    let jobs = WithoutRoom::default();
    let mut coming = of(&shares, usize::MAX, Some(&jobs));
    let end =
        framed(&proto::GenerateRequest { request: Some(Request::Abort(u64::MAX)) }.encode_to_vec());
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
    let mut frames =
        futures_util::stream::poll_fn(|context| Pin::new(&mut *body).poll_frame(context));
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
