//! The subscriber: a task that receives one engine's KV events without gaps.

mod connection;
mod counters;
mod follow;
mod replay;

use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::KvError;
pub use counters::{SubscriberCounters, SubscriberStats};
use follow::Follower;

/// The addresses of an engine's event sockets, and the timeouts.
#[derive(Clone, Debug)]
pub struct SubscriberConfig {
    /// The address of the engine's PUB socket, `tcp://host:port` or `ipc://path`. The host `*`,
    /// which engines are configured with, stands for this machine.
    pub endpoint: String,
    /// The address of the engine's replay socket. Without it, every lost message causes a reset.
    pub replay_endpoint: Option<String>,
    /// The prefix of the topics to follow; empty for all topics.
    pub topic: String,
    /// The deadline for one attempt to connect.
    pub connect_timeout: Duration,
    /// The pause between attempts to connect or to replay.
    pub retry_delay: Duration,
    /// The deadline for the first message of a replay. The engine serves replays between its own
    /// batches, and every 0.1 s when it is idle.
    pub replay_timeout: Duration,
    /// The number of consecutive replays without progress after which the lost messages are given
    /// up.
    pub replay_attempts: u32,
    /// The time without a message after which a replay checks for lost messages, because the loss
    /// of the last message leaves no gap. Requires `replay_endpoint`.
    pub audit_interval: Duration,
}

impl SubscriberConfig {
    /// Creates a configuration that follows all topics, with timeouts for an engine on the same
    /// machine or network.
    pub fn new(endpoint: impl Into<String>, replay_endpoint: Option<String>) -> Self {
        Self {
            endpoint: endpoint.into(),
            replay_endpoint,
            topic: String::new(),
            connect_timeout: Duration::from_secs(2),
            retry_delay: Duration::from_millis(200),
            replay_timeout: Duration::from_secs(5),
            replay_attempts: 3,
            audit_interval: Duration::from_secs(10),
        }
    }
}

/// A position in an engine's stream of KV events, up to which all batches have been received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamPosition {
    /// The sequence number of the last batch.
    pub seq: u64,
    /// The digest of the last batch's payload. Payloads contain a timestamp, so after a restart of
    /// the engine a batch with the same number has another digest.
    pub digest: [u8; blake3::OUT_LEN],
}

/// A receiver of the batches from a [`Subscriber`]. All calls are made in order by the subscriber's
/// task, so each call should be short.
pub trait KvEventReceiver: Send + 'static {
    /// Receives the payload of the batch with the engine's number `seq`, which starts at 0. Between
    /// two resets no batch is missing or repeated.
    ///
    /// # Errors
    /// [`KvError`] if the payload can't be read. Its events are lost, so a
    /// [`KvEventReceiver::reset`] follows if any batch was accepted since the last reset.
    fn batch(&mut self, seq: u64, payload: &[u8]) -> Result<(), KvError>;

    /// Drops all knowledge of the engine's cache: messages were lost for good, or the engine was
    /// restarted.
    fn reset(&mut self);

    /// Reports whether the receiver is up to date.
    ///
    /// `true`: all earlier or missing messages have been passed on, or can't be retrieved. From now
    /// on batches arrive as they are published. `false`, after a `true`: messages are missing or
    /// the connection is lost. Another `true` follows.
    fn set_caught_up(&mut self, caught_up: bool);
}

/// A task that follows the KV events of one engine until it is dropped.
///
/// The engine numbers its messages and keeps the last ones (10,000 by default) for replay. After
/// connecting, the subscriber requests all kept messages. When a number is skipped, it requests the
/// messages from there on. Each replay starts one message before the missing ones. If that message
/// differs from the one received earlier, another process answers, because payloads contain a
/// timestamp. So a restarted engine is detected even if its numbers fit.
///
/// The receiver is reset, and continues with the messages that the engine still has, if
/// - the engine was restarted: its numbers go back, or the replay has another history;
/// - a lost message is too old for the replay, `replay_attempts` replays make no progress, or there
///   is no replay socket;
/// - the receiver can't read a payload, so its events are lost.
///
/// A slow receiver exerts back-pressure on the subscriber. Once the queues of the connection are
/// full, the engine drops messages, which causes a gap and a replay.
pub struct Subscriber {
    task: JoinHandle<Option<StreamPosition>>,
    stop: Option<oneshot::Sender<()>>,
}

impl Subscriber {
    /// Starts the task on the current tokio runtime. The task adds to `counters`, which earlier
    /// subscribers may have used.
    pub fn start(
        config: SubscriberConfig,
        receiver: impl KvEventReceiver,
        counters: SubscriberCounters,
    ) -> Self {
        Self::resume(config, receiver, counters, None)
    }

    /// Starts the task like [`Subscriber::start`], for a receiver that already has all batches up
    /// to `from`. The receiver is reset if the engine has been restarted since then, or can't
    /// replay the batches that followed.
    pub fn resume(
        config: SubscriberConfig,
        receiver: impl KvEventReceiver,
        counters: SubscriberCounters,
        from: Option<StreamPosition>,
    ) -> Self {
        let (stop, stopped) = oneshot::channel();
        let mut follower = Follower::new(config, receiver, counters, from);
        let task = tokio::spawn(async move {
            tokio::select! {
                biased;
                _ = stopped => {}
                never = follower.follow_forever() => match never {},
            }
            follower.stream_position()
        });
        Self { task, stop: Some(stop) }
    }

    /// Stops the task between two batches. Returns the position up to which the receiver has all
    /// batches, or `None` if it has none.
    pub async fn stop(mut self) -> Option<StreamPosition> {
        drop(self.stop.take());
        (&mut self.task).await.ok().flatten()
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[cfg(test)]
mod tests;
