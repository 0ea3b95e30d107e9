//! Whose turn it is: bounds on fetches at once, in all and from one origin, and on the origins that
//! stay connected.

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
///
/// The table of origins is no LRU cache: one that is in use, or whose connections may still be
/// open, must not be pushed out by another, which instead goes without keeping its connection.
pub(super) struct Turns {
    all: Semaphore,
    per_origin: usize,
    /// [`FORGET`].
    forget: Duration,
    origins: Mutex<HashMap<Origin, Entry>>,
}

/// Host and port.
type Origin = (Box<str>, u16);

struct Entry {
    turns: Arc<Semaphore>,
    /// Fetches that have a turn or wait for one.
    users: usize,
    kept: bool,
    /// The beginning of the last fetch, or its end if that is later.
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
        let all = Semaphore::new(all.clamp(1, Semaphore::MAX_PERMITS));
        Self { all, per_origin, forget: FORGET, origins: Mutex::default() }
    }

    /// Waits, in the order of asking. One slow origin does not keep others waiting before it has
    /// all turns that it may have.
    ///
    /// # Errors
    /// [`MediaError::OriginTimeout`] when its other fetches take too long, [`MediaError::Busy`]
    /// when those of all do.
    pub(super) async fn take(&self, url: &Url, deadline: Instant) -> Result<Turn<'_>, MediaError> {
        let (visit, turns) = self.visit(url);
        let of_origin = timeout_at(deadline, turns.acquire_owned())
            .await
            .map_err(|_| MediaError::OriginTimeout)?;
        let of_all =
            timeout_at(deadline, self.all.acquire()).await.map_err(|_| MediaError::Busy)?;
        // Neither semaphore is ever closed.
        let (of_origin, of_all) = (
            of_origin.map_err(|_| MediaError::Internal)?,
            of_all.map_err(|_| MediaError::Internal)?,
        );
        Ok(Turn { _of_all: of_all, _of_origin: of_origin, visit })
    }

    fn visit(&self, url: &Url) -> (Visit<'_>, Arc<Semaphore>) {
        let host = url.host_str().unwrap_or_default();
        let origin: Origin = (
            host.strip_suffix('.').unwrap_or(host).into(),
            url.port_or_known_default().unwrap_or_default(),
        );
        let now = Instant::now();
        let mut origins = self.lock();
        let keep = origins.contains_key(&origin) || self.make_room(&mut origins, now);
        let new = || Entry {
            turns: Arc::new(Semaphore::new(self.per_origin.clamp(1, Semaphore::MAX_PERMITS))),
            users: 0,
            kept: keep,
            used: now,
        };
        let entry = origins.entry(origin.clone()).or_insert_with(new);
        entry.users += 1;
        entry.used = now;
        (Visit { turns: self, origin, kept: entry.kept }, entry.turns.clone())
    }

    /// Forgets kept origins that have no connections any more; whether there is room for one more.
    fn make_room(&self, origins: &mut HashMap<Origin, Entry>, now: Instant) -> bool {
        let kept =
            |origins: &HashMap<Origin, Entry>| origins.values().filter(|entry| entry.kept).count();
        if kept(origins) >= MAX_KEPT {
            origins
                .retain(|_, entry| entry.users > 0 || now.duration_since(entry.used) < self.forget);
        }
        kept(origins) < MAX_KEPT
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Origin, Entry>> {
        self.origins.lock().unwrap_or_else(PoisonError::into_inner)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn url(host: usize) -> Url {
        Url::parse(&format!("http://host{host}.test/")).unwrap()
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(50)
    }

    fn known(turns: &Turns) -> usize {
        turns.lock().len()
    }

    #[tokio::test]
    async fn an_origin_is_a_host_and_a_port() {
        let turns = Turns::new(10, 1);
        let _turn = turns.take(&Url::parse("http://a.test/x").unwrap(), soon()).await.unwrap();
        for same in ["http://A.test:80/y", "http://a.test./"] {
            let waited = turns.take(&Url::parse(same).unwrap(), soon()).await.err();
            assert_eq!(waited, Some(MediaError::OriginTimeout), "{same}");
        }
        for other in ["http://b.test/", "http://a.test:81/", "https://a.test/"] {
            assert!(turns.take(&Url::parse(other).unwrap(), soon()).await.is_ok(), "{other}");
        }
    }

    #[tokio::test]
    async fn a_turn_that_ends_or_is_given_up_goes_to_the_next() {
        let turns = Turns::new(1, 1);
        let first = turns.take(&url(0), soon()).await.unwrap();
        assert_eq!(turns.take(&url(1), soon()).await.err(), Some(MediaError::Busy));
        let end = async {
            tokio::task::yield_now().await;
            drop(first);
        };
        let url_1 = url(1);
        let (second, ()) = tokio::join!(turns.take(&url_1, soon()), end);
        drop(second.unwrap());
        assert!(turns.take(&url(2), soon()).await.is_ok());
    }

    #[tokio::test]
    async fn connections_are_kept_to_a_bounded_number_of_origins() {
        let mut turns = Turns::new(1000, 1);
        for host in 0..MAX_KEPT {
            assert!(turns.take(&url(host), soon()).await.unwrap().keep_alive());
        }
        for host in MAX_KEPT..3 * MAX_KEPT {
            assert!(!turns.take(&url(host), soon()).await.unwrap().keep_alive());
        }
        assert!(turns.take(&url(0), soon()).await.unwrap().keep_alive());
        assert_eq!(known(&turns), MAX_KEPT);
        // Their connections are closed after a while, and others may keep theirs.
        turns.forget = Duration::ZERO;
        assert!(turns.take(&url(MAX_KEPT), soon()).await.unwrap().keep_alive());
        assert_eq!(known(&turns), 1);
    }

    #[tokio::test]
    async fn an_origin_in_use_is_not_forgotten() {
        let turns = Turns { forget: Duration::ZERO, ..Turns::new(1000, 1) };
        let mut held = Vec::new();
        for host in 0..MAX_KEPT {
            held.push(turns.take(&url(host), soon()).await.unwrap());
        }
        assert!(!turns.take(&url(MAX_KEPT), soon()).await.unwrap().keep_alive());
        assert_eq!(turns.take(&url(3), soon()).await.err(), Some(MediaError::OriginTimeout));
        assert_eq!(known(&turns), MAX_KEPT);
    }
}
