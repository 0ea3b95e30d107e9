//! Data of media items that frontends send on request, kept for other engines of this machine.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chiasm_limit::{KeyedLimiter, KeyedPermit};
use chiasm_types::MmHash;
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::super::error::RequestError;

/// The timeout for data from the frontend that makes it, perhaps again. Requests have their own
/// deadlines.
pub(super) const DATA_TIMEOUT: Duration = Duration::from_secs(120);

/// The approximate memory of a cached item beside its data, in bytes.
const ITEM_BYTES: u64 = 1024;

/// Data of one media item.
pub(super) trait ItemData {
    /// Returns the size of the data in bytes.
    fn bytes(&self) -> u64;
}

/// A check that received data is of use to the task that waits for it.
pub(super) type Check<T> = Box<dyn Fn(&T) -> bool + Send + Sync>;

/// The received data of items, cached, and the tasks that wait for data.
pub(super) struct ReceivedItems<T> {
    cache: Option<Cache<MmHash, Arc<T>, Weight>>,
    single_flight: KeyedLimiter<MmHash>,
    /// The task that waits for each item; only the holder of the item's permit waits.
    waiting: Mutex<HashMap<MmHash, Waiter<T>>>,
}

struct Waiter<T> {
    sender: oneshot::Sender<Arc<T>>,
    check: Check<T>,
}

/// The error for data that the waiting task can't use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotExpected;

#[derive(Clone)]
struct Weight;

impl<T: ItemData> Weighter<MmHash, Arc<T>> for Weight {
    fn weight(&self, _: &MmHash, data: &Arc<T>) -> u64 {
        ITEM_BYTES + data.bytes()
    }
}

impl<T: ItemData> ReceivedItems<T> {
    /// Caches `cached_bytes` of the received data.
    pub(super) fn new(cached_bytes: u64) -> Self {
        // A single shard, so that one item may use the whole capacity.
        let options = OptionsBuilder::new()
            .shards(1)
            .weight_capacity(cached_bytes)
            .estimated_items_capacity(1 << 10)
            .build();
        let cache =
            |options| Cache::with_options(options, Weight, Default::default(), Default::default());
        let cache = options.ok().filter(|_| cached_bytes > 0).map(cache);
        Self { cache, single_flight: KeyedLimiter::new(1), waiting: Mutex::default() }
    }

    /// Waits until no other task waits for this item, and locks it.
    pub(super) async fn lock(&self, hash: MmHash) -> KeyedPermit<'_, MmHash> {
        self.single_flight.acquire(hash).await
    }

    /// Accepts the data of an item, for the waiting task and for later ones.
    ///
    /// # Errors
    /// Returns an error if the waiting task can't use the data. It goes on waiting.
    pub(super) fn put(&self, hash: MmHash, data: T) -> Result<(), NotExpected> {
        let mut waiting = self.waiting();
        if waiting.get(&hash).is_some_and(|waiter| !(waiter.check)(&data)) {
            return Err(NotExpected);
        }
        let data = Arc::new(data);
        if let Some(cache) = &self.cache {
            cache.insert(hash, data.clone());
        }
        if let Some(waiter) = waiting.remove(&hash) {
            let _ = waiter.sender.send(data);
        }
        Ok(())
    }

    /// Removes the data of an item from the cache.
    pub(super) fn remove(&self, hash: &MmHash) {
        if let Some(cache) = &self.cache {
            cache.remove(hash);
        }
    }

    /// Returns the data of an item from the cache, or from the frontend after `request`. The caller
    /// holds the item's permit.
    ///
    /// # Errors
    /// Returns an error if the frontend does not send the data in time.
    pub(super) async fn get(
        &self,
        hash: MmHash,
        check: Check<T>,
        request: impl FnOnce(),
    ) -> Result<Arc<T>, RequestError> {
        let cached = self.cache.as_ref().and_then(|cache| cache.get(&hash));
        if let Some(data) = cached.filter(|data| check(data)) {
            return Ok(data);
        }
        let (sender, receiver) = oneshot::channel();
        self.waiting().insert(hash, Waiter { sender, check });
        let _guard = WaitGuard { items: self, hash };
        request();
        let data = timeout(DATA_TIMEOUT, receiver).await;
        let lost = || RequestError::internal("the frontend did not send a media item's data");
        data.ok().and_then(Result::ok).ok_or_else(lost)
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<MmHash, Waiter<T>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes the waiting task when dropped.
struct WaitGuard<'a, T: ItemData> {
    items: &'a ReceivedItems<T>,
    hash: MmHash,
}

impl<T: ItemData> Drop for WaitGuard<'_, T> {
    fn drop(&mut self) {
        self.items.waiting().remove(&self.hash);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    impl ItemData for u64 {
        fn bytes(&self) -> u64 {
            *self
        }
    }

    const ITEM: MmHash = MmHash::new([7; 32]);

    fn less_than(limit: u64) -> Check<u64> {
        Box::new(move |data| *data < limit)
    }

    #[tokio::test]
    async fn unexpected_data_is_refused_while_a_task_waits() {
        let items = ReceivedItems::new(1 << 20);
        let mut requests = 0;
        let mut waiting = Box::pin(items.get(ITEM, less_than(5), || requests += 1));
        assert!((&mut waiting).now_or_never().is_none());
        assert_eq!(items.put(ITEM, 6), Err(NotExpected));
        assert!((&mut waiting).now_or_never().is_none());
        assert_eq!(items.put(ITEM, 4), Ok(()));
        assert_eq!(*waiting.await.unwrap(), 4);
        assert_eq!(requests, 1);
    }

    #[tokio::test]
    async fn cached_data_is_used_if_it_passes_the_check() {
        let items = ReceivedItems::new(1 << 20);
        items.put(ITEM, 4).unwrap();
        let cached = |limit| items.get(ITEM, less_than(limit), || {}).now_or_never();
        assert_eq!(*cached(5).unwrap().unwrap(), 4);
        assert!(cached(4).is_none());
        items.remove(&ITEM);
        assert!(cached(5).is_none());
        // The tasks that were given up no longer wait.
        assert!(items.waiting().is_empty());
    }

    #[tokio::test]
    async fn nothing_is_kept_without_a_cache() {
        let items = ReceivedItems::new(0);
        items.put(ITEM, 4).unwrap();
        assert!(items.get(ITEM, less_than(5), || {}).now_or_never().is_none());
    }
}
