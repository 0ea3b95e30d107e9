//! The task that follows one engine's KV events without gaps.

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

/// The addresses that an engine publishes at, and how patient to be.
#[derive(Clone, Debug)]
pub struct SubscriberConfig {
    /// The engine's PUB socket, `tcp://host:port` or `ipc://path`. A `*` as host, as engines are
    /// configured with, is this machine.
    pub endpoint: String,
    /// The engine's replay socket. Without it every lost message means starting over.
    pub replay_endpoint: Option<String>,
    /// Prefix of the topics to follow; empty for all.
    pub topic: String,
    /// How long one attempt to connect may take.
    pub connect_timeout: Duration,
    /// How long to wait between attempts to connect or to replay.
    pub retry_delay: Duration,
    /// How long the engine may take to begin a replay. It serves them between its own batches,
    /// every 0.1 s when it is idle.
    pub replay_timeout: Duration,
    /// How many replays in a row may bring nothing before the lost messages are given up.
    pub replay_attempts: u32,
    /// Time without a message after which a replay of what might have been lost is asked for: a
    /// lost last message shows no gap. Needs `replay_endpoint`.
    pub audit_interval: Duration,
}

impl SubscriberConfig {
    /// Follows all topics, with patience for an engine on the same machine or network.
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

/// A position in an engine's stream of KV events: everything up to it has been received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamPosition {
    /// The number of the last batch.
    pub seq: u64,
    /// The digest of its payload. Payloads carry a time, so a batch of the same number differs
    /// after a restart of the engine.
    pub digest: [u8; blake3::OUT_LEN],
}

/// Takes what a [`Subscriber`] hands over, in order, in the subscriber's task: so each call should
/// be short.
pub trait KvEventReceiver: Send + 'static {
    /// The payload of the next batch, which the engine counts as `seq`, from 0 at its start.
    /// Between two resets nothing is missing and nothing comes twice.
    ///
    /// # Errors
    /// When the payload can't be read. What it said is lost, so a [`KvEventReceiver::reset`]
    /// follows if anything was taken since the last one.
    fn batch(&mut self, seq: u64, payload: &[u8]) -> Result<(), KvError>;

    /// Messages were lost for good or the engine was restarted: drop everything known about its
    /// cache.
    fn reset(&mut self);

    /// True: what the engine kept from before we listened, or what was missing, has been handed
    /// over, or there is no way to get it: from here on batches come as they are published. False,
    /// after that: messages are missing, or the connection is lost; another true follows.
    fn set_caught_up(&mut self, caught_up: bool);
}

/// Follows the KV events of one engine until dropped.
///
/// The engine numbers its messages and keeps the last ones (10,000 by default) for replay. After
/// connecting, the subscriber asks for all of them; when a number is skipped, for those from there
/// on. Each replay starts one message before the missing ones: if that message is not the one that
/// was seen (payloads carry a time), another process answers. So a restarted engine is noticed even
/// when its numbers fit.
///
/// The receiver is reset, and everything starts over with what the engine still has, when
/// - the engine was restarted: its numbers go back, or the replay shows another past;
/// - a lost message is not in the replay (it was too long ago), `replay_attempts` replays bring
///   nothing, or there is no replay socket;
/// - the receiver can't read a payload: what it said is lost.
///
/// A slow receiver slows the subscriber down; once the queues of the connection are full the engine
/// drops messages, which shows as a gap and is replayed.
pub struct Subscriber {
    task: JoinHandle<Option<StreamPosition>>,
    stop: Option<oneshot::Sender<()>>,
}

impl Subscriber {
    /// Starts the task on the current tokio runtime. It adds to counters that earlier subscribers
    /// may have used.
    pub fn counting(
        config: SubscriberConfig,
        receiver: impl KvEventReceiver,
        counters: SubscriberCounters,
    ) -> Self {
        Self::resuming(config, receiver, counters, None)
    }

    /// Starts the task as [`Subscriber::counting`] does, for a receiver that already has everything
    /// up to `from`. The receiver is reset if the engine has been restarted since, or can't replay
    /// what followed.
    pub fn resuming(
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

    /// Stops between two batches. Returns the position up to which the receiver has everything;
    /// `None` if it has nothing.
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
