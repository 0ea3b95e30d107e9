mod fake_engine;

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::*;
use crate::event::{self, KvEventBatch};
use fake_engine::{FakeEngine, ReplayBehavior, ReplayBuffer, TEST_TIMEOUT, batch};

/// A call of a receiver.
#[derive(Debug, PartialEq)]
enum Feed {
    Batch { seq: u64, batch: KvEventBatch },
    Reset,
    CaughtUp,
    Behind,
}

/// A receiver that sends its calls to the test.
struct FeedSender(mpsc::UnboundedSender<Feed>);

impl KvEventReceiver for FeedSender {
    fn batch(&mut self, seq: u64, payload: &[u8]) -> Result<(), KvError> {
        let batch = event::decode(payload)?;
        let _ = self.0.send(Feed::Batch { seq, batch });
        Ok(())
    }

    fn reset(&mut self) {
        let _ = self.0.send(Feed::Reset);
    }

    fn set_caught_up(&mut self, caught_up: bool) {
        let _ = self.0.send(if caught_up { Feed::CaughtUp } else { Feed::Behind });
    }
}

/// A subscriber, with the calls of its receiver.
struct Followed {
    subscriber: Subscriber,
    counters: SubscriberCounters,
    feed: mpsc::UnboundedReceiver<Feed>,
}

fn config(engine: &FakeEngine) -> SubscriberConfig {
    SubscriberConfig {
        retry_delay: Duration::from_millis(5),
        // Long enough never to expire by chance. Tests that wait for one of them shorten it.
        replay_timeout: TEST_TIMEOUT,
        audit_interval: TEST_TIMEOUT,
        ..SubscriberConfig::new(&engine.endpoint, Some(engine.replay_endpoint.clone()))
    }
}

fn follow(config: SubscriberConfig) -> Followed {
    let (sender, feed) = mpsc::unbounded_channel();
    let counters = SubscriberCounters::default();
    let subscriber = Subscriber::start(config, FeedSender(sender), counters.clone());
    Followed { subscriber, counters, feed }
}

impl Followed {
    async fn expect(&mut self, expected: impl IntoIterator<Item = Feed>) {
        for expected in expected {
            let next = timeout(TEST_TIMEOUT, self.feed.recv()).await;
            let next = next.unwrap_or_else(|_| {
                panic!("waited in vain for {expected:?}: {:?}", self.counters.read())
            });
            assert_eq!(next, Some(expected), "{:?}", self.counters.read());
        }
    }
}

/// Returns the call for message `seq` with the batch `mark`.
fn message(seq: u64, mark: u64) -> Feed {
    Feed::Batch { seq, batch: batch(mark) }
}

/// Returns the calls for messages whose mark is ten times their number.
fn messages(seqs: std::ops::Range<u64>) -> impl Iterator<Item = Feed> {
    seqs.map(|seq| message(seq, seq * 10))
}

/// Returns the calls while messages are missing, with `feeds` in between.
fn behind(feeds: impl IntoIterator<Item = Feed>) -> impl Iterator<Item = Feed> {
    [Feed::Behind].into_iter().chain(feeds).chain([Feed::CaughtUp])
}

/// Returns an engine that has published `count` messages, followed live from its first one on.
async fn followed_engine(
    count: u64,
    change: impl FnOnce(&mut SubscriberConfig),
) -> (FakeEngine, Followed) {
    let mut engine = FakeEngine::start().await;
    let mut config = config(&engine);
    change(&mut config);
    let mut followed = follow(config);
    engine.wait_for_subscription().await;
    followed.expect([Feed::CaughtUp]).await;
    for seq in 0..count {
        engine.publish(seq * 10).await;
    }
    followed.expect(messages(0..count)).await;
    (engine, followed)
}

fn no_replay(config: &mut SubscriberConfig) {
    config.replay_endpoint = None;
}

#[tokio::test]
async fn earlier_messages_are_replayed_at_start() {
    let mut engine = FakeEngine::start().await;
    (0..3).for_each(|seq| engine.lose(seq * 10));
    let mut followed = follow(config(&engine));
    followed.expect(messages(0..3).chain([Feed::CaughtUp])).await;
    engine.wait_for_subscription().await;
    engine.publish(30).await;
    followed.expect(messages(3..4)).await;
    let expected = SubscriberStats {
        connections: 1,
        live_batches: 1,
        replayed_batches: 3,
        replays: 1,
        ..Default::default()
    };
    assert_eq!(followed.counters.read(), expected);
}

#[tokio::test]
async fn engine_started_later_is_followed() {
    let engine = FakeEngine::start().await;
    let mut config = config(&engine);
    config.connect_timeout = Duration::from_millis(20);
    let endpoint = engine.endpoint.clone();
    let replay_endpoint = engine.replay_endpoint.clone();
    engine.stop().await;
    let mut followed = follow(config);
    let _engine =
        FakeEngine::start_at(&endpoint, &replay_endpoint, ReplayBuffer::with_marks([0, 10]), 2)
            .await;
    followed.expect(messages(0..2).chain([Feed::CaughtUp])).await;
}

#[tokio::test]
async fn first_message_without_replay_causes_no_reset() {
    let mut engine = FakeEngine::start().await;
    (0..3).for_each(|seq| engine.lose(seq * 10));
    let mut config = config(&engine);
    no_replay(&mut config);
    let mut followed = follow(config);
    engine.wait_for_subscription().await;
    engine.publish(30).await;
    followed.expect([Feed::CaughtUp].into_iter().chain(behind([message(3, 30)]))).await;
    assert_eq!(followed.counters.read().resets, 0, "nothing was known that could be wrong");
}

#[tokio::test]
async fn gap_is_filled_without_repeats() {
    let (mut engine, mut followed) = followed_engine(2, |_| ()).await;
    engine.lose(20);
    engine.lose(30);
    engine.publish(40).await;
    followed.expect(behind(messages(2..5))).await;
    engine.publish(50).await;
    followed.expect(messages(5..6)).await;
    let stats = followed.counters.read();
    assert_eq!((stats.gaps, stats.resets, stats.malformed), (1, 0, 0));
}

#[tokio::test]
async fn gap_without_replay_resets_receiver() {
    let (mut engine, mut followed) = followed_engine(2, no_replay).await;
    engine.lose(20);
    engine.publish(30).await;
    followed.expect(behind([Feed::Reset, message(3, 30)])).await;
    engine.publish(40).await;
    followed.expect([message(4, 40)]).await;
    let stats = followed.counters.read();
    assert_eq!((stats.gaps, stats.resets, stats.lost), (1, 1, 1));
}

#[tokio::test]
async fn gap_older_than_replay_buffer_resets_receiver() {
    let (mut engine, mut followed) = followed_engine(2, |_| ()).await;
    (2..5).for_each(|seq| engine.lose(seq * 10));
    engine.replay_buffer().drop_before(3);
    engine.publish(50).await;
    followed.expect(behind([Feed::Reset].into_iter().chain(messages(3..6)))).await;
    assert_eq!(followed.counters.read().lost, 1);
}

#[tokio::test]
async fn gap_is_given_up_if_replay_stays_silent() {
    let (mut engine, mut followed) = followed_engine(2, |config| {
        config.replay_timeout = Duration::from_millis(20);
        config.replay_attempts = 2;
    })
    .await;
    engine.replay_buffer().set_behavior(ReplayBehavior::None);
    engine.lose(20);
    engine.publish(30).await;
    followed.expect(behind([Feed::Reset, message(3, 30)])).await;
    assert_eq!(followed.counters.read().failed_replays, 2);
}

#[tokio::test]
async fn interrupted_replay_continues_where_it_stopped() {
    let (mut engine, mut followed) =
        followed_engine(2, |config| config.replay_timeout = Duration::from_millis(200)).await;
    (2..6).for_each(|seq| engine.lose(seq * 10));
    engine.replay_buffer().set_behavior(ReplayBehavior::Only(3));
    engine.publish(60).await;
    followed.expect(behind(messages(2..7))).await;
    let stats = followed.counters.read();
    assert!(stats.failed_replays >= 1);
    assert_eq!(stats.resets, 0);
}

#[tokio::test]
async fn reply_dropped_during_gap_replay_is_requested_again() {
    let (mut engine, mut followed) = followed_engine(2, |_| ()).await;
    (2..6).for_each(|seq| engine.lose(seq * 10));
    engine.replay_buffer().set_behavior(ReplayBehavior::Dropping(4));
    engine.publish(60).await;
    followed.expect(behind(messages(2..7))).await;
    let stats = followed.counters.read();
    assert_eq!((stats.failed_replays, stats.resets, stats.lost), (1, 0, 0));
}

#[tokio::test]
async fn reply_dropped_during_first_replay_is_requested_again() {
    let mut engine = FakeEngine::start().await;
    (0..4).for_each(|seq| engine.lose(seq * 10));
    engine.replay_buffer().set_behavior(ReplayBehavior::Dropping(2));
    let mut followed = follow(config(&engine));
    followed.expect(messages(0..4).chain([Feed::CaughtUp])).await;
}

#[tokio::test]
async fn reply_dropped_every_time_is_given_up() {
    let (mut engine, mut followed) = followed_engine(2, |config| config.replay_attempts = 2).await;
    (2..6).for_each(|seq| engine.lose(seq * 10));
    engine.replay_buffer().set_behavior(ReplayBehavior::AlwaysDropping(4));
    engine.publish(60).await;
    followed.expect(behind(messages(2..4).chain([Feed::Reset, message(6, 60)]))).await;
    assert_eq!(followed.counters.read().lost, 2);
    assert_eq!(followed.counters.read().failed_replays, 3, "one replay with progress, two without");
}

#[tokio::test]
async fn lost_last_message_is_found_by_audit() {
    let (mut engine, mut followed) =
        followed_engine(1, |config| config.audit_interval = Duration::from_millis(20)).await;
    engine.lose(10);
    followed.expect(messages(1..2)).await;
    assert_eq!(followed.counters.read().gaps, 0);
}

#[tokio::test]
async fn reconnect_to_same_engine_loses_nothing() {
    let (engine, mut followed) = followed_engine(3, |_| ()).await;
    let buffer = engine.replay_buffer();
    let next = engine.next();
    let mut engine = engine.restart(buffer, next).await;
    engine.lose(30);
    engine.wait_for_subscription().await;
    followed.expect(behind(messages(3..4))).await;
    engine.publish(40).await;
    followed.expect(messages(4..5)).await;
    let stats = followed.counters.read();
    assert_eq!((stats.connections, stats.resets), (2, 0));
}

#[tokio::test]
async fn restarted_engine_is_detected_by_its_history() {
    for published in [0, 2, 3, 4, 7] {
        let (engine, mut followed) = followed_engine(3, |_| ()).await;
        let buffer = ReplayBuffer::with_marks((0..published).map(|seq| 1000 + seq));
        let _engine = engine.restart(buffer, published).await;
        let history = (0..published).map(|seq| message(seq, 1000 + seq));
        followed.expect(behind([Feed::Reset].into_iter().chain(history))).await;
        assert_eq!(followed.counters.read().resets, 1);
    }
}

#[tokio::test]
async fn reconnect_without_replay_resets_receiver() {
    let (engine, mut followed) = followed_engine(3, no_replay).await;
    let mut engine = engine.restart(ReplayBuffer::default(), 0).await;
    followed.expect(behind([Feed::Reset])).await;
    engine.wait_for_subscription().await;
    engine.publish(1000).await;
    followed.expect([message(0, 1000)]).await;
}

#[tokio::test]
async fn lower_sequence_number_resets_receiver() {
    let (mut engine, mut followed) = followed_engine(3, |_| ()).await;
    let payload = Bytes::from(batch(1000).encode());
    engine.replay_buffer().replace_with(&ReplayBuffer::with_marks([1000]));
    engine.send(vec![Bytes::new(), Bytes::copy_from_slice(&0u64.to_be_bytes()), payload]).await;
    followed.expect([Feed::Reset, message(0, 1000)]).await;
}

#[tokio::test]
async fn unreadable_payload_resets_receiver() {
    let (mut engine, mut followed) = followed_engine(2, |_| ()).await;
    engine.publish_payload(Bytes::from_static(b"no msgpack")).await;
    engine.publish(30).await;
    followed.expect([Feed::Reset, message(3, 30)]).await;
    let stats = followed.counters.read();
    assert_eq!((stats.malformed, stats.lost), (1, 1));
}

/// A receiver that panics once, after it has sent the batch with the given mark.
struct PanickingReceiver {
    sender: FeedSender,
    mark: Option<u64>,
}

impl KvEventReceiver for PanickingReceiver {
    fn batch(&mut self, seq: u64, payload: &[u8]) -> Result<(), KvError> {
        self.sender.batch(seq, payload)?;
        let panics = self.mark.is_some_and(|mark| batch(mark).encode() == payload);
        assert!(!panics || self.mark.take().is_none(), "on purpose");
        Ok(())
    }

    fn reset(&mut self) {
        self.sender.reset();
    }

    fn set_caught_up(&mut self, caught_up: bool) {
        self.sender.set_caught_up(caught_up);
    }
}

#[tokio::test]
async fn panicking_receiver_gets_all_batches_again() {
    let mut engine = FakeEngine::start().await;
    let (sender, feed) = mpsc::unbounded_channel();
    let counters = SubscriberCounters::default();
    let receiver = PanickingReceiver { sender: FeedSender(sender), mark: Some(10) };
    let subscriber = Subscriber::start(config(&engine), receiver, counters.clone());
    let mut followed = Followed { subscriber, counters, feed };
    engine.wait_for_subscription().await;
    followed.expect([Feed::CaughtUp]).await;
    for mark in [0, 10] {
        engine.publish(mark).await;
    }
    followed.expect(messages(0..2).chain([Feed::Reset])).await;
    followed.expect(behind(messages(0..2))).await;
    assert_eq!(followed.counters.read().panics, 1);
}

#[tokio::test]
async fn messages_with_unexpected_frames_are_skipped() {
    let (mut engine, mut followed) = followed_engine(2, |_| ()).await;
    let short = Bytes::from_static(b"seven b");
    engine.send(vec![Bytes::new()]).await;
    engine.send(vec![Bytes::new(), short.clone(), short]).await;
    engine.publish(20).await;
    followed.expect(messages(2..3)).await;
    let stats = followed.counters.read();
    assert_eq!((stats.malformed, stats.resets, stats.gaps), (2, 0, 0));
}

#[tokio::test]
async fn other_topics_are_ignored() {
    let (mut engine, mut followed) = followed_engine(0, |config| {
        config.topic = "kv@w0".into();
        no_replay(config);
    })
    .await;
    for (topic, seq, mark) in [("kv@w1", 0u64, 7), ("kv@w0", 0, 8)] {
        let seq = Bytes::copy_from_slice(&seq.to_be_bytes());
        engine.send(vec![topic.into(), seq, batch(mark).encode().into()]).await;
    }
    followed.expect([message(0, 8)]).await;
}

#[tokio::test]
async fn dropped_subscriber_drops_receiver() {
    let (_engine, followed) = followed_engine(1, |_| ()).await;
    let Followed { subscriber, mut feed, .. } = followed;
    drop(subscriber);
    assert_eq!(timeout(TEST_TIMEOUT, feed.recv()).await.expect("the feed ends"), None);
}

/// Follows an engine from the position at which another subscriber stopped.
fn resume(config: SubscriberConfig, from: StreamPosition) -> Followed {
    let (sender, feed) = mpsc::unbounded_channel();
    let counters = SubscriberCounters::default();
    let subscriber = Subscriber::resume(config, FeedSender(sender), counters.clone(), Some(from));
    Followed { subscriber, counters, feed }
}

/// Returns an engine that has published three messages since its subscriber stopped after the first
/// two.
async fn engine_after_stop() -> (FakeEngine, StreamPosition) {
    let (mut engine, followed) = followed_engine(2, |_| ()).await;
    let position = followed.subscriber.stop().await.expect("a position");
    assert_eq!(position.seq, 1);
    for mark in [20, 30, 40] {
        engine.publish(mark).await;
    }
    (engine, position)
}

#[tokio::test]
async fn resumed_subscriber_delivers_only_new_batches() {
    let (mut engine, position) = engine_after_stop().await;
    let mut followed = resume(config(&engine), position);
    followed.expect(messages(2..5).chain([Feed::CaughtUp])).await;
    engine.wait_for_subscription().await;
    engine.publish(50).await;
    followed.expect(messages(5..6)).await;
    assert_eq!(followed.counters.read().resets, 0);
    let position = followed.subscriber.stop().await.expect("a position");
    assert_eq!(position.seq, 5);
}

#[tokio::test]
async fn resume_without_new_batches_keeps_position() {
    let (engine, followed) = followed_engine(2, |_| ()).await;
    let position = followed.subscriber.stop().await.expect("a position");
    let mut followed = resume(config(&engine), position);
    followed.expect([Feed::CaughtUp]).await;
    assert_eq!(followed.subscriber.stop().await, Some(position));
}

#[tokio::test]
async fn resume_at_restarted_engine_resets_receiver() {
    let (engine, position) = engine_after_stop().await;
    let engine = engine.restart(ReplayBuffer::with_marks([7, 8, 9]), 3).await;
    let mut followed = resume(config(&engine), position);
    let all = [(0, 7), (1, 8), (2, 9)].map(|(seq, mark)| message(seq, mark));
    followed.expect([Feed::Reset].into_iter().chain(all).chain([Feed::CaughtUp])).await;
}

#[tokio::test]
async fn resume_at_engine_with_fewer_batches_resets_receiver() {
    let (engine, position) = engine_after_stop().await;
    let engine = engine.restart(ReplayBuffer::with_marks([7]), 1).await;
    let mut followed = resume(config(&engine), position);
    followed.expect([Feed::Reset, message(0, 7), Feed::CaughtUp]).await;
}

#[tokio::test]
async fn resume_after_replay_buffer_limit_resets_receiver() {
    let (engine, position) = engine_after_stop().await;
    engine.replay_buffer().drop_before(3);
    let mut followed = resume(config(&engine), position);
    followed.expect([Feed::Reset].into_iter().chain(messages(3..5)).chain([Feed::CaughtUp])).await;
}

#[tokio::test]
async fn resume_without_replay_socket_resets_receiver() {
    let (engine, position) = engine_after_stop().await;
    let mut config = config(&engine);
    no_replay(&mut config);
    let mut followed = resume(config, position);
    followed.expect([Feed::Reset, Feed::CaughtUp]).await;
}

#[tokio::test]
async fn subscriber_without_batches_has_no_position() {
    let (_engine, followed) = followed_engine(0, |_| ()).await;
    assert_eq!(followed.subscriber.stop().await, None);
}
