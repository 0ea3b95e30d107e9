//! Following what a worker's KV cache holds: its published events, and what it answers when it is
//! asked, which is its sign of life too.

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
use crate::kv_event::{Published, Query, TOPIC, Told};
use crate::shared::Shared;
use crate::wire::{AskError, Wire};

/// How often a worker is asked for what it has not published, or what was lost on the way.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// How long all that a worker holds may take to be told.
const TOLD_WITHIN: Duration = Duration::from_secs(60);
/// How long a worker may take to be connected to for its events.
const CONNECTED_WITHIN: Duration = Duration::from_secs(3);
/// Before a publisher is looked for again.
const PAUSE: Duration = Duration::from_secs(2);
/// Events of which the index is told on an async thread.
const FEW: usize = 64;

/// One worker's events.
pub(crate) struct Follower {
    shared: Arc<Shared>,
    source: EventSource,
    wire: Wire,
    blocks: Blocks,
    kv: Option<Box<dyn KvSink>>,
    /// Whether all that it tells is all that is to be known.
    knows_all: bool,
    /// What a worker holds that can't tell it is not known from then on.
    history_known: bool,
    is_caught_up: bool,
    /// Whether it was said that it is asked in vain.
    is_told: bool,
    /// Whether it was said that what it publishes can't be read.
    is_unreadable: bool,
}

impl Follower {
    /// A follower of what `source` says of a worker, of which `blocks` are known. Unless that
    /// `knows_all`, the worker is also taken to hold what it was sent.
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
            is_told: false,
            is_unreadable: false,
        }
    }

    /// Tells whoever comes out of `sink`, until it is dropped.
    pub(crate) async fn follow(mut self, sink: oneshot::Receiver<Box<dyn KvSink>>) {
        self.kv = sink.await.ok();
        let mut heard = Instant::now();
        let mut asks = interval(ASK_EVERY);
        asks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut publisher = None;
        let mut look = Box::pin(connect(self.source.channel.clone(), Duration::ZERO));
        loop {
            tokio::select! {
                biased;
                found = &mut look, if publisher.is_none() => {
                    publisher = Some(found);
                    // What was published before has to be asked for.
                    asks.reset_immediately();
                }
                message = receive(&mut publisher) => match message {
                    Some(message) => self.take(&message).await,
                    None => {
                        publisher = None;
                        look.set(connect(self.source.channel.clone(), PAUSE));
                    }
                },
                _ = asks.tick() => {
                    let silent = heard.elapsed().as_millis() as u64;
                    self.shared.silent_ms.store(silent, Relaxed);
                    if self.ask().await {
                        heard = Instant::now();
                        self.shared.silent_ms.store(0, Relaxed);
                    }
                }
            }
        }
    }

    /// Takes in what was published. Where something is missing the worker is asked for it.
    async fn take(&mut self, message: &[Bytes]) {
        let (Some(topic), Some(envelope)) = (message.first(), message.get(3)) else { return };
        if topic[..] != *TOPIC || self.blocks.next().is_none() {
            return;
        }
        match Published::decode(envelope) {
            Ok(Published { timestamp, events }) => {
                let mut told = Vec::new();
                let extended = self.blocks.extend(&events, &mut told);
                self.tell(told, timestamp).await;
                if extended == Err(Gap) {
                    tracing::debug!(
                        worker = self.shared.name,
                        "events of its KV cache are missing: it is asked for them"
                    );
                    self.set_caught_up(false);
                    self.ask().await;
                }
            }
            // What it says will be missing, and be asked for.
            Err(error) if !std::mem::replace(&mut self.is_unreadable, true) => {
                tracing::warn!(worker = self.shared.name, %error, "what it holds is asked for instead");
            }
            Err(_) => {}
        }
    }

    /// Asks the worker for what is new. Whether it has answered.
    async fn ask(&mut self) -> bool {
        let asked = asked(&self.shared, &self.wire, &self.source, self.blocks.next());
        match asked.await {
            Ok(told) => {
                let is_understood = self.take_told(told).await.is_ok();
                if is_understood && std::mem::take(&mut self.is_told) {
                    tracing::info!(
                        worker = self.shared.name,
                        "it tells again what its KV cache holds"
                    );
                }
                true
            }
            Err(error) => {
                self.set_caught_up(false);
                if !std::mem::replace(&mut self.is_told, true) {
                    let worker = &self.shared.name;
                    let why = error.to_string();
                    tracing::warn!(
                        worker,
                        why,
                        "it does not tell what its KV cache holds; it is asked again"
                    );
                }
                false
            }
        }
    }

    async fn take_told(&mut self, told: Told) -> Result<(), Gap> {
        let mut changes = Vec::new();
        let taken = match told {
            Told::TreeDump { events, last_event_id } => {
                // All of a cache takes as long as it is large.
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
            Told::Events { events } => self.blocks.extend(&events, &mut changes),
            // Older than what is known here: it has begun again.
            Told::TooNew { newest_available }
                if self
                    .blocks
                    .next()
                    .is_some_and(|next| newest_available.saturating_add(1) < next) =>
            {
                Err(Gap)
            }
            Told::TooNew { .. } => Ok(()),
            Told::TreeDumpFailed(_) => {
                // It is taken to hold what it is sent, until it can tell.
                if std::mem::replace(&mut self.history_known, false) {
                    tracing::warn!(
                        worker = self.shared.name,
                        "it can't tell all that it holds: approximate until it can"
                    );
                    changes.push(KvEvent::AllBlocksCleared);
                }
                self.blocks.forget();
                Ok(())
            }
        };
        self.tell(changes, now()).await;
        match taken {
            Ok(()) => self.set_caught_up(true),
            Err(Gap) => {
                // All of it is asked for next.
                self.blocks.forget();
                self.set_caught_up(false);
            }
        }
        taken
    }

    /// Tells the index of changes.
    async fn tell(&mut self, events: Vec<KvEvent>, timestamp: f64) {
        if events.is_empty() {
            return;
        }
        let Some(mut kv) = self.kv.take() else { return };
        let history_known = self.history_known && self.knows_all;
        let is_small = events.len() <= FEW;
        let tell = move || {
            let payload = KvEventBatch { timestamp, events, data_parallel_rank: None }.encode();
            if let Err(error) = kv.batch(&payload, history_known) {
                let why = error.to_string();
                tracing::error!(why, "events of a worker's KV cache are lost");
            }
            kv
        };
        self.kv = match is_small {
            true => Some(tell()),
            false => tokio::task::spawn_blocking(tell).await.ok(),
        };
    }

    fn set_caught_up(&mut self, caught_up: bool) {
        if std::mem::replace(&mut self.is_caught_up, caught_up) != caught_up
            && let Some(kv) = &mut self.kv
        {
            kv.set_caught_up(caught_up);
        }
    }
}

/// A worker does not tell what its KV cache holds.
#[derive(Debug, thiserror::Error)]
enum NotTold {
    #[error(transparent)]
    Query(#[from] rmp_serde::encode::Error),
    #[error(transparent)]
    Ask(#[from] AskError),
    #[error(transparent)]
    Answer(#[from] AnswerError),
    #[error("it says nothing")]
    Empty,
    #[error("it takes more than {} s", TOLD_WITHIN.as_secs())]
    TimedOut,
}

/// What the worker answers. As long as it does not, it is silent.
async fn asked(
    shared: &Shared,
    wire: &Wire,
    source: &EventSource,
    next: Option<u64>,
) -> Result<Told, NotTold> {
    let (before, begun) = (shared.silent_ms.load(Relaxed), Instant::now());
    let query = Query {
        worker_id: source.worker_id,
        dp_rank: source.dp_rank,
        start_event_id: next,
        end_event_id: None,
        supports_tree_dump_failed: true,
    };
    let asking = timeout(TOLD_WITHIN, told(wire, source, &query));
    tokio::pin!(asking);
    loop {
        tokio::select! {
            told = &mut asking => {
                return told.unwrap_or(Err(NotTold::TimedOut));
            }
            () = sleep(ASK_EVERY) => {
                let silent = before.saturating_add(begun.elapsed().as_millis() as u64);
                shared.silent_ms.store(silent, Relaxed);
            }
        }
    }
}

/// Asks a worker, and waits for all of its answer.
async fn told(wire: &Wire, source: &EventSource, query: &Query) -> Result<Told, NotTold> {
    let body = rmp_serde::to_vec_named(query)?;
    let id = format!("chiasm-kv-{:016x}", rand::random::<u64>());
    let mut answer = wire.ask(&source.query.path, &id, &body).await?;
    let told = answer.next_bare::<Told>().await?.ok_or(NotTold::Empty)?;
    // Its end, so that nothing is left on the way.
    while answer.next_bare::<serde::de::IgnoredAny>().await?.is_some() {}
    Ok(told)
}

/// Connects to where events are published, after a pause and as often as it takes. Never returns
/// where they are not.
async fn connect(endpoint: Option<String>, pause: Duration) -> Connection {
    let Some(endpoint) = endpoint else { return std::future::pending().await };
    sleep(pause).await;
    loop {
        match Connection::subscribe(&endpoint, b"", CONNECTED_WITHIN).await {
            Ok(connection) => return connection,
            Err(error) => tracing::debug!(endpoint, %error, "events are not published there yet"),
        }
        sleep(PAUSE).await;
    }
}

/// What is published next; `None` when the publisher is gone. Never returns where there is none.
async fn receive(publisher: &mut Option<Connection>) -> Option<Vec<Bytes>> {
    let Some(publisher) = publisher else { return std::future::pending().await };
    let received = publisher.next().await;
    received
        .inspect_err(|error| tracing::debug!(%error, "a publisher of a KV cache's events is gone"))
        .ok()
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
