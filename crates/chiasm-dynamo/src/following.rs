//! Follows a worker's KV cache by its published events and by queries, which are also liveness
//! probes.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use chiasm_backend::KvSink;
use chiasm_kv::event::{KvEvent, KvEventBatch};
use chiasm_zmtp::Connection;
use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use crate::answer::AnswerError;
use crate::blocks::{Blocks, Gap};
use crate::directory::EventSource;
use crate::kv_event::{PublishedEvents, Query, QueryAnswer, TOPIC};
use crate::shared::Shared;
use crate::wire::{RequestError, Wire};

/// The interval between queries for events that were not published or were lost.
const QUERY_INTERVAL: Duration = Duration::from_secs(1);
/// The deadline for the answer to a query, which may have the whole cache.
const QUERY_TIMEOUT: Duration = Duration::from_secs(60);
/// The deadline for a connection to a publisher.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// The pause between two connections to a publisher.
const RECONNECT_PAUSE: Duration = Duration::from_secs(2);
/// The maximum number of events that are passed to the index on an async thread.
const MAX_INLINE_EVENTS: usize = 64;

/// Follows the events of one worker.
pub(crate) struct Follower {
    shared: Arc<Shared>,
    source: EventSource,
    wire: Wire,
    blocks: Blocks,
    kv: Option<Box<dyn KvSink>>,
    /// `true` if the reported blocks are the whole contents of the cache.
    knows_all: bool,
    /// `false` while the worker can't report its whole cache.
    history_known: bool,
    is_caught_up: bool,
    /// `true` once a failed query was logged.
    has_warned: bool,
    /// `true` once an unreadable publication was logged.
    has_warned_unreadable: bool,
}

impl Follower {
    /// Creates a follower of the events of `source`. `blocks` are the blocks known so far. Unless
    /// `knows_all`, the worker is also assumed to hold the prompts that were sent to it.
    pub(crate) fn new(
        shared: Arc<Shared>,
        source: EventSource,
        wire: Wire,
        blocks: Blocks,
        knows_all: bool,
    ) -> Self {
        Self {
            shared,
            source,
            wire,
            blocks,
            kv: None,
            knows_all,
            history_known: true,
            is_caught_up: false,
            has_warned: false,
            has_warned_unreadable: false,
        }
    }

    /// Passes events to the sink that comes out of `sink`, until this task is dropped.
    pub(crate) async fn follow(mut self, sink: oneshot::Receiver<Box<dyn KvSink>>) {
        self.kv = sink.await.ok();
        let mut last_answer = Instant::now();
        let mut ticks = interval(QUERY_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut publisher = None;
        let mut connecting = Box::pin(connect(self.source.channel.clone(), Duration::ZERO));
        loop {
            tokio::select! {
                biased;
                connection = &mut connecting, if publisher.is_none() => {
                    publisher = Some(connection);
                    // Earlier events have to be queried.
                    ticks.reset_immediately();
                }
                message = receive(&mut publisher) => match message {
                    Some(message) => self.on_message(&message).await,
                    None => {
                        publisher = None;
                        connecting.set(connect(self.source.channel.clone(), RECONNECT_PAUSE));
                    }
                },
                _ = ticks.tick() => {
                    let silent = last_answer.elapsed().as_millis() as u64;
                    self.shared.silent_ms.store(silent, Relaxed);
                    if self.query().await {
                        last_answer = Instant::now();
                        self.shared.silent_ms.store(0, Relaxed);
                    }
                }
            }
        }
    }

    /// Processes a published message. If events are missing the worker is queried.
    async fn on_message(&mut self, message: &[Bytes]) {
        let (Some(topic), Some(envelope)) = (message.first(), message.get(3)) else { return };
        if topic[..] != *TOPIC || self.blocks.next().is_none() {
            return;
        }
        match PublishedEvents::decode(envelope) {
            Ok(PublishedEvents { timestamp, events }) => {
                let mut changes = Vec::new();
                let extended = self.blocks.extend(&events, &mut changes);
                self.report(changes, timestamp).await;
                if extended == Err(Gap) {
                    tracing::debug!(
                        worker = self.shared.name,
                        "KV cache events of a worker are missing; querying the worker"
                    );
                    self.set_caught_up(false);
                    self.query().await;
                }
            }
            // The events will be missing, and then be queried.
            Err(error) if !std::mem::replace(&mut self.has_warned_unreadable, true) => {
                tracing::warn!(
                    worker = self.shared.name,
                    %error,
                    "a published KV cache event can't be read; the worker is queried instead"
                );
            }
            Err(_) => {}
        }
    }

    /// Queries the worker for new events. Returns `true` if it answered.
    async fn query(&mut self) -> bool {
        let answer = query(&self.shared, &self.wire, &self.source, self.blocks.next());
        match answer.await {
            Ok(answer) => {
                let is_consistent = self.on_answer(answer).await.is_ok();
                if is_consistent && std::mem::take(&mut self.has_warned) {
                    tracing::info!(
                        worker = self.shared.name,
                        "a worker reports its KV cache again"
                    );
                }
                true
            }
            Err(error) => {
                self.set_caught_up(false);
                if !std::mem::replace(&mut self.has_warned, true) {
                    let worker = &self.shared.name;
                    let why = error.to_string();
                    tracing::warn!(
                        worker,
                        why,
                        "a worker does not report its KV cache; it is queried again"
                    );
                }
                false
            }
        }
    }

    async fn on_answer(&mut self, answer: QueryAnswer) -> Result<(), Gap> {
        let mut changes = Vec::new();
        let applied = match answer {
            QueryAnswer::TreeDump { events, last_event_id } => {
                // A whole cache may be large, so it is processed on a blocking thread.
                let blocks = std::mem::replace(&mut self.blocks, Blocks::new(0, 0, 0));
                let replaced = tokio::task::spawn_blocking(move || {
                    let mut blocks = blocks;
                    let replaced = blocks.replace(&events, last_event_id);
                    (blocks, replaced)
                });
                let Ok((blocks, replaced)) = replaced.await else { return Err(Gap) };
                self.blocks = blocks;
                self.history_known = true;
                replaced.map(|all| changes = all)
            }
            QueryAnswer::Events { events } => self.blocks.extend(&events, &mut changes),
            // The worker's last event is older than the known one: its numbering has restarted.
            QueryAnswer::TooNew { newest_available }
                if self
                    .blocks
                    .next()
                    .is_some_and(|next| newest_available.saturating_add(1) < next) =>
            {
                Err(Gap)
            }
            QueryAnswer::TooNew { .. } => Ok(()),
            QueryAnswer::TreeDumpFailed(_) => {
                // Without a dump, the worker is assumed to hold the prompts that were sent to it.
                if std::mem::replace(&mut self.history_known, false) {
                    tracing::warn!(
                        worker = self.shared.name,
                        "a worker can't report its whole KV cache; \
                         predictions are approximate until it can"
                    );
                    changes.push(KvEvent::AllBlocksCleared);
                }
                self.blocks.invalidate();
                Ok(())
            }
        };
        self.report(changes, now()).await;
        match applied {
            Ok(()) => self.set_caught_up(true),
            Err(Gap) => {
                // The next query is for the whole cache.
                self.blocks.invalidate();
                self.set_caught_up(false);
            }
        }
        applied
    }

    /// Passes changes to the index.
    async fn report(&mut self, events: Vec<KvEvent>, timestamp: f64) {
        if events.is_empty() {
            return;
        }
        let Some(mut kv) = self.kv.take() else { return };
        let history_known = self.history_known && self.knows_all;
        let is_small = events.len() <= MAX_INLINE_EVENTS;
        let apply = move || {
            let payload = KvEventBatch { timestamp, events, data_parallel_rank: None }.encode();
            if let Err(error) = kv.batch(&payload, history_known) {
                let why = error.to_string();
                tracing::error!(why, "KV cache events of a worker are lost");
            }
            kv
        };
        self.kv =
            if is_small { Some(apply()) } else { tokio::task::spawn_blocking(apply).await.ok() };
    }

    fn set_caught_up(&mut self, caught_up: bool) {
        if std::mem::replace(&mut self.is_caught_up, caught_up) != caught_up
            && let Some(kv) = &mut self.kv
        {
            kv.set_caught_up(caught_up);
        }
    }
}

/// An error of querying a worker's KV cache.
#[derive(Debug, thiserror::Error)]
enum QueryError {
    #[error(transparent)]
    Query(#[from] rmp_serde::encode::Error),
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error(transparent)]
    Answer(#[from] AnswerError),
    #[error("an empty answer")]
    Empty,
    #[error("no answer within {} s", QUERY_TIMEOUT.as_secs())]
    TimedOut,
}

/// Queries a worker within a deadline. Until the worker answers, its time of silence grows.
async fn query(
    shared: &Shared,
    wire: &Wire,
    source: &EventSource,
    next: Option<u64>,
) -> Result<QueryAnswer, QueryError> {
    let silent_before = shared.silent_ms.load(Relaxed);
    let begun = Instant::now();
    let query = Query {
        worker_id: source.worker_id,
        dp_rank: source.dp_rank,
        start_event_id: next,
        end_event_id: None,
        supports_tree_dump_failed: true,
    };
    let answer = timeout(QUERY_TIMEOUT, send_query(wire, source, &query));
    tokio::pin!(answer);
    loop {
        tokio::select! {
            answer = &mut answer => {
                return answer.unwrap_or(Err(QueryError::TimedOut));
            }
            () = sleep(QUERY_INTERVAL) => {
                let silent = silent_before.saturating_add(begun.elapsed().as_millis() as u64);
                shared.silent_ms.store(silent, Relaxed);
            }
        }
    }
}

/// Sends a query and reads the whole answer.
async fn send_query(
    wire: &Wire,
    source: &EventSource,
    query: &Query,
) -> Result<QueryAnswer, QueryError> {
    let body = rmp_serde::to_vec_named(query)?;
    let id = format!("chiasm-kv-{:016x}", rand::random::<u64>());
    let mut answer = wire.send(&source.query.path, &id, &body).await?;
    let data = answer.next_bare::<QueryAnswer>().await?.ok_or(QueryError::Empty)?;
    // Read to the end, so that the worker is not told to stop.
    while answer.next_bare::<serde::de::IgnoredAny>().await?.is_some() {}
    Ok(data)
}

/// Connects to a publisher after a pause, and tries until it succeeds. Never returns if there is no
/// endpoint.
async fn connect(endpoint: Option<String>, pause: Duration) -> Connection {
    let Some(endpoint) = endpoint else { return std::future::pending().await };
    sleep(pause).await;
    loop {
        match Connection::subscribe(&endpoint, b"", CONNECT_TIMEOUT).await {
            Ok(connection) => return connection,
            Err(error) => {
                tracing::debug!(endpoint, %error, "no connection to a KV event publisher");
            }
        }
        sleep(RECONNECT_PAUSE).await;
    }
}

/// Returns the next published message; `None` if the publisher is gone. Never returns without a
/// publisher.
async fn receive(publisher: &mut Option<Connection>) -> Option<Vec<Bytes>> {
    let Some(publisher) = publisher else { return std::future::pending().await };
    let received = publisher.next().await;
    received
        .inspect_err(|error| tracing::debug!(%error, "a publisher of KV cache events is gone"))
        .ok()
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
