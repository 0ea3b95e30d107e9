//! Limits on concurrent fetches, in total and per origin, and on the number of origins with idle
//! connections.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};
use url::Url;

use super::client::KEEP_ALIVE;
use crate::MediaError;

/// The maximum number of origins whose connections are kept. A fetch from any other origin opens a
/// connection of its own.
const MAX_KEPT_ORIGINS: usize = 64;

/// The time after its last fetch at which an origin is forgotten. All its connections are closed by
/// then.
const ORIGIN_TTL: Duration = KEEP_ALIVE.saturating_mul(2);

/// Permits for fetches, in total and per origin.
///
/// The table of origins is not an LRU cache. An origin in use, or one whose connections may still
/// be open, is never evicted. A new origin that finds the table full does not keep its connections.
pub(super) struct FetchLimiter {
    total: Semaphore,
    max_per_origin: usize,
    /// [`ORIGIN_TTL`], except in tests.
    origin_ttl: Duration,
    origins: Mutex<HashMap<Origin, OriginEntry>>,
}

/// The host and port of an origin.
type Origin = (Box<str>, u16);

struct OriginEntry {
    permits: Arc<Semaphore>,
    /// The number of fetches that have or await a permit.
    users: usize,
    /// `true` if connections to the origin are kept.
    keep_alive: bool,
    /// The time when the last fetch started or ended.
    last_used: Instant,
}

/// Permission to fetch from one origin, until dropped.
pub(super) struct FetchPermit<'a> {
    _total: SemaphorePermit<'a>,
    _per_origin: OwnedSemaphorePermit,
    user: OriginUser<'a>,
}

impl FetchPermit<'_> {
    /// Returns `true` if the connection may be kept after the fetch.
    pub(super) fn keep_alive(&self) -> bool {
        self.user.keep_alive
    }
}

/// A registered user of an origin's entry. Dropping it releases the entry.
struct OriginUser<'a> {
    limiter: &'a FetchLimiter,
    origin: Origin,
    keep_alive: bool,
}

impl FetchLimiter {
    /// Creates a limiter for `max_total` fetches, of which `max_per_origin` may be from one origin.
    /// A limit of 0 counts as 1.
    pub(super) fn new(max_total: usize, max_per_origin: usize) -> Self {
        let total = Semaphore::new(max_total.clamp(1, Semaphore::MAX_PERMITS));
        Self { total, max_per_origin, origin_ttl: ORIGIN_TTL, origins: Mutex::default() }
    }

    /// Waits for a permit, first come, first served. A slow origin holds at most
    /// `max_per_origin` permits, so the others are left for other origins.
    ///
    /// # Errors
    /// [`MediaError::OriginTimeout`] if other fetches from the origin hold its permits until the
    /// deadline. [`MediaError::Busy`] if fetches from all origins hold the permits.
    pub(super) async fn acquire(
        &self,
        url: &Url,
        deadline: Instant,
    ) -> Result<FetchPermit<'_>, MediaError> {
        let (user, permits) = self.register(url);
        let per_origin = timeout_at(deadline, permits.acquire_owned())
            .await
            .map_err(|_| MediaError::OriginTimeout)?;
        let total = timeout_at(deadline, self.total.acquire()).await;
        let total = total.map_err(|_| MediaError::Busy)?;
        // Neither semaphore is ever closed.
        let per_origin = per_origin.map_err(|_| MediaError::Internal)?;
        let total = total.map_err(|_| MediaError::Internal)?;
        Ok(FetchPermit { _total: total, _per_origin: per_origin, user })
    }

    /// Registers a user of the URL's origin. Returns the origin's permits with it.
    fn register(&self, url: &Url) -> (OriginUser<'_>, Arc<Semaphore>) {
        let host = url.host_str().unwrap_or_default();
        let origin: Origin = (
            host.strip_suffix('.').unwrap_or(host).into(),
            url.port_or_known_default().unwrap_or_default(),
        );
        let now = Instant::now();
        let mut origins = self.lock();
        let keep_alive = origins.contains_key(&origin) || self.make_room(&mut origins, now);
        let new = || OriginEntry {
            permits: Arc::new(Semaphore::new(self.max_per_origin.clamp(1, Semaphore::MAX_PERMITS))),
            users: 0,
            keep_alive,
            last_used: now,
        };
        let entry = origins.entry(origin.clone()).or_insert_with(new);
        entry.users += 1;
        entry.last_used = now;
        let user = OriginUser { limiter: self, origin, keep_alive: entry.keep_alive };
        (user, entry.permits.clone())
    }

    /// Forgets origins whose connections are all closed, if the table is full. Returns `true` if
    /// one more origin fits.
    fn make_room(&self, origins: &mut HashMap<Origin, OriginEntry>, now: Instant) -> bool {
        let kept_count = |origins: &HashMap<Origin, OriginEntry>| {
            origins.values().filter(|entry| entry.keep_alive).count()
        };
        if kept_count(origins) >= MAX_KEPT_ORIGINS {
            origins.retain(|_, entry| {
                entry.users > 0 || now.duration_since(entry.last_used) < self.origin_ttl
            });
        }
        kept_count(origins) < MAX_KEPT_ORIGINS
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Origin, OriginEntry>> {
        self.origins.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OriginUser<'_> {
    fn drop(&mut self) {
        let mut origins = self.limiter.lock();
        if let Some(entry) = origins.get_mut(&self.origin) {
            entry.users -= 1;
            entry.last_used = Instant::now();
            if entry.users == 0 && !entry.keep_alive {
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

    fn origin_count(limiter: &FetchLimiter) -> usize {
        limiter.lock().len()
    }

    #[tokio::test]
    async fn origin_is_identified_by_host_plus_port() {
        let limiter = FetchLimiter::new(10, 1);
        let url = Url::parse("http://a.test/x").unwrap();
        let _permit = limiter.acquire(&url, soon()).await.unwrap();
        for same in ["http://A.test:80/y", "http://a.test./"] {
            let waited = limiter.acquire(&Url::parse(same).unwrap(), soon()).await.err();
            assert_eq!(waited, Some(MediaError::OriginTimeout), "{same}");
        }
        for other in ["http://b.test/", "http://a.test:81/", "https://a.test/"] {
            assert!(limiter.acquire(&Url::parse(other).unwrap(), soon()).await.is_ok(), "{other}");
        }
    }

    #[tokio::test]
    async fn released_or_abandoned_permit_is_reused() {
        let limiter = FetchLimiter::new(1, 1);
        let first = limiter.acquire(&url(0), soon()).await.unwrap();
        assert_eq!(limiter.acquire(&url(1), soon()).await.err(), Some(MediaError::Busy));
        let end = async {
            tokio::task::yield_now().await;
            drop(first);
        };
        let url_1 = url(1);
        let (second, ()) = tokio::join!(limiter.acquire(&url_1, soon()), end);
        drop(second.unwrap());
        assert!(limiter.acquire(&url(2), soon()).await.is_ok());
    }

    #[tokio::test]
    async fn connections_are_kept_to_64_origins_at_most() {
        let mut limiter = FetchLimiter::new(1000, 1);
        for host in 0..MAX_KEPT_ORIGINS {
            assert!(limiter.acquire(&url(host), soon()).await.unwrap().keep_alive());
        }
        for host in MAX_KEPT_ORIGINS..3 * MAX_KEPT_ORIGINS {
            assert!(!limiter.acquire(&url(host), soon()).await.unwrap().keep_alive());
        }
        assert!(limiter.acquire(&url(0), soon()).await.unwrap().keep_alive());
        assert_eq!(origin_count(&limiter), MAX_KEPT_ORIGINS);
        // Once their connections are closed, other origins may keep theirs.
        limiter.origin_ttl = Duration::ZERO;
        assert!(limiter.acquire(&url(MAX_KEPT_ORIGINS), soon()).await.unwrap().keep_alive());
        assert_eq!(origin_count(&limiter), 1);
    }

    #[tokio::test]
    async fn origin_in_use_is_not_forgotten() {
        let limiter = FetchLimiter { origin_ttl: Duration::ZERO, ..FetchLimiter::new(1000, 1) };
        let mut held = Vec::new();
        for host in 0..MAX_KEPT_ORIGINS {
            held.push(limiter.acquire(&url(host), soon()).await.unwrap());
        }
        assert!(!limiter.acquire(&url(MAX_KEPT_ORIGINS), soon()).await.unwrap().keep_alive());
        assert_eq!(limiter.acquire(&url(3), soon()).await.err(), Some(MediaError::OriginTimeout));
        assert_eq!(origin_count(&limiter), MAX_KEPT_ORIGINS);
    }
}
