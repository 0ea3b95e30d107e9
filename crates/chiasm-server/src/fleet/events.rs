//! Following an engine's KV events into the router.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chiasm_backend::KvEventStream;
use chiasm_kv::event::KvEvent;
use chiasm_kv::{KvError, KvEventReceiver, Subscriber, SubscriberConfig, SubscriberCounters, SubscriberStats};
use chiasm_router::Router;
use chiasm_types::WorkerId;

/// The counts of one worker, over all its backends. Clones are the same counts.
#[derive(Clone, Default)]
pub(super) struct Followed {
    subscriber: SubscriberCounters,
    index: Arc<Applied>,
}

#[derive(Default)]
struct Applied {
    events: AtomicU64,
    /// How old the last batch was, in microseconds.
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

/// Feeds an engine's KV events to the router until dropped.
pub(super) fn follow(router: Arc<Router>, id: WorkerId, stream: &KvEventStream, followed: Followed) -> Subscriber {
    let KvEventStream { endpoint, replay_endpoint, topic } = stream.clone();
    let source = SubscriberConfig { topic, ..SubscriberConfig::new(endpoint, replay_endpoint) };
    let counters = followed.subscriber.clone();
    Subscriber::counting(source, Feed { router, id, followed, fresh: true, looks_ahead: false }, counters)
}

struct Feed {
    router: Arc<Router>,
    id: WorkerId,
    followed: Followed,
    /// Nothing was applied since the index was empty.
    fresh: bool,
    /// The engine finds a block only where the tokens after it agree too, which the index does not look at.
    looks_ahead: bool,
}

impl KvEventReceiver for Feed {
    fn batch(&mut self, seq: u64, payload: &[u8]) -> Result<(), KvError> {
        let Self { router, id, followed, fresh, looks_ahead } = self;
        let (mut events, mut timestamp) = (0, 0.0);
        router.apply_payload(*id, payload, |batch| {
            // Engines count from 0 on, with an empty cache.
            let cleared = batch.events.contains(&KvEvent::AllBlocksCleared);
            if *fresh && seq > 0 && !cleared {
                tracing::warn!(worker = %id, "first KV events are lost: also taken to hold what it computes (approximate)");
                router.set_history_known(*id, false);
            } else if *fresh || cleared {
                router.set_history_known(*id, true);
            }
            *fresh = false;
            if !*looks_ahead && batch.events.iter().any(covers_lookahead) {
                tracing::warn!(worker = %id, "its blocks' hashes cover tokens after them: what it holds is approximate");
                *looks_ahead = true;
            }
            if *looks_ahead {
                router.set_history_known(*id, false);
            }
            (events, timestamp) = (batch.events.len(), batch.timestamp);
        })?;
        followed.applied(events, timestamp);
        Ok(())
    }

    fn reset(&mut self) {
        tracing::warn!(worker = %self.id, "KV events lost for good, or another engine: forgetting its blocks");
        self.router.reset_worker_blocks(self.id);
        self.fresh = true;
    }

    fn set_caught_up(&mut self, caught_up: bool) {
        self.router.set_caught_up(self.id, caught_up);
    }
}

fn covers_lookahead(event: &KvEvent) -> bool {
    matches!(event, KvEvent::BlockStored(stored) if stored.lookahead_token_ids.is_some())
}

#[cfg(test)]
mod tests {
    use chiasm_kv::event::{BlockStored, ExternalHash, KvEventBatch};
    use chiasm_router::{Knowledge, RouterConfig, WorkerInfo};
    use chiasm_types::{BlockSize, PlanClassId, TokenId};

    use super::*;

    fn stored(hash: u64) -> Vec<u8> {
        let event = BlockStored {
            block_hashes: vec![ExternalHash::U64(hash)],
            token_ids: vec![TokenId(hash as u32)],
            block_size: 1,
            ..Default::default()
        };
        let events = vec![KvEvent::BlockStored(event)];
        KvEventBatch { timestamp: 1.5, events, data_parallel_rank: Some(0) }.encode()
    }

    fn info() -> WorkerInfo {
        WorkerInfo {
            total_blocks: 10,
            block_size: BlockSize::new(1).unwrap(),
            publishes_events: true,
            encoder_cache_tokens: 0,
            receiver_cache_elements: 0,
            class: PlanClassId(0),
            max_prompt_tokens: 100,
            max_encoder_tokens: 100,
        }
    }

    #[test]
    fn a_payload_that_can_t_be_read_changes_nothing_and_after_a_reset_the_history_is_unknown() {
        let (router, id, followed) = (Arc::new(Router::new(RouterConfig::default())), WorkerId(0), Followed::default());
        router.add_worker(id, info());
        let mut feed = Feed { router: router.clone(), id, followed: followed.clone(), fresh: true, looks_ahead: false };
        feed.set_caught_up(true);
        let known = || {
            let worker = router.workers()[0];
            (worker.index.blocks, worker.knowledge, followed.counts().applied)
        };
        feed.batch(0, &stored(1)).unwrap();
        let exact = known();
        assert_eq!(exact, (1, Knowledge::Exact, 1));
        assert!(feed.batch(1, &stored(2)[..20]).is_err());
        assert_eq!(known(), exact);
        feed.reset();
        assert_eq!(known(), (0, Knowledge::Exact, 1));
        feed.batch(2, &stored(3)).unwrap();
        assert_eq!(known(), (1, Knowledge::Approximate, 2));
        let cleared =
            KvEventBatch { timestamp: 1.5, events: vec![KvEvent::AllBlocksCleared], data_parallel_rank: None };
        feed.batch(3, &cleared.encode()).unwrap();
        assert_eq!(known(), (0, Knowledge::Exact, 3));
    }

    #[test]
    fn an_engine_whose_hashes_look_ahead_is_never_known_exactly() {
        let (router, id, followed) = (Arc::new(Router::new(RouterConfig::default())), WorkerId(0), Followed::default());
        router.add_worker(id, info());
        let mut feed = Feed { router: router.clone(), id, followed, fresh: true, looks_ahead: false };
        feed.set_caught_up(true);
        let mut batch = |seq, events| {
            let batch = KvEventBatch { timestamp: 1.5, events, data_parallel_rank: None };
            feed.batch(seq, &batch.encode()).unwrap();
            router.workers()[0].knowledge
        };
        let event = |lookahead_token_ids| {
            KvEvent::BlockStored(BlockStored {
                block_hashes: vec![ExternalHash::U64(1)],
                token_ids: vec![TokenId(1)],
                block_size: 1,
                lookahead_token_ids,
                ..Default::default()
            })
        };
        assert_eq!(batch(0, vec![event(None)]), Knowledge::Exact);
        assert_eq!(batch(1, vec![event(Some(vec![vec![TokenId(2)]]))]), Knowledge::Approximate);
        assert_eq!(batch(2, vec![KvEvent::AllBlocksCleared]), Knowledge::Approximate);
    }
}
