//! The publishing side of an engine, with the failures that tests need.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use zeromq::{RouterSocket, Socket, SocketRecv, SocketSend, XPubSocket, ZmqMessage};

use crate::event::{BlockRemoved, ExternalHash, KvEvent, KvEventBatch};

/// A timeout far longer than any step of a test takes.
pub(super) const TEST_TIMEOUT: Duration = Duration::from_secs(20);

pub(super) struct FakeEngine {
    publisher: XPubSocket,
    pub(super) endpoint: String,
    pub(super) replay_endpoint: String,
    replays: JoinHandle<()>,
    buffer: ReplayBuffer,
    next: u64,
}

/// The messages that the engine keeps for replay, and the behavior of its replay socket.
#[derive(Clone, Default)]
pub(super) struct ReplayBuffer(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    messages: Vec<(u64, Bytes)>,
    behavior: ReplayBehavior,
}

/// The behavior of the replay socket.
#[derive(Clone, Copy, Default, PartialEq)]
pub(super) enum ReplayBehavior {
    /// Sends all messages and the end marker.
    #[default]
    All,
    /// Reads the request and sends nothing.
    None,
    /// Stops after this many messages. Answers the next request completely.
    Only(usize),
    /// Drops the message with this number. Answers the next request completely.
    Dropping(u64),
    /// Drops the message with this number in every replay.
    AlwaysDropping(u64),
}

/// Returns a batch that is identified by `mark`.
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
        Self::start_at("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", ReplayBuffer::default(), 0).await
    }

    pub(super) async fn start_at(
        endpoint: &str,
        replay_endpoint: &str,
        buffer: ReplayBuffer,
        next: u64,
    ) -> Self {
        let mut publisher = XPubSocket::new();
        let endpoint = publisher.bind(endpoint).await.unwrap().to_string();
        let mut router = RouterSocket::new();
        let replay_endpoint = router.bind(replay_endpoint).await.unwrap().to_string();
        let replays = tokio::spawn(serve_replays(router, buffer.clone()));
        Self { publisher, endpoint, replay_endpoint, replays, buffer, next }
    }

    /// Stops the engine and starts another one on the same addresses with the given messages.
    pub(super) async fn restart(self, buffer: ReplayBuffer, next: u64) -> Self {
        let endpoint = self.endpoint.clone();
        let replay_endpoint = self.replay_endpoint.clone();
        self.stop().await;
        Self::start_at(&endpoint, &replay_endpoint, buffer, next).await
    }

    pub(super) async fn stop(self) {
        self.publisher.close().await;
        self.replays.abort();
        // The task owns the replay socket: its address is free once the task is gone.
        assert!(self.replays.await.unwrap_err().is_cancelled());
    }

    pub(super) fn replay_buffer(&self) -> ReplayBuffer {
        self.buffer.clone()
    }

    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Waits for the subscription. Earlier messages may not reach the subscriber.
    pub(super) async fn wait_for_subscription(&mut self) {
        let message =
            timeout(TEST_TIMEOUT, self.publisher.recv()).await.expect("a subscription").unwrap();
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
        self.buffer.0.lock().unwrap().messages.push((seq, payload));
        seq
    }
}

impl ReplayBuffer {
    /// Creates a buffer with the batches of `marks`, numbered from 0.
    pub(super) fn with_marks(marks: impl IntoIterator<Item = u64>) -> Self {
        let buffer = Self::default();
        for (seq, mark) in (0..).zip(marks) {
            buffer.0.lock().unwrap().messages.push((seq, batch(mark).encode().into()));
        }
        buffer
    }

    /// Drops the messages before number `first`, like an engine whose buffer is full.
    pub(super) fn drop_before(&self, first: u64) {
        self.0.lock().unwrap().messages.retain(|(seq, _)| *seq >= first);
    }

    /// Replaces the messages of a running engine.
    pub(super) fn replace_with(&self, other: &ReplayBuffer) {
        let messages = other.0.lock().unwrap().messages.clone();
        self.0.lock().unwrap().messages = messages;
    }

    pub(super) fn set_behavior(&self, behavior: ReplayBehavior) {
        self.0.lock().unwrap().behavior = behavior;
    }
}

async fn serve_replays(mut router: RouterSocket, buffer: ReplayBuffer) {
    loop {
        let request = router.recv().await.unwrap().into_vec();
        let [peer, delimiter, first] = &request[..] else {
            panic!("not a replay request: {request:?}")
        };
        assert!(delimiter.is_empty());
        let first = u64::from_be_bytes(first[..].try_into().unwrap());
        let (messages, behavior) = {
            let mut state = buffer.0.lock().unwrap();
            let behavior = state.behavior;
            if let ReplayBehavior::Only(_) | ReplayBehavior::Dropping(_) = behavior {
                state.behavior = ReplayBehavior::All;
            }
            (state.messages.clone(), behavior)
        };
        let dropped = match behavior {
            ReplayBehavior::Dropping(seq) | ReplayBehavior::AlwaysDropping(seq) => Some(seq),
            _ => None,
        };
        let requested =
            messages.into_iter().filter(|(seq, _)| *seq >= first && Some(*seq) != dropped);
        let (count, sends_end) = match behavior {
            ReplayBehavior::None => (0, false),
            ReplayBehavior::Only(count) => (count, false),
            ReplayBehavior::All
            | ReplayBehavior::Dropping(_)
            | ReplayBehavior::AlwaysDropping(_) => (usize::MAX, true),
        };
        for (seq, payload) in requested.take(count) {
            reply(&mut router, peer, Bytes::copy_from_slice(&seq.to_be_bytes()), payload).await;
        }
        if sends_end {
            reply(&mut router, peer, Bytes::from_static(&[0xff; 8]), Bytes::new()).await;
        }
    }
}

/// Sends a reply. Ignores errors, because the peer may have disconnected.
async fn reply(router: &mut RouterSocket, peer: &Bytes, seq: Bytes, payload: Bytes) {
    let frames = vec![peer.clone(), Bytes::new(), Bytes::new(), seq, payload];
    let _ = router.send(ZmqMessage::try_from(frames).unwrap()).await;
}
