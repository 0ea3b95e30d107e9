//! Feeds of KV events: from a worker's engine or backend into the router, and on to the worker's
//! tap.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::{
    ForeignJob, ForeignJobEvent, ForeignMediaItem, KvEventStream, KvSink, KvSinkError, KvSource,
};
use chiasm_kv::event::{KvEvent, KvEventBatch};
use chiasm_kv::{BlockKey, KvError, KvEventReceiver, StreamPosition, Subscriber, SubscriberConfig};
use chiasm_router::{Reservation, RouteItem, RouteRequest, Router};
use chiasm_types::{PlanClassId, WorkerId};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::followed::WorkerKvEvents;
use crate::kept::KeptIndex;
use crate::tap::{KvUpdate, Tap};
use crate::{Fleet, Worker};

/// The maximum time by which saving one worker's index may delay the end of the process.
const SAVE_TIMEOUT: Duration = Duration::from_secs(10);

/// The feed of one worker's KV cache into the router. Dropping it ends the feed.
pub(crate) enum Following {
    /// The engine publishes events, which a subscriber reads.
    Events { subscriber: Subscriber, distrusted: Arc<AtomicBool>, tap: Arc<Tap> },
    /// The backend calls a [`BackendFeed`].
    Backend { _guard: FeedGuard },
    /// Nothing reports the contents of the worker's KV cache.
    Nothing,
}

/// `true` while a backend may feed the router. Locked during each call of the feed.
type OpenFlag = Arc<Mutex<bool>>;

/// Closes a [`BackendFeed`] when dropped.
pub(crate) struct FeedGuard(OpenFlag);

impl Following {
    /// Treats the events as incomplete from now on.
    pub(crate) fn distrust(&self, router: &Router, id: WorkerId) {
        if let Self::Events { distrusted, .. } = self {
            distrusted.store(true, Relaxed);
        }
        router.set_history_known(id, false);
    }
}

impl Drop for FeedGuard {
    fn drop(&mut self) {
        // From here on the id may belong to the worker's next backend.
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

impl Following {
    /// Ends the feed, and saves the worker's index for the next process.
    pub(crate) async fn keep(self, fleet: &Fleet, worker: &Worker) {
        let Self::Events { subscriber, distrusted, tap } = self else { return };
        let capabilities = worker.backend.capabilities();
        let KvSource::Events(stream) = capabilities.kv.clone() else { return };
        let Some(kept) = fleet.kept.get().cloned() else { return };
        let Some(position) = subscriber.stop().await else { return };
        // Inexact knowledge is not worth saving.
        if distrusted.load(Relaxed) {
            return;
        }
        let router = fleet.router.clone();
        let id = worker.id;
        let class = capabilities.class.clone();
        let save = move || {
            // Drops the blocks that the worker is only presumed to hold.
            router.set_history_known(id, true);
            let snapshot = router.snapshot(id)?.bytes;
            let index = KeptIndex { position, history_known: tap.history_known(), snapshot };
            Some(kept.save(&stream, &class, &index))
        };
        match timeout(SAVE_TIMEOUT, spawn_blocking(save)).await {
            Ok(Ok(Some(Ok(())))) => {
                tracing::info!(
                    worker = %id, seq = position.seq,
                    "saved the index of the worker's KV cache for the next process"
                );
            }
            Ok(Ok(Some(Err(error)))) => {
                tracing::warn!(
                    worker = %id, %error,
                    "can't save the index of the worker's KV cache for the next process"
                );
            }
            Err(_) => {
                tracing::warn!(worker = %id, "saving the index of the worker's KV cache timed out");
            }
            Ok(Ok(None) | Err(_)) => {}
        }
    }
}

/// Starts feeding the router with a worker's KV events. Starts from the index that an earlier
/// process saved, if there is one.
pub(crate) async fn follow(fleet: &Fleet, worker: &Worker) -> Following {
    let router = fleet.router.clone();
    let id = worker.id;
    let kv_events = fleet.worker_kv_events().get(&id).cloned().unwrap_or_default();
    kv_events.tap.reset();
    match &worker.backend.capabilities().kv {
        KvSource::Events(stream) => {
            let endpoint = stream.endpoint.clone();
            let replay_endpoint = stream.replay_endpoint.clone();
            let topic = stream.topic.clone();
            let source =
                SubscriberConfig { topic, ..SubscriberConfig::new(endpoint, replay_endpoint) };
            let counters = kv_events.subscriber.clone();
            let distrusted = Arc::new(AtomicBool::new(false));
            let tap = kv_events.tap();
            let position = resume(fleet, worker, stream, &tap).await;
            let feed = EventFeed {
                router,
                id,
                kv_events,
                is_fresh: position.is_none(),
                is_resuming: position.is_some(),
                has_lookahead: false,
                distrusted: distrusted.clone(),
            };
            Following::Events {
                subscriber: Subscriber::resume(source, feed, counters, position),
                distrusted,
                tap,
            }
        }
        KvSource::Backend => {
            let is_open = Arc::new(Mutex::new(true));
            let foreign_jobs = ForeignJobs { class: worker.class, reservations: HashMap::new() };
            worker.backend.follow_kv(Box::new(BackendFeed {
                router,
                id,
                kv_events,
                is_open: is_open.clone(),
                foreign_jobs,
            }));
            Following::Backend { _guard: FeedGuard(is_open) }
        }
        KvSource::Unknown { .. } => Following::Nothing,
    }
}

/// Restores the index that an earlier process saved for a worker. Returns the position in the
/// worker's stream of events up to which that index is complete.
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
                tracing::warn!(
                    worker = %id, %error,
                    "can't restore the index of the worker's KV cache"
                );
                None
            }
        }
    };
    let (position, history_known) = spawn_blocking(restore).await.ok()??;
    if !history_known {
        tracing::warn!(
            worker = %id,
            "an earlier process missed the first KV events: \
             knowledge of the KV cache is approximate"
        );
    }
    tap.set_history_known(history_known);
    fleet.router.set_history_known(id, history_known);
    Some(position)
}

/// The feed of a backend that reports its KV cache itself.
struct BackendFeed {
    router: Arc<Router>,
    id: WorkerId,
    kv_events: WorkerKvEvents,
    is_open: OpenFlag,
    foreign_jobs: ForeignJobs,
}

/// The jobs of other frontends at a worker. They reserve load in the router like this frontend's.
struct ForeignJobs {
    class: PlanClassId,
    /// By the backend's number for the job.
    reservations: HashMap<u64, Reservation>,
}

impl ForeignJobs {
    fn apply(&mut self, router: &Router, id: WorkerId, event: ForeignJobEvent) {
        match event {
            ForeignJobEvent::Started(number, ForeignJob { keys, prompt_tokens, media }) => {
                let keys: Vec<BlockKey> =
                    keys.into_iter().filter_map(BlockKey::from_number).collect();
                let item = |ForeignMediaItem { hash, end, embeds, elements }| RouteItem {
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
                // An error means that the worker is just leaving.
                if let Ok(reservation) = router.reserve_on(id, &plan) {
                    self.reservations.insert(number, reservation);
                }
            }
            ForeignJobEvent::PromptComputed(number) => {
                if let Some(reservation) = self.reservations.get_mut(&number) {
                    reservation.first_token();
                }
            }
            ForeignJobEvent::Ended(number) => drop(self.reservations.remove(&number)),
            ForeignJobEvent::Reset => self.reservations.clear(),
        }
    }
}

impl BackendFeed {
    /// Calls `apply` unless the feed is closed.
    fn while_open(
        &self,
        apply: impl FnOnce(&Self) -> Result<(), KvSinkError>,
    ) -> Result<(), KvSinkError> {
        let is_open = self.is_open.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_open { apply(self) } else { Ok(()) }
    }
}

impl KvSink for BackendFeed {
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
            let mut events = 0;
            let mut timestamp = 0.0;
            let applied = feed.router.apply_payload(feed.id, payload, |batch: &KvEventBatch| {
                events = batch.events.len();
                timestamp = batch.timestamp;
            });
            applied.map_err(|error| KvSinkError::Batch(error.into()))?;
            feed.router.set_history_known(feed.id, history_known);
            feed.kv_events.record_applied(events, timestamp);
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

    fn foreign_job(&mut self, event: ForeignJobEvent) {
        let is_open = self.is_open.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_open {
            self.foreign_jobs.apply(&self.router, self.id, event);
        }
    }
}

/// The feed of an engine's published events.
struct EventFeed {
    router: Arc<Router>,
    id: WorkerId,
    kv_events: WorkerKvEvents,
    /// `true` until the first batch after the index was emptied.
    is_fresh: bool,
    /// `true` while the index is restored and the stream has not yet proven to continue from there.
    is_resuming: bool,
    /// `true` if the engine reuses a block only if the tokens after it match too, which the index
    /// ignores.
    has_lookahead: bool,
    /// `true` if the worker expands prompts differently than this process expects.
    distrusted: Arc<AtomicBool>,
}

impl KvEventReceiver for EventFeed {
    fn batch(&mut self, seq: u64, payload: &[u8]) -> Result<(), KvError> {
        let Self { router, id, kv_events, is_fresh, has_lookahead, distrusted, is_resuming: _ } =
            self;
        let mut events = 0;
        let mut timestamp = 0.0;
        let set_history_known = |known| {
            kv_events.tap.set_history_known(known);
            router.set_history_known(*id, known);
        };
        router.apply_payload(*id, payload, |batch| {
            // Engines number their batches from 0, starting with an empty cache.
            let cleared = batch.events.contains(&KvEvent::AllBlocksCleared);
            if *is_fresh && seq > 0 && !cleared {
                tracing::warn!(
                    worker = %id,
                    "missed the first KV events: knowledge of the KV cache is approximate"
                );
                set_history_known(false);
            } else if *is_fresh || cleared {
                set_history_known(true);
            }
            *is_fresh = false;
            if !*has_lookahead && batch.events.iter().any(has_lookahead_tokens) {
                tracing::warn!(
                    worker = %id,
                    "the worker's block hashes cover tokens after the block: \
                     knowledge of the KV cache is approximate"
                );
                *has_lookahead = true;
            }
            if *has_lookahead || distrusted.load(Relaxed) {
                set_history_known(false);
            }
            events = batch.events.len();
            timestamp = batch.timestamp;
        })?;
        kv_events.record_applied(events, timestamp);
        kv_events.tap.publish(router, *id, || KvUpdate::batch(payload));
        Ok(())
    }

    fn reset(&mut self) {
        tracing::warn!(
            worker = %self.id,
            "KV events were lost or the engine restarted; its blocks are forgotten"
        );
        self.router.reset_worker_blocks(self.id);
        self.is_fresh = true;
        self.is_resuming = false;
        self.kv_events.tap.publish(&self.router, self.id, || KvUpdate::Reset);
    }

    fn set_caught_up(&mut self, caught_up: bool) {
        self.router.set_caught_up(self.id, caught_up);
        self.kv_events.tap.set_caught_up(caught_up);
        if caught_up && std::mem::take(&mut self.is_resuming) {
            tracing::info!(
                worker = %self.id,
                "KV events continue from the index of the previous process"
            );
        }
    }
}

/// Returns `true` if the hashes of the event's blocks cover tokens after them.
fn has_lookahead_tokens(event: &KvEvent) -> bool {
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

    /// Adds a worker to the router and returns its feed.
    fn feed(router: &Arc<Router>, kv_events: &WorkerKvEvents) -> EventFeed {
        let id = WorkerId(0);
        router.add_worker(id, info());
        EventFeed {
            router: router.clone(),
            id,
            kv_events: kv_events.clone(),
            is_fresh: true,
            is_resuming: false,
            has_lookahead: false,
            distrusted: Arc::default(),
        }
    }

    fn info() -> WorkerInfo {
        WorkerInfo {
            role: chiasm_types::Role::Aggregated,
            embedding_store_bytes: 0,
            machine: 0,
            handover_domain: 0,
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
    fn unreadable_payload_changes_nothing_reset_loses_history() {
        let router = Arc::new(Router::new(RouterConfig::default()));
        let kv_events = WorkerKvEvents::default();
        let mut feed = feed(&router, &kv_events);
        feed.set_caught_up(true);
        let known = || {
            let worker = router.workers()[0];
            (worker.index.blocks, worker.knowledge, kv_events.counts().applied)
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
    fn lookahead_hashes_make_knowledge_approximate() {
        let router = Arc::new(Router::new(RouterConfig::default()));
        let mut feed = feed(&router, &WorkerKvEvents::default());
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
