//! Following an engine's KV events into the router, and telling whoever follows them further.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::{
    KvEventStream, KvSink, KvSinkError, KvSource, OthersEvent, OthersItem, OthersJob,
};
use chiasm_kv::event::{KvEvent, KvEventBatch};
use chiasm_kv::{BlockKey, KvError, KvEventReceiver, StreamPosition, Subscriber, SubscriberConfig};
use chiasm_router::{Reservation, RouteItem, RouteRequest, Router};
use chiasm_types::{PlanClassId, WorkerId};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::followed::Followed;
use crate::kept::KeptIndex;
use crate::tap::{KvHeard, Tap};
use crate::{Fleet, Worker};

/// The longest time for which saving the knowledge of one worker may delay the end of the process.
const SAVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Feeds the router what is told of a worker's KV cache, until dropped.
pub(crate) enum Following {
    Events { subscriber: Subscriber, distrusted: Arc<AtomicBool>, tap: Arc<Tap> },
    Told { _open: Open },
    Nothing,
}

/// Whether what is told may still be fed to the router: locked as long as it is.
type IsOpen = Arc<Mutex<bool>>;

/// Ends with the feed that it is of.
pub(crate) struct Open(IsOpen);

impl Following {
    /// What is told can't be all that the worker holds, from now on.
    pub(crate) fn distrust(&self, router: &Router, id: WorkerId) {
        if let Self::Events { distrusted, .. } = self {
            distrusted.store(true, Relaxed);
        }
        router.set_history_known(id, false);
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // From here on the worker's id may be another one's.
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

impl Following {
    /// Stops following, and saves what is known of the worker's KV cache for the next process.
    pub(crate) async fn keep(self, fleet: &Fleet, worker: &Worker) {
        let Self::Events { subscriber, distrusted, tap } = self else { return };
        let can = worker.backend.capabilities();
        let KvSource::Events(stream) = can.kv.clone() else { return };
        let Some(kept) = fleet.kept.get().cloned() else { return };
        let Some(position) = subscriber.stop().await else { return };
        // Inexact knowledge is not worth saving.
        if distrusted.load(Relaxed) {
            return;
        }
        let router = fleet.router.clone();
        let id = worker.id;
        let class = can.class.clone();
        let leave = move || {
            // Drops the blocks that the worker is only presumed to hold.
            router.set_history_known(id, true);
            let snapshot = router.snapshot(id)?.bytes;
            let index = KeptIndex { position, history_known: tap.history_known(), snapshot };
            Some(kept.leave(&stream, &class, &index))
        };
        match timeout(SAVE_TIMEOUT, spawn_blocking(leave)).await {
            Ok(Ok(Some(Ok(())))) => {
                tracing::info!(worker = %id, seq = position.seq, "left what is known of its KV cache to the next process");
            }
            Ok(Ok(Some(Err(error)))) => {
                tracing::warn!(worker = %id, %error, "what is known of its KV cache could not be left to the next process");
            }
            Err(_) => {
                tracing::warn!(worker = %id, "leaving what is known of its KV cache took too long")
            }
            Ok(Ok(None) | Err(_)) => {}
        }
    }
}

/// Starts feeding the router with a worker's KV events, on top of what an earlier process has
/// saved.
pub(crate) async fn follow(fleet: &Fleet, worker: &Worker) -> Following {
    let (router, id) = (fleet.router.clone(), worker.id);
    let followed = fleet.followed().get(&id).cloned().unwrap_or_default();
    followed.tap.start();
    match &worker.backend.capabilities().kv {
        KvSource::Events(stream) => {
            let (endpoint, replay_endpoint) =
                (stream.endpoint.clone(), stream.replay_endpoint.clone());
            let topic = stream.topic.clone();
            let source =
                SubscriberConfig { topic, ..SubscriberConfig::new(endpoint, replay_endpoint) };
            let counters = followed.subscriber.clone();
            let distrusted = Arc::new(AtomicBool::new(false));
            let tap = followed.tap();
            let from = resume(fleet, worker, stream, &tap).await;
            let feed = Feed {
                router,
                id,
                followed,
                fresh: from.is_none(),
                resumed: from.is_some(),
                looks_ahead: false,
                distrusted: distrusted.clone(),
            };
            Following::Events {
                subscriber: Subscriber::resuming(source, feed, counters, from),
                distrusted,
                tap,
            }
        }
        KvSource::Backend => {
            let open = Arc::new(Mutex::new(true));
            let others = Others { class: worker.class, jobs: HashMap::new() };
            worker.backend.follow_kv(Box::new(ToldFeed {
                router,
                id,
                followed,
                open: open.clone(),
                others,
            }));
            Following::Told { _open: Open(open) }
        }
        KvSource::Unknown { .. } => Following::Nothing,
    }
}

/// Restores what an earlier process has saved about a worker. Returns the position in the worker's
/// stream of events up to which that is complete.
async fn resume(
    fleet: &Fleet,
    worker: &Worker,
    stream: &KvEventStream,
    tap: &Tap,
) -> Option<StreamPosition> {
    let kept = fleet.kept.get()?.clone();
    let router = fleet.router.clone();
    let id = worker.id;
    let stream = stream.clone();
    let class = worker.backend.capabilities().class.clone();
    let restore = move || {
        let KeptIndex { position, history_known, snapshot } = kept.take(&stream, &class)?;
        match router.restore(id, &snapshot) {
            Ok(()) => Some((position, history_known)),
            Err(error) => {
                tracing::warn!(worker = %id, %error, "what was known of its KV cache is ignored");
                None
            }
        }
    };
    let (position, history_known) = spawn_blocking(restore).await.ok()??;
    if !history_known {
        tracing::warn!(worker = %id, "first KV events were lost before: also taken to hold what it computes (approximate)");
    }
    tap.set_history_known(history_known);
    fleet.router.set_history_known(id, history_known);
    Some(position)
}

/// Takes what a backend itself tells.
struct ToldFeed {
    router: Arc<Router>,
    id: WorkerId,
    followed: Followed,
    open: IsOpen,
    others: Others,
}

/// What other frontends have given to a worker: it counts as if this one had.
struct Others {
    class: PlanClassId,
    jobs: HashMap<u64, Reservation>,
}

impl Others {
    fn take(&mut self, router: &Router, id: WorkerId, event: OthersEvent) {
        match event {
            OthersEvent::Begun(number, OthersJob { keys, prompt_tokens, media }) => {
                let keys: Vec<BlockKey> =
                    keys.into_iter().filter_map(BlockKey::from_number).collect();
                let item = |OthersItem { hash, end, embeds, elements }| RouteItem {
                    hash,
                    end,
                    embeds,
                    elements,
                };
                let media: Vec<RouteItem> = media.into_iter().map(item).collect();
                let plan = RouteRequest {
                    keys: &keys,
                    prompt_tokens,
                    media: &media,
                    class: self.class,
                    ..RouteRequest::default()
                };
                // It has left in this moment, or the number is used twice.
                if let Ok(reservation) = router.chosen_elsewhere(id, &plan) {
                    self.jobs.insert(number, reservation);
                }
            }
            OthersEvent::Computed(number) => {
                self.jobs.get_mut(&number).into_iter().for_each(Reservation::first_token);
            }
            OthersEvent::Ended(number) => drop(self.jobs.remove(&number)),
            OthersEvent::Forget => self.jobs.clear(),
        }
    }
}

impl ToldFeed {
    fn while_open(
        &self,
        tell: impl FnOnce(&Self) -> Result<(), KvSinkError>,
    ) -> Result<(), KvSinkError> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if *open { tell(self) } else { Ok(()) }
    }
}

impl KvSink for ToldFeed {
    fn snapshot(&mut self, snapshot: &[u8], history_known: bool) -> Result<(), KvSinkError> {
        self.while_open(|feed| {
            feed.router.set_history_known(feed.id, history_known);
            feed.router
                .restore(feed.id, snapshot)
                .map_err(|error| KvSinkError::Snapshot(error.into()))
        })
    }

    fn batch(&mut self, payload: &[u8], history_known: bool) -> Result<(), KvSinkError> {
        self.while_open(|feed| {
            let (mut events, mut timestamp) = (0, 0.0);
            let look =
                |batch: &KvEventBatch| (events, timestamp) = (batch.events.len(), batch.timestamp);
            let applied = feed.router.apply_payload(feed.id, payload, look);
            applied.map_err(|error| KvSinkError::Batch(error.into()))?;
            feed.router.set_history_known(feed.id, history_known);
            feed.followed.applied(events, timestamp);
            Ok(())
        })
    }

    fn reset(&mut self) {
        let _ = self.while_open(|feed| {
            feed.router.reset_worker_blocks(feed.id);
            Ok(())
        });
    }

    fn set_caught_up(&mut self, caught_up: bool) {
        let _ = self.while_open(|feed| {
            feed.router.set_caught_up(feed.id, caught_up);
            Ok(())
        });
    }

    fn others(&mut self, event: OthersEvent) {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if *open {
            self.others.take(&self.router, self.id, event);
        }
    }
}

struct Feed {
    router: Arc<Router>,
    id: WorkerId,
    followed: Followed,
    /// Nothing was applied since the index was empty.
    fresh: bool,
    /// The index was restored, and no event has shown yet that the stream goes on from there.
    resumed: bool,
    /// The engine finds a block only where the tokens after it agree too, which the index does not
    /// look at.
    looks_ahead: bool,
    /// The worker was found to make other prompts of what it is given than was expected.
    distrusted: Arc<AtomicBool>,
}

impl KvEventReceiver for Feed {
    fn batch(&mut self, seq: u64, payload: &[u8]) -> Result<(), KvError> {
        let Self { router, id, followed, fresh, looks_ahead, distrusted, resumed: _ } = self;
        let (mut events, mut timestamp) = (0, 0.0);
        let set_history_known = |known| {
            followed.tap.set_history_known(known);
            router.set_history_known(*id, known);
        };
        router.apply_payload(*id, payload, |batch| {
            // Engines count from 0 on, with an empty cache.
            let cleared = batch.events.contains(&KvEvent::AllBlocksCleared);
            if *fresh && seq > 0 && !cleared {
                tracing::warn!(worker = %id, "first KV events are lost: also taken to hold what it computes (approximate)");
                set_history_known(false);
            } else if *fresh || cleared {
                set_history_known(true);
            }
            *fresh = false;
            if !*looks_ahead && batch.events.iter().any(covers_lookahead) {
                tracing::warn!(worker = %id, "its blocks' hashes cover tokens after them: what it holds is approximate");
                *looks_ahead = true;
            }
            if *looks_ahead || distrusted.load(Relaxed) {
                set_history_known(false);
            }
            (events, timestamp) = (batch.events.len(), batch.timestamp);
        })?;
        followed.applied(events, timestamp);
        followed.tap.tell(router, *id, || KvHeard::batch(payload));
        Ok(())
    }

    fn reset(&mut self) {
        tracing::warn!(worker = %self.id, "KV events lost for good, or another engine: forgetting its blocks");
        self.router.reset_worker_blocks(self.id);
        self.fresh = true;
        self.resumed = false;
        self.followed.tap.tell(&self.router, self.id, || KvHeard::Reset);
    }

    fn set_caught_up(&mut self, caught_up: bool) {
        self.router.set_caught_up(self.id, caught_up);
        self.followed.tap.set_caught_up(caught_up);
        if caught_up && std::mem::take(&mut self.resumed) {
            tracing::info!(worker = %self.id, "its KV events go on from what the process before this one knew");
        }
    }
}

fn covers_lookahead(event: &KvEvent) -> bool {
    matches!(event, KvEvent::BlockStored(stored) if stored.lookahead_token_ids.is_some())
}

#[cfg(test)]
mod tests {
    use chiasm_kv::event::{BlockStored, ExternalHash};
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
            role: chiasm_types::Role::Aggregated,
            embedding_store_bytes: 0,
            machine: 0,
            hands_over_in: 0,
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
        let (router, id, followed) =
            (Arc::new(Router::new(RouterConfig::default())), WorkerId(0), Followed::default());
        router.add_worker(id, info());
        let mut feed = Feed {
            router: router.clone(),
            id,
            followed: followed.clone(),
            fresh: true,
            resumed: false,
            looks_ahead: false,
            distrusted: Arc::default(),
        };
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
        let cleared = KvEventBatch {
            timestamp: 1.5,
            events: vec![KvEvent::AllBlocksCleared],
            data_parallel_rank: None,
        };
        feed.batch(3, &cleared.encode()).unwrap();
        assert_eq!(known(), (0, Knowledge::Exact, 3));
    }

    #[test]
    fn an_engine_whose_hashes_look_ahead_is_never_known_exactly() {
        let (router, id, followed) =
            (Arc::new(Router::new(RouterConfig::default())), WorkerId(0), Followed::default());
        router.add_worker(id, info());
        let mut feed = Feed {
            router: router.clone(),
            id,
            followed,
            fresh: true,
            resumed: false,
            looks_ahead: false,
            distrusted: Arc::default(),
        };
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
