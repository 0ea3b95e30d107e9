mod fake_engine;

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::*;
use crate::event::{self, KvEventBatch};
use fake_engine::{Answers, FakeEngine, Kept, PATIENCE, batch};

/// What a receiver is told.
#[derive(Debug, PartialEq)]
enum Feed {
    Batch { seq: u64, batch: KvEventBatch },
    Reset,
    CaughtUp,
    Behind,
}

/// Passes on what it is told.
struct Told(mpsc::UnboundedSender<Feed>);

impl KvEventReceiver for Told {
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

/// A subscriber and what it hands over.
struct Followed {
    subscriber: Subscriber,
    counters: SubscriberCounters,
    feed: mpsc::UnboundedReceiver<Feed>,
}

fn config(engine: &FakeEngine) -> SubscriberConfig {
    SubscriberConfig {
        retry_delay: Duration::from_millis(5),
        // Long enough never to pass by chance; tests that wait for one of them shorten it.
        replay_timeout: PATIENCE,
        audit_interval: PATIENCE,
        ..SubscriberConfig::new(&engine.endpoint, Some(engine.replay_endpoint.clone()))
    }
}

fn follow(config: SubscriberConfig) -> Followed {
    let (sender, feed) = mpsc::unbounded_channel();
    let counters = SubscriberCounters::default();
    let subscriber = Subscriber::counting(config, Told(sender), counters.clone());
    Followed { subscriber, counters, feed }
}

impl Followed {
    async fn expect(&mut self, expected: impl IntoIterator<Item = Feed>) {
        for expected in expected {
            let next = timeout(PATIENCE, self.feed.recv()).await;
            let next = next.unwrap_or_else(|_| {
                panic!("waited in vain for {expected:?}: {:?}", self.counters.read())
            });
            assert_eq!(next, Some(expected), "{:?}", self.counters.read());
        }
    }
}

/// Message `seq` with the batch `mark`.
fn message(seq: u64, mark: u64) -> Feed {
    Feed::Batch { seq, batch: batch(mark) }
}

/// Messages whose mark is ten times their number.
fn messages(seqs: std::ops::Range<u64>) -> impl Iterator<Item = Feed> {
    seqs.map(|seq| message(seq, seq * 10))
}

/// What is told while something is missing.
fn behind(feeds: impl IntoIterator<Item = Feed>) -> impl Iterator<Item = Feed> {
    [Feed::Behind].into_iter().chain(feeds).chain([Feed::CaughtUp])
}

/// An engine that has published `count` messages, followed live from its first one on.
async fn followed_engine(
    count: u64,
    change: impl FnOnce(&mut SubscriberConfig),
) -> (FakeEngine, Followed) {
    let mut engine = FakeEngine::start().await;
    let mut config = config(&engine);
    change(&mut config);
    let mut followed = follow(config);
    engine.subscribed().await;
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
async fn what_was_published_before_the_start_is_replayed() {
    let mut engine = FakeEngine::start().await;
    (0..3).for_each(|seq| engine.lose(seq * 10));
    let mut followed = follow(config(&engine));
    followed.expect(messages(0..3).chain([Feed::CaughtUp])).await;
    engine.subscribed().await;
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
async fn the_engine_may_start_later() {
    let engine = FakeEngine::start().await;
    let mut config = config(&engine);
    config.connect_timeout = Duration::from_millis(20);
    let (endpoint, replay_endpoint) = (engine.endpoint.clone(), engine.replay_endpoint.clone());
    engine.stop().await;
    let mut followed = follow(config);
    let _engine = FakeEngine::start_at(&endpoint, &replay_endpoint, Kept::of([0, 10]), 2).await;
    followed.expect(messages(0..2).chain([Feed::CaughtUp])).await;
}

#[tokio::test]
async fn without_replay_following_starts_with_the_first_message_that_comes() {
    let mut engine = FakeEngine::start().await;
    (0..3).for_each(|seq| engine.lose(seq * 10));
    let mut config = config(&engine);
    no_replay(&mut config);
    let mut followed = follow(config);
    engine.subscribed().await;
    engine.publish(30).await;
    followed.expect([Feed::CaughtUp].into_iter().chain(behind([message(3, 30)]))).await;
    assert_eq!(followed.counters.read().resets, 0, "nothing was known that could be wrong");
}

#[tokio::test]
async fn a_gap_is_filled_and_nothing_comes_twice() {
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
async fn a_gap_without_replay_resets_and_goes_on() {
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
async fn a_gap_that_the_engine_no_longer_has_resets_and_takes_what_it_has() {
    let (mut engine, mut followed) = followed_engine(2, |_| ()).await;
    (2..5).for_each(|seq| engine.lose(seq * 10));
    engine.kept().forget_before(3);
    engine.publish(50).await;
    followed.expect(behind([Feed::Reset].into_iter().chain(messages(3..6)))).await;
    assert_eq!(followed.counters.read().lost, 1);
}

#[tokio::test]
async fn a_gap_is_given_up_when_the_replay_stays_silent() {
    let (mut engine, mut followed) = followed_engine(2, |config| {
        config.replay_timeout = Duration::from_millis(20);
        config.replay_attempts = 2;
    })
    .await;
    engine.kept().answer(Answers::None);
    engine.lose(20);
    engine.publish(30).await;
    followed.expect(behind([Feed::Reset, message(3, 30)])).await;
    assert_eq!(followed.counters.read().failed_replays, 2);
}

#[tokio::test]
async fn a_replay_that_stops_half_way_is_taken_up_where_it_stopped() {
    let (mut engine, mut followed) =
        followed_engine(2, |config| config.replay_timeout = Duration::from_millis(200)).await;
    (2..6).for_each(|seq| engine.lose(seq * 10));
    engine.kept().answer(Answers::Only(3));
    engine.publish(60).await;
    followed.expect(behind(messages(2..7))).await;
    let stats = followed.counters.read();
    assert!(stats.failed_replays >= 1);
    assert_eq!(stats.resets, 0);
}

#[tokio::test]
async fn what_was_dropped_on_the_way_is_asked_for_again() {
    let (mut engine, mut followed) = followed_engine(2, |_| ()).await;
    (2..6).for_each(|seq| engine.lose(seq * 10));
    engine.kept().answer(Answers::Dropping(4));
    engine.publish(60).await;
    followed.expect(behind(messages(2..7))).await;
    let stats = followed.counters.read();
    assert_eq!((stats.failed_replays, stats.resets, stats.lost), (1, 0, 0));
}

#[tokio::test]
async fn what_was_dropped_at_the_start_is_asked_for_again() {
    let mut engine = FakeEngine::start().await;
    (0..4).for_each(|seq| engine.lose(seq * 10));
    engine.kept().answer(Answers::Dropping(2));
    let mut followed = follow(config(&engine));
    followed.expect(messages(0..4).chain([Feed::CaughtUp])).await;
}

#[tokio::test]
async fn what_is_dropped_every_time_is_given_up() {
    let (mut engine, mut followed) = followed_engine(2, |config| config.replay_attempts = 2).await;
    (2..6).for_each(|seq| engine.lose(seq * 10));
    engine.kept().answer(Answers::AlwaysDropping(4));
    engine.publish(60).await;
    followed.expect(behind(messages(2..4).chain([Feed::Reset, message(6, 60)]))).await;
    assert_eq!(followed.counters.read().lost, 2);
    assert_eq!(
        followed.counters.read().failed_replays,
        3,
        "one that brought something and two that did not"
    );
}

#[tokio::test]
async fn a_lost_last_message_is_found_by_the_audit() {
    let (mut engine, mut followed) =
        followed_engine(1, |config| config.audit_interval = Duration::from_millis(20)).await;
    engine.lose(10);
    followed.expect(messages(1..2)).await;
    assert_eq!(followed.counters.read().gaps, 0);
}

#[tokio::test]
async fn a_broken_connection_to_the_same_engine_loses_nothing() {
    let (engine, mut followed) = followed_engine(3, |_| ()).await;
    let (kept, next) = (engine.kept(), engine.next());
    let mut engine = engine.restart(kept, next).await;
    engine.lose(30);
    engine.subscribed().await;
    followed.expect(behind(messages(3..4))).await;
    engine.publish(40).await;
    followed.expect(messages(4..5)).await;
    let stats = followed.counters.read();
    assert_eq!((stats.connections, stats.resets), (2, 0));
}

#[tokio::test]
async fn a_restarted_engine_is_noticed_by_its_past_whatever_its_numbers() {
    for published in [0, 2, 3, 4, 7] {
        let (engine, mut followed) = followed_engine(3, |_| ()).await;
        let _engine =
            engine.restart(Kept::of((0..published).map(|seq| 1000 + seq)), published).await;
        let past = (0..published).map(|seq| message(seq, 1000 + seq));
        followed.expect(behind([Feed::Reset].into_iter().chain(past))).await;
        assert_eq!(followed.counters.read().resets, 1);
    }
}

#[tokio::test]
async fn without_replay_every_new_connection_may_be_another_engine() {
    let (engine, mut followed) = followed_engine(3, no_replay).await;
    let mut engine = engine.restart(Kept::default(), 0).await;
    followed.expect(behind([Feed::Reset])).await;
    engine.subscribed().await;
    engine.publish(1000).await;
    followed.expect([message(0, 1000)]).await;
}

#[tokio::test]
async fn numbers_that_go_back_mean_a_restart() {
    let (mut engine, mut followed) = followed_engine(3, |_| ()).await;
    let payload = Bytes::from(batch(1000).encode());
    let past = Kept::of([1000]);
    engine.kept().become_like(&past);
    engine.send(vec![Bytes::new(), Bytes::copy_from_slice(&0u64.to_be_bytes()), payload]).await;
    followed.expect([Feed::Reset, message(0, 1000)]).await;
}

#[tokio::test]
async fn a_payload_that_can_t_be_read_resets_and_is_counted_but_not_fatal() {
    let (mut engine, mut followed) = followed_engine(2, |_| ()).await;
    engine.publish_payload(Bytes::from_static(b"no msgpack")).await;
    engine.publish(30).await;
    followed.expect([Feed::Reset, message(3, 30)]).await;
    let stats = followed.counters.read();
    assert_eq!((stats.malformed, stats.lost), (1, 1));
}

/// Panics over the batch with this mark, once, after it has told of it.
struct Stumbling {
    told: Told,
    over: Option<u64>,
}

impl KvEventReceiver for Stumbling {
    fn batch(&mut self, seq: u64, payload: &[u8]) -> Result<(), KvError> {
        self.told.batch(seq, payload)?;
        let stumbles = self.over.is_some_and(|mark| batch(mark).encode() == payload);
        assert!(!stumbles || self.over.take().is_none(), "on purpose");
        Ok(())
    }

    fn reset(&mut self) {
        self.told.reset();
    }

    fn set_caught_up(&mut self, caught_up: bool) {
        self.told.set_caught_up(caught_up);
    }
}

#[tokio::test]
async fn a_receiver_that_panics_is_reset_and_told_all_again() {
    let mut engine = FakeEngine::start().await;
    let (sender, feed) = mpsc::unbounded_channel();
    let counters = SubscriberCounters::default();
    let receiver = Stumbling { told: Told(sender), over: Some(10) };
    let subscriber = Subscriber::counting(config(&engine), receiver, counters.clone());
    let mut followed = Followed { subscriber, counters, feed };
    engine.subscribed().await;
    followed.expect([Feed::CaughtUp]).await;
    for mark in [0, 10] {
        engine.publish(mark).await;
    }
    followed.expect(messages(0..2).chain([Feed::Reset])).await;
    followed.expect(behind(messages(0..2))).await;
    assert_eq!(followed.counters.read().panics, 1);
}

#[tokio::test]
async fn messages_with_other_frames_are_counted_and_change_nothing() {
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
async fn only_the_topic_asked_for_is_followed() {
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
async fn the_feed_ends_when_the_subscriber_is_dropped() {
    let (_engine, followed) = followed_engine(1, |_| ()).await;
    let Followed { subscriber, mut feed, .. } = followed;
    drop(subscriber);
    assert_eq!(timeout(PATIENCE, feed.recv()).await.expect("the feed ends"), None);
}

/// Follows an engine from the position at which another subscriber has stopped.
fn resume(config: SubscriberConfig, from: StreamPosition) -> Followed {
    let (sender, feed) = mpsc::unbounded_channel();
    let counters = SubscriberCounters::default();
    let subscriber = Subscriber::resuming(config, Told(sender), counters.clone(), Some(from));
    Followed { subscriber, counters, feed }
}

/// An engine that has published three messages since its subscriber stopped behind the first two.
async fn left_engine() -> (FakeEngine, StreamPosition) {
    let (mut engine, followed) = followed_engine(2, |_| ()).await;
    let position = followed.subscriber.stop().await.expect("it has taken something");
    assert_eq!(position.seq, 1);
    for mark in [20, 30, 40] {
        engine.publish(mark).await;
    }
    (engine, position)
}

#[tokio::test]
async fn resumed_subscriber_takes_only_what_is_new() {
    let (mut engine, position) = left_engine().await;
    let mut followed = resume(config(&engine), position);
    followed.expect(messages(2..5).chain([Feed::CaughtUp])).await;
    engine.subscribed().await;
    engine.publish(50).await;
    followed.expect(messages(5..6)).await;
    assert_eq!(followed.counters.read().resets, 0);
    let position = followed.subscriber.stop().await.expect("a place");
    assert_eq!(position.seq, 5);
}

#[tokio::test]
async fn resuming_without_news_keeps_the_place() {
    let (engine, followed) = followed_engine(2, |_| ()).await;
    let position = followed.subscriber.stop().await.expect("a place");
    let mut followed = resume(config(&engine), position);
    followed.expect([Feed::CaughtUp]).await;
    assert_eq!(followed.subscriber.stop().await, Some(position));
}

#[tokio::test]
async fn resuming_at_a_restarted_engine_starts_over() {
    let (engine, position) = left_engine().await;
    let engine = engine.restart(Kept::of([7, 8, 9]), 3).await;
    let mut followed = resume(config(&engine), position);
    let all = [(0, 7), (1, 8), (2, 9)].map(|(seq, mark)| message(seq, mark));
    followed.expect([Feed::Reset].into_iter().chain(all).chain([Feed::CaughtUp])).await;
}

#[tokio::test]
async fn resuming_at_a_restarted_engine_that_says_less_starts_over() {
    let (engine, position) = left_engine().await;
    let engine = engine.restart(Kept::of([7]), 1).await;
    let mut followed = resume(config(&engine), position);
    followed.expect([Feed::Reset, message(0, 7), Feed::CaughtUp]).await;
}

#[tokio::test]
async fn resuming_too_late_starts_over() {
    let (engine, position) = left_engine().await;
    engine.kept().forget_before(3);
    let mut followed = resume(config(&engine), position);
    followed.expect([Feed::Reset].into_iter().chain(messages(3..5)).chain([Feed::CaughtUp])).await;
}

#[tokio::test]
async fn resuming_without_a_replay_socket_starts_over() {
    let (engine, position) = left_engine().await;
    let mut config = config(&engine);
    no_replay(&mut config);
    let mut followed = resume(config, position);
    followed.expect([Feed::Reset, Feed::CaughtUp]).await;
}

#[tokio::test]
async fn subscriber_that_has_taken_nothing_has_no_place() {
    let (_engine, followed) = followed_engine(0, |_| ()).await;
    assert_eq!(followed.subscriber.stop().await, None);
}
