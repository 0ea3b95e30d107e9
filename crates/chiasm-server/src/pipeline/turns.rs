//! One at a time for each of many things.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

/// Whose turn it is, for each thing that somebody works on or waits for.
#[derive(Debug)]
pub(super) struct Turns<K> {
    waiting: Mutex<HashMap<K, Arc<AsyncMutex<()>>>>,
}

/// The turn for one thing, until it is dropped.
pub(super) struct Turn<'a, K: Clone + Eq + Hash> {
    turns: &'a Turns<K>,
    key: K,
    lock: Option<Arc<AsyncMutex<()>>>,
    guard: Option<OwnedMutexGuard<()>>,
}

impl<K: Clone + Eq + Hash> Turns<K> {
    /// Waits for the turn: first come, first served. Who holds one must not wait for another.
    pub(super) async fn take(&self, key: K) -> Turn<'_, K> {
        let lock = self.list().entry(key.clone()).or_default().clone();
        // Before the wait, so that giving it up leaves nothing behind.
        let mut turn = Turn { turns: self, key, lock: Some(lock.clone()), guard: None };
        turn.guard = Some(lock.lock_owned().await);
        turn
    }

    /// The list is never left half-changed.
    fn list(&self) -> MutexGuard<'_, HashMap<K, Arc<AsyncMutex<()>>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K> Default for Turns<K> {
    fn default() -> Self {
        Self { waiting: Mutex::default() }
    }
}

impl<K: Clone + Eq + Hash> Drop for Turn<'_, K> {
    fn drop(&mut self) {
        self.guard = None;
        let mut list = self.turns.list();
        self.lock = None;
        // Only the list's own is left: nobody works on it or waits for it.
        if list.get(&self.key).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            list.remove(&self.key);
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
    async fn one_at_a_time_and_others_side_by_side() {
        let turns: Turns<u8> = Turns::default();
        let (busy, most) = ([const { AtomicUsize::new(0) }; 2], AtomicUsize::new(0));
        join_all((0..40).map(|number| {
            let (turns, busy, most) = (&turns, &busy, &most);
            async move {
                let key = number % 2;
                let _turn = turns.take(key).await;
                assert_eq!(busy[usize::from(key)].fetch_add(1, Ordering::SeqCst), 0);
                let both: usize = busy.iter().map(|busy| busy.load(Ordering::SeqCst)).sum();
                most.fetch_max(both, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(1)).await;
                busy[usize::from(key)].fetch_sub(1, Ordering::SeqCst);
            }
        }))
        .await;
        assert_eq!(most.load(Ordering::SeqCst), 2);
        assert!(turns.list().is_empty());
    }

    #[tokio::test]
    async fn who_stops_waiting_leaves_nothing_behind() {
        let turns: Turns<u8> = Turns::default();
        let turn = turns.take(1).await;
        assert!(tokio::time::timeout(Duration::from_millis(5), turns.take(1)).await.is_err());
        assert_eq!(turns.list().len(), 1);
        let mut waiting = std::pin::pin!(turns.take(1));
        assert!(futures_util::poll!(waiting.as_mut()).is_pending());
        drop(turn);
        drop(waiting.await);
        assert!(turns.list().is_empty());
    }
}
