//! Limits on concurrent work per key.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A limiter with a fixed number of permits per key.
///
/// The permits of one key are granted in the order of the calls. A key takes memory only while a
/// permit of it is held or awaited.
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

/// A permit for one key, released on drop.
///
/// A task that holds a permit must not wait for another permit of the same limiter: two such tasks
/// could deadlock.
#[derive(Debug)]
pub struct KeyedPermit<'a, K: Eq + Hash> {
    limiter: &'a KeyedLimiter<K>,
    key: K,
    /// `None` while the permit is awaited, and during drop.
    permit: Option<OwnedSemaphorePermit>,
    /// `None` during drop.
    semaphore: Option<Arc<Semaphore>>,
}

impl<K: Clone + Eq + Hash> KeyedLimiter<K> {
    /// Creates a limiter with `permits` permits per key, at least one.
    pub fn new(permits: usize) -> Self {
        Self { permits: permits.clamp(1, Semaphore::MAX_PERMITS), keys: Mutex::default() }
    }

    /// Waits for a permit. Cancel-safe: a dropped wait leaves no state behind.
    pub async fn acquire(&self, key: K) -> KeyedPermit<'_, K> {
        let new = || Arc::new(Semaphore::new(self.permits));
        let semaphore = self.keys().entry(key.clone()).or_insert_with(new).clone();
        let waiting = semaphore.clone().acquire_owned();
        let mut permit =
            KeyedPermit { limiter: self, key, permit: None, semaphore: Some(semaphore) };
        // This can't fail: the semaphores are never closed.
        permit.permit = waiting.await.ok();
        permit
    }

    /// Returns the number of keys with a permit that is held or awaited.
    pub fn len(&self) -> usize {
        self.keys().len()
    }

    /// Returns `true` if no permit is held or awaited.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<K> KeyedLimiter<K> {
    /// Locks the map. A panic never leaves it half-changed, so poisoning is ignored.
    fn keys(&self) -> MutexGuard<'_, HashMap<K, Arc<Semaphore>>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Eq + Hash> Drop for KeyedPermit<'_, K> {
    fn drop(&mut self) {
        self.permit = None;
        let mut keys = self.limiter.keys();
        self.semaphore = None;
        // Only the map refers to the semaphore: no permit of this key is held or awaited.
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
    async fn different_keys_run_concurrently() {
        let limiter: KeyedLimiter<u8> = KeyedLimiter::new(1);
        let busy = [const { AtomicUsize::new(0) }; 2];
        let max_busy = AtomicUsize::new(0);
        join_all((0..40).map(|number| {
            let limiter = &limiter;
            let busy = &busy;
            let max_busy = &max_busy;
            async move {
                let key = number % 2;
                let _permit = limiter.acquire(key).await;
                assert_eq!(busy[usize::from(key)].fetch_add(1, Ordering::SeqCst), 0);
                let both: usize = busy.iter().map(|busy| busy.load(Ordering::SeqCst)).sum();
                max_busy.fetch_max(both, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(1)).await;
                busy[usize::from(key)].fetch_sub(1, Ordering::SeqCst);
            }
        }))
        .await;
        assert_eq!(max_busy.load(Ordering::SeqCst), 2);
        assert!(limiter.is_empty());
    }

    #[tokio::test]
    async fn cancelled_wait_leaves_no_state() {
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
    async fn key_grants_all_of_its_permits() {
        let limiter: KeyedLimiter<u8> = KeyedLimiter::new(2);
        let first = limiter.acquire(1).await;
        let _second = limiter.acquire(1).await;
        let mut third = std::pin::pin!(limiter.acquire(1));
        assert!(futures_util::poll!(third.as_mut()).is_pending());
        drop(first);
        third.await;
    }
}
