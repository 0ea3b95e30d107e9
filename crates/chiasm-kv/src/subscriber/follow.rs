//! The subscriber's loop: connecting, catching up by replay, and following published messages.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use bytes::Bytes;
use chiasm_zmtp::Connection;
use futures_util::FutureExt;
use tokio::time::{Instant, sleep};
use tracing::{debug, error, info, warn};

use super::connection::connectable;
use super::counters::SubscriberCounters;
use super::replay::{self, ReplayFailure, Reply};
use super::{KvEventReceiver, StreamPosition, SubscriberConfig};

/// The maximum pause after a panic of the receiver. Each panic costs a replay of all messages that
/// the engine keeps.
const MAX_PANIC_PAUSE: Duration = Duration::from_secs(60);

/// The time after which an endpoint that refuses connections is reported.
const UNREACHABLE_AFTER: Duration = Duration::from_secs(10);

/// The state of a subscriber's task.
pub(super) struct Follower<R> {
    config: SubscriberConfig,
    receiver: R,
    counters: SubscriberCounters,
    /// The last message passed to the receiver since the last reset.
    position: Option<Position>,
    /// The last sequence number published on this connection, without replays.
    published: Option<u64>,
    /// `true` if the receiver has state that a reset would drop.
    receiver_has_state: bool,
    caught_up: bool,
}

/// A received message.
struct Position {
    seq: u64,
    /// Distinguishes this message from one with the same number of another engine process.
    proof: Proof,
}

enum Proof {
    Payload(Bytes),
    /// The digest of a message that was received by an earlier process of ours.
    Digest(blake3::Hash),
}

impl Proof {
    fn matches(&self, payload: &Bytes) -> bool {
        match self {
            Self::Payload(seen) => seen == payload,
            Self::Digest(digest) => blake3::hash(payload) == *digest,
        }
    }
}

/// The identity of the connected engine. It decides whether a replay must prove that the same
/// engine was followed before.
#[derive(Clone, Copy, PartialEq)]
enum Engine {
    /// The same process: the connection was never lost.
    Same,
    /// Possibly another process: the connection is new.
    MaybeAnother,
}

/// The origin of a batch.
#[derive(Clone, Copy)]
enum Source {
    Live,
    Replay,
}

/// The reason why a replay did not complete.
enum ReplayError {
    /// The replay does not begin with the last known message, so another process may publish now.
    AnotherEngine,
    Failed(ReplayFailure),
}

impl From<ReplayFailure> for ReplayError {
    fn from(failure: ReplayFailure) -> Self {
        Self::Failed(failure)
    }
}

impl<R: KvEventReceiver> Follower<R> {
    pub(super) fn new(
        mut config: SubscriberConfig,
        receiver: R,
        counters: SubscriberCounters,
        from: Option<StreamPosition>,
    ) -> Self {
        config.endpoint = connectable(&config.endpoint);
        config.replay_endpoint = config.replay_endpoint.as_deref().map(connectable);
        let position = from.map(|StreamPosition { seq, digest }| Position {
            seq,
            proof: Proof::Digest(digest.into()),
        });
        let receiver_has_state = position.is_some();
        Self {
            config,
            receiver,
            counters,
            position,
            published: None,
            receiver_has_state,
            caught_up: false,
        }
    }

    /// Returns the position of the last batch that was passed to the receiver.
    pub(super) fn stream_position(&self) -> Option<StreamPosition> {
        let Position { seq, proof } = self.position.as_ref()?;
        let digest = match proof {
            Proof::Payload(payload) => blake3::hash(payload),
            Proof::Digest(digest) => *digest,
        };
        Some(StreamPosition { seq: *seq, digest: digest.into() })
    }

    /// Runs until it is dropped. A drop always happens between two batches.
    pub(super) async fn follow_forever(&mut self) -> Infallible {
        let mut engine = if self.position.is_some() { Engine::MaybeAnother } else { Engine::Same };
        let mut pause = self.config.retry_delay;
        loop {
            let one_connection = async {
                let connection = connect(&self.config, &self.counters).await;
                self.follow(connection, engine).await;
            };
            if AssertUnwindSafe(one_connection).catch_unwind().await.is_err() {
                self.reset_after_panic();
                sleep(pause).await;
                pause = (pause * 2).min(MAX_PANIC_PAUSE);
            }
            self.mark_behind();
            engine = Engine::MaybeAnother;
        }
    }

    /// Resets the receiver after a panic, because it may have applied half of a batch.
    fn reset_after_panic(&mut self) {
        self.counters.count(|counters| &counters.panics);
        error!(endpoint = self.config.endpoint, "applying kv events panicked, starting over");
        self.receiver_has_state = true;
        if catch_unwind(AssertUnwindSafe(|| self.reset())).is_err() {
            error!(endpoint = self.config.endpoint, "resetting the kv event receiver panicked");
        }
    }

    /// Catches up, then passes on the messages of one connection until it is lost.
    async fn follow(&mut self, mut connection: Connection, engine: Engine) {
        self.published = None;
        self.catch_up(engine).await;
        self.mark_caught_up();
        let can_audit = self.config.replay_endpoint.is_some();
        loop {
            let message = tokio::select! {
                biased;
                message = connection.next() => Some(message),
                () = sleep(self.config.audit_interval), if can_audit => None,
            };
            match message {
                Some(Ok(frames)) => self.on_message(&frames).await,
                Some(Err(error)) => {
                    info!(endpoint = self.config.endpoint, %error, "kv event connection lost");
                    return;
                }
                None => self.catch_up(Engine::Same).await,
            }
        }
    }

    /// Handles a published message: `[topic, seq, payload]`.
    async fn on_message(&mut self, frames: &[Bytes]) {
        let seq = frames
            .get(1)
            .and_then(|seq| <[u8; 8]>::try_from(&seq[..]).ok())
            .map(u64::from_be_bytes);
        let (Some(seq), Some(payload)) = (seq, frames.get(2)) else {
            self.counters.count(|counters| &counters.malformed);
            warn!(
                endpoint = self.config.endpoint,
                frames = frames.len(),
                "kv event message has unexpected frames"
            );
            return;
        };
        if self.published.is_some_and(|last| seq <= last) {
            info!(
                endpoint = self.config.endpoint,
                seq, "kv event numbers went back, the engine was restarted"
            );
            self.reset();
        }
        self.published = Some(seq);

        if seq > self.expected() {
            self.counters.count(|counters| &counters.gaps);
            debug!(
                endpoint = self.config.endpoint,
                expected = self.expected(),
                seq,
                "kv event numbers skipped"
            );
            self.mark_behind();
            self.catch_up(Engine::Same).await;
        }
        // A replay may already have brought this message.
        if self.position.as_ref().is_none_or(|position| seq > position.seq) {
            self.deliver(seq, payload.clone(), Source::Live);
        }
        self.mark_caught_up();
    }

    /// Reports to the receiver that messages are missing.
    fn mark_behind(&mut self) {
        if std::mem::take(&mut self.caught_up) {
            self.receiver.set_caught_up(false);
        }
    }

    /// Reports to the receiver that it is up to date.
    fn mark_caught_up(&mut self) {
        if !std::mem::replace(&mut self.caught_up, true) {
            self.receiver.set_caught_up(true);
        }
    }

    /// Replays the messages that the receiver does not have. If some are lost for good, the next
    /// published message shows a gap.
    async fn catch_up(&mut self, mut engine: Engine) {
        let mut failures = 0;
        while let Some(endpoint) = self.config.replay_endpoint.clone() {
            let before = self.expected();
            match self.replay(&endpoint, engine).await {
                Ok(()) => return,
                Err(ReplayError::AnotherEngine) => {
                    info!(
                        endpoint,
                        "kv event replay shows another history: \
                         the engine was restarted, or no longer has the last known message"
                    );
                    self.reset();
                    engine = Engine::Same;
                }
                Err(ReplayError::Failed(failure)) => {
                    self.counters.count(|counters| &counters.failed_replays);
                    if self.expected() > before {
                        debug!(endpoint, %failure, "kv event replay continues where it stopped");
                        failures = 0;
                        engine = Engine::Same;
                        continue;
                    }
                    failures += 1;
                    warn!(endpoint, %failure, failures, "kv event replay failed");
                    if failures >= self.config.replay_attempts {
                        break;
                    }
                    sleep(self.config.retry_delay).await;
                }
            }
        }
        if engine == Engine::MaybeAnother {
            // It is unknown whether this is the same engine.
            self.reset();
        }
    }

    /// Requests one replay and passes its messages to the receiver.
    async fn replay(&mut self, endpoint: &str, engine: Engine) -> Result<(), ReplayError> {
        self.counters.count(|counters| &counters.replays);
        // Starts at the last known message, to compare it. An engine that no longer has that
        // message can't prove its identity.
        let known = self.position.as_ref().map(|position| position.seq);
        let mut proven = engine == Engine::Same || known.is_none();
        let connect_timeout = self.config.connect_timeout;
        let timeout = self.config.replay_timeout;
        let mut replay =
            replay::request(endpoint, known.unwrap_or(0), connect_timeout, timeout).await?;
        // The first replayed number. An engine that still has a message also has all later ones.
        let mut complete_from = None;
        loop {
            let (seq, payload) = match replay.next().await? {
                Reply::Message { seq, payload } => (seq, payload),
                Reply::Unreadable => {
                    self.counters.count(|counters| &counters.malformed);
                    continue;
                }
                Reply::End if proven => return Ok(()),
                Reply::End => return Err(ReplayError::AnotherEngine),
            };
            if known == Some(seq) {
                proven =
                    self.position.as_ref().is_some_and(|position| position.proof.matches(&payload));
            }
            if !proven {
                return Err(ReplayError::AnotherEngine);
            }
            let expected = self.expected();
            if seq > expected && complete_from.is_some_and(|first| first < seq) {
                return Err(ReplayFailure::Dropped { from: expected, to: seq - 1 }.into());
            }
            complete_from = complete_from.or(Some(seq));
            if seq >= expected {
                self.deliver(seq, payload, Source::Replay);
            }
        }
    }

    /// Passes a message after the current position to the receiver. Resets the receiver first if
    /// messages before it are lost.
    fn deliver(&mut self, seq: u64, payload: Bytes, source: Source) {
        if self.position.is_some() && seq > self.expected() {
            warn!(
                endpoint = self.config.endpoint,
                expected = self.expected(),
                seq,
                "kv events lost for good"
            );
            self.counters.add(seq - self.expected(), |counters| &counters.lost);
            self.reset();
        }
        match self.receiver.batch(seq, &payload) {
            Ok(()) => {
                self.receiver_has_state = true;
                self.counters.count(|counters| match source {
                    Source::Live => &counters.live_batches,
                    Source::Replay => &counters.replayed_batches,
                });
            }
            Err(error) => {
                self.counters.count(|counters| &counters.malformed);
                self.counters.count(|counters| &counters.lost);
                warn!(endpoint = self.config.endpoint, seq, %error, "kv events lost for good");
                self.reset();
            }
        }
        self.position = Some(Position { seq, proof: Proof::Payload(payload) });
    }

    /// Returns the number of the next message. Engines count from 0.
    fn expected(&self) -> u64 {
        self.position.as_ref().map_or(0, |position| position.seq.saturating_add(1))
    }

    /// Resets the receiver if it has state, and the position.
    fn reset(&mut self) {
        self.position = None;
        if self.receiver_has_state {
            self.receiver_has_state = false;
            self.counters.count(|counters| &counters.resets);
            self.receiver.reset();
        }
    }
}

/// Connects and subscribes, retrying until it succeeds. A connection is used until it is lost;
/// after each new connection the subscriber catches up.
async fn connect(config: &SubscriberConfig, counters: &SubscriberCounters) -> Connection {
    let started = Instant::now();
    let mut has_warned = false;
    loop {
        match Connection::subscribe(
            &config.endpoint,
            config.topic.as_bytes(),
            config.connect_timeout,
        )
        .await
        {
            Ok(connection) => {
                counters.count(|counters| &counters.connections);
                return connection;
            }
            Err(error) if started.elapsed() >= UNREACHABLE_AFTER && !has_warned => {
                has_warned = true;
                warn!(
                    endpoint = config.endpoint, %error,
                    "kv event endpoint is not reachable; vLLM listens only if the endpoint in \
                     --kv-events-config has a *, such as tcp://*:5557"
                );
            }
            Err(error) => {
                debug!(endpoint = config.endpoint, %error, "kv event endpoint is not reachable yet")
            }
        }
        sleep(config.retry_delay).await;
    }
}
