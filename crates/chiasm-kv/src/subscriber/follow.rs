//! The subscriber's loop: connect, catch up, follow; and what each message means for the position
//! in the stream.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use bytes::Bytes;
use chiasm_zmtp::Connection;
use futures_util::FutureExt;
use tokio::time::sleep;
use tracing::{debug, error, info, warn};

use super::connection::connectable;
use super::counters::SubscriberCounters;
use super::replay::{self, Answer, ReplayFailure};
use super::{KvEventReceiver, StreamPosition, SubscriberConfig};

/// Between two panics of the receiver: each costs what the engine keeps for replay.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

pub(super) struct Follower<R> {
    config: SubscriberConfig,
    receiver: R,
    counters: SubscriberCounters,
    /// The last message handed over since the last reset.
    position: Option<Position>,
    /// The last number that this connection published, replays left out.
    published: Option<u64>,
    /// Whether the receiver knows anything that a reset would drop.
    told: bool,
    caught_up: bool,
}

struct Position {
    seq: u64,
    /// Tells this engine's message of that number from another's.
    proof: Proof,
}

enum Proof {
    Payload(Bytes),
    /// The digest of a message that an earlier process has received.
    Digest(blake3::Hash),
}

impl Proof {
    fn is_of(&self, payload: &Bytes) -> bool {
        match self {
            Self::Payload(seen) => seen == payload,
            Self::Digest(digest) => blake3::hash(payload) == *digest,
        }
    }
}

/// Whether a replay must prove that the engine is the one that was followed before.
#[derive(Clone, Copy, PartialEq)]
enum Engine {
    /// The connection never broke.
    Same,
    /// It was made anew.
    MaybeAnother,
}

#[derive(Clone, Copy)]
enum Source {
    Live,
    Replay,
}

/// Why a replay did not come to its end.
enum Interrupted {
    /// The replay shows that another process publishes now.
    AnotherEngine,
    Replay(ReplayFailure),
}

impl From<ReplayFailure> for Interrupted {
    fn from(failure: ReplayFailure) -> Self {
        Self::Replay(failure)
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
        let told = position.is_some();
        Self { config, receiver, counters, position, published: None, told, caught_up: false }
    }

    /// Returns the position up to which the receiver has everything.
    pub(super) fn stream_position(&self) -> Option<StreamPosition> {
        let Position { seq, proof } = self.position.as_ref()?;
        let digest = match proof {
            Proof::Payload(payload) => blake3::hash(payload),
            Proof::Digest(digest) => *digest,
        };
        Some(StreamPosition { seq: *seq, digest: digest.into() })
    }

    /// Runs until it is dropped. A drop leaves the receiver between two messages.
    pub(super) async fn follow_forever(&mut self) -> Infallible {
        let mut engine = if self.position.is_some() { Engine::MaybeAnother } else { Engine::Same };
        let mut pause = self.config.retry_delay;
        loop {
            let one_connection = async {
                let connection = connect(&self.config, &self.counters).await;
                self.follow(connection, engine).await;
            };
            if AssertUnwindSafe(one_connection).catch_unwind().await.is_err() {
                self.start_over_after_a_panic();
                sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            self.fell_behind();
            engine = Engine::MaybeAnother;
        }
    }

    /// The receiver may have taken half of a batch.
    fn start_over_after_a_panic(&mut self) {
        self.counters.count(|counters| &counters.panics);
        error!(endpoint = self.config.endpoint, "taking kv events panicked, starting over");
        self.told = true;
        if catch_unwind(AssertUnwindSafe(|| self.reset())).is_err() {
            error!(endpoint = self.config.endpoint, "forgetting what kv events said panicked");
        }
    }

    /// Hands over what one connection publishes until it breaks.
    async fn follow(&mut self, mut connection: Connection, engine: Engine) {
        self.published = None;
        self.catch_up(engine).await;
        self.has_caught_up();
        loop {
            let message = tokio::select! {
                biased;
                message = connection.next() => Some(message),
                () = sleep(self.config.audit_interval), if self.config.replay_endpoint.is_some() => None,
            };
            match message {
                Some(Ok(frames)) => self.take(&frames).await,
                Some(Err(error)) => {
                    info!(endpoint = self.config.endpoint, %error, "kv event connection lost");
                    return;
                }
                None => self.catch_up(Engine::Same).await,
            }
        }
    }

    /// Takes one published message: `[topic, seq, payload]`.
    async fn take(&mut self, frames: &[Bytes]) {
        let seq = frames
            .get(1)
            .and_then(|seq| <[u8; 8]>::try_from(&seq[..]).ok())
            .map(u64::from_be_bytes);
        let (Some(seq), Some(payload)) = (seq, frames.get(2)) else {
            self.counters.count(|counters| &counters.malformed);
            warn!(
                endpoint = self.config.endpoint,
                frames = frames.len(),
                "kv event message has other frames"
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
            self.fell_behind();
            self.catch_up(Engine::Same).await;
        }
        // If not, a replay was faster.
        if self.position.as_ref().is_none_or(|position| seq > position.seq) {
            self.hand_over(seq, payload.clone(), Source::Live);
        }
        self.has_caught_up();
    }

    /// Something is missing.
    fn fell_behind(&mut self) {
        if std::mem::take(&mut self.caught_up) {
            self.receiver.set_caught_up(false);
        }
    }

    fn has_caught_up(&mut self) {
        if !std::mem::replace(&mut self.caught_up, true) {
            self.receiver.set_caught_up(true);
        }
    }

    /// Hands over what the engine kept and we don't have. Whatever is lost for good after this
    /// shows as a gap.
    async fn catch_up(&mut self, mut engine: Engine) {
        let mut failures = 0;
        while let Some(endpoint) = self.config.replay_endpoint.clone() {
            let before = self.expected();
            match self.replay(&endpoint, engine).await {
                Ok(()) => return,
                Err(Interrupted::AnotherEngine) => {
                    info!(
                        endpoint,
                        "kv event replay shows another past: the engine was restarted, or has no more of what was known"
                    );
                    self.reset();
                    engine = Engine::Same;
                }
                Err(Interrupted::Replay(failure)) => {
                    self.counters.count(|counters| &counters.failed_replays);
                    if self.expected() > before {
                        debug!(endpoint, %failure, "kv event replay goes on where it stopped");
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
            // Nobody can tell.
            self.reset();
        }
    }

    async fn replay(&mut self, endpoint: &str, engine: Engine) -> Result<(), Interrupted> {
        self.counters.count(|counters| &counters.replays);
        // From the last known message on, to compare it. An engine that no longer has it proves
        // nothing.
        let known = self.position.as_ref().map(|position| position.seq);
        let mut proven = engine == Engine::Same || known.is_none();
        let (connect_timeout, patience) = (self.config.connect_timeout, self.config.replay_timeout);
        let mut replay =
            replay::request(endpoint, known.unwrap_or(0), connect_timeout, patience).await?;
        // An engine that has a message has all that came after it.
        let mut complete_from = None;
        loop {
            let (seq, payload) = match replay.next().await? {
                Answer::Message { seq, payload } => (seq, payload),
                Answer::Unreadable => {
                    self.counters.count(|counters| &counters.malformed);
                    continue;
                }
                Answer::End if proven => return Ok(()),
                Answer::End => return Err(Interrupted::AnotherEngine),
            };
            if known == Some(seq) {
                proven =
                    self.position.as_ref().is_some_and(|position| position.proof.is_of(&payload));
            }
            if !proven {
                return Err(Interrupted::AnotherEngine);
            }
            let expected = self.expected();
            if seq > expected && complete_from.is_some_and(|first| first < seq) {
                return Err(ReplayFailure::Dropped { from: expected, to: seq - 1 }.into());
            }
            complete_from = complete_from.or(Some(seq));
            if seq >= expected {
                self.hand_over(seq, payload, Source::Replay);
            }
        }
    }

    /// Hands over a message that comes after the position.
    fn hand_over(&mut self, seq: u64, payload: Bytes, source: Source) {
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
                self.told = true;
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

    /// The number of the next message. Engines count from 0.
    fn expected(&self) -> u64 {
        self.position.as_ref().map_or(0, |position| position.seq.saturating_add(1))
    }

    fn reset(&mut self) {
        self.position = None;
        if self.told {
            self.told = false;
            self.counters.count(|counters| &counters.resets);
            self.receiver.reset();
        }
    }
}

/// A connection that has subscribed, however long that takes. It is used until it is lost: between
/// two of them is the moment to catch up.
async fn connect(config: &SubscriberConfig, counters: &SubscriberCounters) -> Connection {
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
            Err(error) => {
                debug!(endpoint = config.endpoint, %error, "kv event endpoint is not there yet")
            }
        }
        sleep(config.retry_delay).await;
    }
}
