//! Following an engine's KV events into the router.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chiasm_engine::wire::EngineReady;
use chiasm_kv::event::KvEvent;
use chiasm_kv::{Feed, Subscriber, SubscriberConfig, SubscriberCounters, SubscriberStats};
use chiasm_router::Router;
use chiasm_types::WorkerId;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// KV event batches that may wait for the index; the subscriber waits when there are more, and replays if that makes
/// it lose some.
const FEED_CAPACITY: usize = 1024;

/// What has been counted for one worker. Clones are the same counts.
#[derive(Clone, Default)]
pub(super) struct Followed {
    subscriber: SubscriberCounters,
    index: Arc<Applied>,
}

#[derive(Default)]
struct Applied {
    events: AtomicU64,
    /// In microseconds.
    lag: AtomicU64,
}

/// How the KV events of one worker have been followed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KvEventCounts {
    /// Events applied to the index.
    pub applied: u64,
    /// What the subscriber counts.
    pub subscriber: SubscriberStats,
    /// How long after the engine's scheduler made it the last batch was applied, by the clocks of both machines.
    pub lag: Duration,
}

impl Followed {
    pub(super) fn counts(&self) -> KvEventCounts {
        KvEventCounts {
            applied: self.index.events.load(Relaxed),
            subscriber: self.subscriber.read(),
            lag: Duration::from_micros(self.index.lag.load(Relaxed)),
        }
    }

    fn applied(&self, events: usize, timestamp: f64) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // An engine may say anything; clocks may differ.
        let made = Duration::try_from_secs_f64(timestamp).unwrap_or_default();
        let lag = u64::try_from(now.saturating_sub(made).as_micros()).unwrap_or(u64::MAX);
        self.index.events.fetch_add(events as u64, Relaxed);
        self.index.lag.store(lag, Relaxed);
    }
}

/// Where an engine publishes its KV events, if it does and they can be had.
pub(super) fn source(info: &EngineReady) -> Option<SubscriberConfig> {
    let config = info.kv_events_config.as_ref()?;
    let (endpoint, replay) = config.reachable_at("127.0.0.1")?;
    Some(SubscriberConfig { topic: config.topic.clone(), ..SubscriberConfig::new(endpoint, replay) })
}

/// Ends with this value.
pub(super) struct Following {
    _subscriber: Subscriber,
    task: JoinHandle<()>,
}

impl Drop for Following {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Feeds an engine's KV events to the router.
pub(super) fn follow(router: Arc<Router>, id: WorkerId, source: SubscriberConfig, followed: Followed) -> Following {
    let (sender, mut feed) = mpsc::channel(FEED_CAPACITY);
    let subscriber = Subscriber::counting(source, sender, followed.subscriber.clone());
    let task = tokio::spawn(async move {
        // Nothing was applied since the index was empty.
        let mut fresh = true;
        while let Some(item) = feed.recv().await {
            match item {
                Feed::Batch { seq, batch } => {
                    // Engines count from 0 on, with an empty cache.
                    let cleared = batch.events.contains(&KvEvent::AllBlocksCleared);
                    if fresh && seq > 0 && !cleared {
                        tracing::warn!(
                            "{id}: its first KV events are lost; also taken to hold what it computes (approximate)"
                        );
                        router.set_history_known(id, false);
                    } else if fresh || cleared {
                        router.set_history_known(id, true);
                    }
                    fresh = false;
                    router.apply(id, &batch);
                    followed.applied(batch.events.len(), batch.timestamp);
                }
                Feed::Reset => {
                    tracing::warn!("{id}: KV events lost for good, or another engine; forgetting its blocks");
                    router.reset_worker_blocks(id);
                    fresh = true;
                }
                Feed::CaughtUp => router.set_caught_up(id, true),
                Feed::Behind => router.set_caught_up(id, false),
                _ => {}
            }
        }
    });
    Following { _subscriber: subscriber, task }
}
