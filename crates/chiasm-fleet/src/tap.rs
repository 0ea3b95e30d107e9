//! What is heard of a worker's KV cache, for others than the router here: frontends on other
//! machines.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use bytes::Bytes;
use chiasm_kv::Snapshot;
use chiasm_router::Router;
use chiasm_types::WorkerId;
use tokio::sync::broadcast::{self, error::RecvError};

/// What may be heard before who follows has to take it, or else begin again: some seconds of an
/// engine's batches.
const MOST_WAITING: usize = 1024;

/// Tells what is heard of one worker's KV cache to all who follow it.
pub(crate) struct Tap {
    /// Made when first somebody follows: it takes room for all that may wait.
    heard: OnceLock<broadcast::Sender<(u64, bool, KvHeard)>>,
    history_known: AtomicBool,
    caught_up: AtomicBool,
}

impl Default for Tap {
    fn default() -> Self {
        Self {
            heard: OnceLock::new(),
            history_known: AtomicBool::new(true),
            caught_up: AtomicBool::new(false),
        }
    }
}

/// Something that is heard of a KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvHeard {
    /// A batch of events, as the engine published it.
    Batch(Bytes),
    /// What was heard so far is void.
    Reset,
    /// Whether events are missing that can still be had.
    CaughtUp(bool),
}

impl KvHeard {
    pub(crate) fn batch(payload: &[u8]) -> Self {
        Self::Batch(Bytes::copy_from_slice(payload))
    }
}

impl Tap {
    /// Another engine begins.
    pub(crate) fn start(&self) {
        self.history_known.store(true, Relaxed);
        self.caught_up.store(false, Relaxed);
    }

    pub(crate) fn history_known(&self) -> bool {
        self.history_known.load(Relaxed)
    }

    pub(crate) fn set_history_known(&self, known: bool) {
        self.history_known.store(known, Relaxed);
    }

    pub(crate) fn set_caught_up(&self, caught_up: bool) {
        self.caught_up.store(caught_up, Relaxed);
        if let Some(heard) = self.heard.get() {
            // After what is in any snapshot: it is true of all of them. Nobody may listen.
            let _ = heard.send((
                u64::MAX,
                self.history_known.load(Relaxed),
                KvHeard::CaughtUp(caught_up),
            ));
        }
    }

    /// Tells what was just taken in, if anybody listens. Nothing else may have changed what is
    /// known of the worker meanwhile.
    pub(crate) fn tell(&self, router: &Router, id: WorkerId, heard: impl FnOnce() -> KvHeard) {
        let listened = self.heard.get().filter(|listened| listened.receiver_count() > 0);
        if let (Some(listened), Some(revision)) = (listened, router.revision(id)) {
            let _ = listened.send((revision, self.history_known.load(Relaxed), heard()));
        }
    }

    pub(crate) fn follow(&self, router: &Router, id: WorkerId) -> Option<KvKnown> {
        // First: what is heard while the snapshot is made is either in it or comes after it.
        let heard = self.heard.get_or_init(|| broadcast::channel(MOST_WAITING).0).subscribe();
        let (history_known, caught_up) =
            (self.history_known.load(Relaxed), self.caught_up.load(Relaxed));
        let Snapshot { revision, bytes } = router.snapshot(id)?;
        Some(KvKnown { snapshot: bytes, history_known, caught_up, revision, heard })
    }
}

/// What is known of a worker's KV cache, and what is heard from then on.
pub struct KvKnown {
    /// What it holds, as `chiasm-kv` writes it.
    pub snapshot: Vec<u8>,
    /// Whether events told of all that it holds.
    pub history_known: bool,
    /// Whether no events are missing that can still be had.
    pub caught_up: bool,
    revision: u64,
    heard: broadcast::Receiver<(u64, bool, KvHeard)>,
}

impl KvKnown {
    /// What is heard next, and whether events have told of all that is held then. `None` when so
    /// much was heard that some of it is lost: a new snapshot has to be had. Cancel safe.
    pub async fn next(&mut self) -> Option<(KvHeard, bool)> {
        loop {
            match self.heard.recv().await {
                Ok((revision, ..)) if revision <= self.revision => {}
                Ok((_, history_known, heard)) => return Some((heard, history_known)),
                Err(RecvError::Lagged(_) | RecvError::Closed) => return None,
            }
        }
    }
}
