//! The publishing side of an engine, with every mishap a test wants.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use zeromq::{RouterSocket, Socket, SocketRecv, SocketSend, XPubSocket, ZmqMessage};

use crate::event::{BlockRemoved, ExternalHash, KvEvent, KvEventBatch};

/// Far more than anything here takes.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

pub(super) struct FakeEngine {
    publisher: XPubSocket,
    pub(super) endpoint: String,
    pub(super) replay_endpoint: String,
    replays: JoinHandle<()>,
    kept: Kept,
    next: u64,
}

/// What a replay brings, and how it goes wrong.
#[derive(Clone, Default)]
pub(super) struct Kept(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    messages: Vec<(u64, Bytes)>,
    answers: Answers,
}

#[derive(Clone, Copy, Default, PartialEq)]
pub(super) enum Answers {
    #[default]
    All,
    /// Reads the request and says nothing.
    None,
    /// Stops after so many messages, and is good from the next request on.
    Only(usize),
    /// Drops this number on the way, and is good from the next request on.
    Dropping(u64),
    /// Drops this number every time.
    AlwaysDropping(u64),
}

/// A batch that is recognised by its number.
pub(super) fn batch(mark: u64) -> KvEventBatch {
    let removed =
        BlockRemoved { block_hashes: vec![ExternalHash::U64(mark)], ..Default::default() };
    KvEventBatch {
        timestamp: mark as f64,
        events: vec![KvEvent::BlockRemoved(removed)],
        data_parallel_rank: Some(0),
    }
}

impl FakeEngine {
    pub(super) async fn start() -> Self {
        Self::start_at("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", Kept::default(), 0).await
    }

    pub(super) async fn start_at(
        endpoint: &str,
        replay_endpoint: &str,
        kept: Kept,
        next: u64,
    ) -> Self {
        let mut publisher = XPubSocket::new();
        let endpoint = publisher.bind(endpoint).await.unwrap().to_string();
        let mut router = RouterSocket::new();
        let replay_endpoint = router.bind(replay_endpoint).await.unwrap().to_string();
        let replays = tokio::spawn(serve_replays(router, kept.clone()));
        Self { publisher, endpoint, replay_endpoint, replays, kept, next }
    }

    /// Dies and comes back on the same addresses with the given past.
    pub(super) async fn restart(self, kept: Kept, next: u64) -> Self {
        let (endpoint, replay_endpoint) = (self.endpoint.clone(), self.replay_endpoint.clone());
        self.stop().await;
        Self::start_at(&endpoint, &replay_endpoint, kept, next).await
    }

    pub(super) async fn stop(self) {
        self.publisher.close().await;
        self.replays.abort();
        // The task owns the replay socket: its address is free once the task is gone.
        assert!(self.replays.await.unwrap_err().is_cancelled());
    }

    pub(super) fn kept(&self) -> Kept {
        self.kept.clone()
    }

    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Waits for the subscriber's subscription: from here on nothing published is lost by chance.
    pub(super) async fn subscribed(&mut self) {
        let message =
            timeout(PATIENCE, self.publisher.recv()).await.expect("a subscription").unwrap();
        assert_eq!(message.get(0).unwrap()[0], 1, "1 is subscribe");
    }

    pub(super) async fn publish(&mut self, mark: u64) {
        self.publish_payload(batch(mark).encode().into()).await;
    }

    pub(super) async fn publish_payload(&mut self, payload: Bytes) {
        let seq = self.keep(payload.clone());
        self.send(vec![Bytes::new(), Bytes::copy_from_slice(&seq.to_be_bytes()), payload]).await;
    }

    pub(super) async fn send(&mut self, frames: Vec<Bytes>) {
        self.publisher.send(ZmqMessage::try_from(frames).unwrap()).await.unwrap();
    }

    /// Publishes a message that never arrives.
    pub(super) fn lose(&mut self, mark: u64) {
        self.keep(batch(mark).encode().into());
    }

    fn keep(&mut self, payload: Bytes) -> u64 {
        let seq = self.next;
        self.next += 1;
        self.kept.0.lock().unwrap().messages.push((seq, payload));
        seq
    }
}

impl Kept {
    pub(super) fn of(marks: impl IntoIterator<Item = u64>) -> Self {
        let kept = Self::default();
        for (seq, mark) in (0..).zip(marks) {
            kept.0.lock().unwrap().messages.push((seq, batch(mark).encode().into()));
        }
        kept
    }

    /// Drops earlier messages, as an engine whose buffer is full.
    pub(super) fn forget_before(&self, first: u64) {
        self.0.lock().unwrap().messages.retain(|(seq, _)| *seq >= first);
    }

    /// Swaps the past under a running engine.
    pub(super) fn become_like(&self, other: &Kept) {
        let messages = other.0.lock().unwrap().messages.clone();
        self.0.lock().unwrap().messages = messages;
    }

    pub(super) fn answer(&self, answers: Answers) {
        self.0.lock().unwrap().answers = answers;
    }
}

async fn serve_replays(mut router: RouterSocket, kept: Kept) {
    loop {
        let request = router.recv().await.unwrap().into_vec();
        let [peer, delimiter, first] = &request[..] else {
            panic!("not a replay request: {request:?}")
        };
        assert!(delimiter.is_empty());
        let first = u64::from_be_bytes(first[..].try_into().unwrap());
        let (messages, answers) = {
            let mut kept = kept.0.lock().unwrap();
            let answers = kept.answers;
            if let Answers::Only(_) | Answers::Dropping(_) = answers {
                kept.answers = Answers::All;
            }
            (kept.messages.clone(), answers)
        };
        let dropped = match answers {
            Answers::Dropping(seq) | Answers::AlwaysDropping(seq) => Some(seq),
            _ => None,
        };
        let wanted = messages.into_iter().filter(|(seq, _)| *seq >= first && Some(*seq) != dropped);
        let (count, ends) = match answers {
            Answers::All | Answers::Dropping(_) | Answers::AlwaysDropping(_) => (usize::MAX, true),
            Answers::None => (0, false),
            Answers::Only(count) => (count, false),
        };
        for (seq, payload) in wanted.take(count) {
            answer(&mut router, peer, Bytes::copy_from_slice(&seq.to_be_bytes()), payload).await;
        }
        if ends {
            answer(&mut router, peer, Bytes::from_static(&[0xff; 8]), Bytes::new()).await;
        }
    }
}

/// The peer may have given up: that is its right.
async fn answer(router: &mut RouterSocket, peer: &Bytes, seq: Bytes, payload: Bytes) {
    let frames = vec![peer.clone(), Bytes::new(), Bytes::new(), seq, payload];
    let _ = router.send(ZmqMessage::try_from(frames).unwrap()).await;
}
