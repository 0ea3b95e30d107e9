//! Limits on the work that is done at once for each of many keys.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A number of permits for each key.
///
/// Permits of one key are given in the order in which they were asked for. A key takes memory only
/// while somebody has one of its permits or waits for one.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let one_at_a_time = chiasm_limit::KeyedLimiter::new(1);
/// let first = one_at_a_time.acquire("a").await;
/// let other_key = one_at_a_time.acquire("b").await;
/// drop(first);
/// let second = one_at_a_time.acquire("a").await;
/// # drop((other_key, second));
/// # });
/// ```
#[derive(Debug)]
pub struct KeyedLimiter<K> {
    permits: usize,
    keys: Mutex<HashMap<K, Arc<Semaphore>>>,
}

/// A permit for one key, until it is dropped.
///
/// A task that has a permit must not wait for another one of the same limiter: two such tasks could
/// wait for each other.
#[derive(Debug)]
pub struct KeyedPermit<'a, K: Eq + Hash> {
    limiter: &'a KeyedLimiter<K>,
    key: K,
    /// `None` while the permit is waited for, and while it is dropped.
    permit: Option<OwnedSemaphorePermit>,
    /// `None` while the permit is dropped.
    semaphore: Option<Arc<Semaphore>>,
}

impl<K: Clone + Eq + Hash> KeyedLimiter<K> {
    /// Creates a limiter with so many permits for each key, at least one.
    pub fn new(permits: usize) -> Self {
        Self { permits: permits.clamp(1, Semaphore::MAX_PERMITS), keys: Mutex::default() }
    }

    /// Waits for a permit. Cancel-safe: a wait that is given up leaves nothing behind.
    pub async fn acquire(&self, key: K) -> KeyedPermit<'_, K> {
        let new = || Arc::new(Semaphore::new(self.permits));
        let semaphore = self.keys().entry(key.clone()).or_insert_with(new).clone();
        let waiting = semaphore.clone().acquire_owned();
        let mut permit =
            KeyedPermit { limiter: self, key, permit: None, semaphore: Some(semaphore) };
        // It can't fail: no semaphore is ever closed.
        permit.permit = waiting.await.ok();
        permit
    }

    /// Returns the number of keys with a permit that is held or waited for.
    pub fn len(&self) -> usize {
        self.keys().len()
    }

    /// Returns `true` if no permit is held or waited for.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<K> KeyedLimiter<K> {
    /// Locks the keys, which a panic elsewhere never leaves half-changed.
    fn keys(&self) -> MutexGuard<'_, HashMap<K, Arc<Semaphore>>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Eq + Hash> Drop for KeyedPermit<'_, K> {
    fn drop(&mut self) {
        self.permit = None;
        let mut keys = self.limiter.keys();
        self.semaphore = None;
        // The map's reference is the last one: nobody has a permit of this key or waits for one.
        if keys.get(&self.key).is_some_and(|semaphore| Arc::strong_count(semaphore) == 1) {
            keys.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use futures_util::future::join_all;

    use super::*;

    #[tokio::test]
    async fn one_permit_a_key_lets_keys_run_side_by_side() {
        let limiter: KeyedLimiter<u8> = KeyedLimiter::new(1);
        let busy = [const { AtomicUsize::new(0) }; 2];
        let most = AtomicUsize::new(0);
        join_all((0..40).map(|number| {
            let (limiter, busy, most) = (&limiter, &busy, &most);
            async move {
                let key = number % 2;
                let _permit = limiter.acquire(key).await;
                assert_eq!(busy[usize::from(key)].fetch_add(1, Ordering::SeqCst), 0);
                let both: usize = busy.iter().map(|busy| busy.load(Ordering::SeqCst)).sum();
                most.fetch_max(both, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(1)).await;
                busy[usize::from(key)].fetch_sub(1, Ordering::SeqCst);
            }
        }))
        .await;
        assert_eq!(most.load(Ordering::SeqCst), 2);
        assert!(limiter.is_empty());
    }

    #[tokio::test]
    async fn wait_that_is_given_up_leaves_nothing_behind() {
        let limiter: KeyedLimiter<u8> = KeyedLimiter::new(1);
        let permit = limiter.acquire(1).await;
        assert!(tokio::time::timeout(Duration::from_millis(5), limiter.acquire(1)).await.is_err());
        assert_eq!(limiter.len(), 1);
        let mut waiting = std::pin::pin!(limiter.acquire(1));
        assert!(futures_util::poll!(waiting.as_mut()).is_pending());
        drop(permit);
        drop(waiting.await);
        assert!(limiter.is_empty());
    }

    #[tokio::test]
    async fn several_permits_a_key_are_all_given() {
        let limiter: KeyedLimiter<u8> = KeyedLimiter::new(2);
        let first = limiter.acquire(1).await;
        let _second = limiter.acquire(1).await;
        let mut third = std::pin::pin!(limiter.acquire(1));
        assert!(futures_util::poll!(third.as_mut()).is_pending());
        drop(first);
        third.await;
    }
}
