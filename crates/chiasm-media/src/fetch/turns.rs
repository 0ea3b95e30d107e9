//! Whose turn it is: bounds on fetches at once, in all and from one origin, and on the origins that stay connected.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};
use url::Url;

use super::client::KEEP_ALIVE;
use crate::MediaError;

/// Origins whose connections are kept, at most. Fetches from others open a connection each.
const MAX_KEPT: usize = 64;

/// An origin is forgotten this long after its last fetch: all its connections are closed by then.
const FORGET: Duration = KEEP_ALIVE.saturating_mul(2);

/// Turns of all origins.
pub(super) struct Turns {
    all: Semaphore,
    per_origin: usize,
    origins: Mutex<HashMap<Origin, Entry>>,
}

/// Host and port.
type Origin = (Box<str>, u16);

struct Entry {
    turns: Arc<Semaphore>,
    /// Fetches that have a turn or wait for one.
    users: usize,
    kept: bool,
    /// Of the last fetch.
    used: Instant,
}

/// The right to fetch from one origin, until dropped.
pub(super) struct Turn<'a> {
    _of_all: SemaphorePermit<'a>,
    _of_origin: OwnedSemaphorePermit,
    visit: Visit<'a>,
}

impl Turn<'_> {
    /// Whether the connection may be kept afterwards.
    pub(super) fn keep_alive(&self) -> bool {
        self.visit.kept
    }
}

/// One user of an origin's entry.
struct Visit<'a> {
    turns: &'a Turns,
    origin: Origin,
    kept: bool,
}

impl Turns {
    pub(super) fn new(all: usize, per_origin: usize) -> Self {
        Self { all: Semaphore::new(all.min(Semaphore::MAX_PERMITS)), per_origin, origins: Mutex::default() }
    }

    /// Waits, in the order of asking. One slow origin does not keep others waiting before it has all turns that it may
    /// have.
    ///
    /// # Errors
    /// [`MediaError::OriginTimeout`] when its other fetches take too long, [`MediaError::Busy`] when those of all do.
    pub(super) async fn take(&self, url: &Url, deadline: Instant) -> Result<Turn<'_>, MediaError> {
        let (visit, turns) = self.visit(url);
        let of_origin = timeout_at(deadline, turns.acquire_owned()).await.map_err(|_| MediaError::OriginTimeout)?;
        let of_all = timeout_at(deadline, self.all.acquire()).await.map_err(|_| MediaError::Busy)?;
        // Neither semaphore is ever closed.
        let (of_origin, of_all) =
            (of_origin.map_err(|_| MediaError::Internal)?, of_all.map_err(|_| MediaError::Internal)?);
        Ok(Turn { _of_all: of_all, _of_origin: of_origin, visit })
    }

    fn visit(&self, url: &Url) -> (Visit<'_>, Arc<Semaphore>) {
        let host = url.host_str().unwrap_or_default();
        let origin: Origin =
            (host.strip_suffix('.').unwrap_or(host).into(), url.port_or_known_default().unwrap_or_default());
        let now = Instant::now();
        let mut origins = self.lock();
        let keep = origins.contains_key(&origin) || make_room(&mut origins, now);
        let new = || Entry {
            turns: Arc::new(Semaphore::new(self.per_origin.min(Semaphore::MAX_PERMITS))),
            users: 0,
            kept: keep,
            used: now,
        };
        let entry = origins.entry(origin.clone()).or_insert_with(new);
        entry.users += 1;
        entry.used = now;
        (Visit { turns: self, origin, kept: entry.kept }, entry.turns.clone())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Origin, Entry>> {
        self.origins.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Forgets kept origins that have no connections any more; whether there is room for one more.
fn make_room(origins: &mut HashMap<Origin, Entry>, now: Instant) -> bool {
    let kept = |origins: &HashMap<Origin, Entry>| origins.values().filter(|entry| entry.kept).count();
    if kept(origins) >= MAX_KEPT {
        origins.retain(|_, entry| entry.users > 0 || now.duration_since(entry.used) < FORGET);
    }
    kept(origins) < MAX_KEPT
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        let mut origins = self.turns.lock();
        if let Some(entry) = origins.get_mut(&self.origin) {
            entry.users -= 1;
            entry.used = Instant::now();
            if entry.users == 0 && !entry.kept {
                origins.remove(&self.origin);
            }
        }
    }
}
