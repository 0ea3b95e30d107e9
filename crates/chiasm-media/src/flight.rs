//! Single flight: who asks for what is already on its way waits for that.

use std::collections::HashMap;
use std::future::Future;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared, WeakShared};

/// Work under way, by what it is for. Clones are the same flights.
///
/// Work belongs to all who wait for it: it goes on as long as one of them does, whoever came first,
/// and is dropped with the last. Its outcome is told to all who came while it was under way, errors
/// too; who comes later starts anew.
pub(crate) struct Flights<K, V> {
    running: Arc<Mutex<Running<K, V>>>,
}

struct Running<K, V> {
    flights: HashMap<K, Flight<V>>,
    /// Tells a flight from a later one for the same key.
    last: u64,
}

struct Flight<V> {
    number: u64,
    work: WeakShared<BoxFuture<'static, V>>,
}

/// Whether work was started for a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Boarded {
    First,
    Later,
}

impl<K, V> Flights<K, V>
where
    K: Clone + Eq + Hash + Send + 'static,
    V: Clone + Send + Sync + 'static,
{
    /// Waits for the work that is under way for `key`, or for `start`'s if there is none.
    pub(crate) async fn join<F>(&self, key: K, start: impl FnOnce() -> F) -> (Boarded, V)
    where
        F: Future<Output = V> + Send + 'static,
    {
        let (boarded, work) = self.board(key, start);
        (boarded, work.await)
    }

    fn board<F>(
        &self,
        key: K,
        start: impl FnOnce() -> F,
    ) -> (Boarded, Shared<BoxFuture<'static, V>>)
    where
        F: Future<Output = V> + Send + 'static,
    {
        let mut running = lock(&self.running);
        if let Some(work) = running.flights.get(&key).and_then(|flight| flight.work.upgrade()) {
            return (Boarded::Later, work);
        }
        running.last += 1;
        let number = running.last;
        let landing = Landing { running: self.running.clone(), key: key.clone(), number };
        let work = start();
        let work = async move {
            let _landing = landing;
            work.await
        };
        let work = work.boxed().shared();
        if let Some(weak) = work.downgrade() {
            running.flights.insert(key, Flight { number, work: weak });
        }
        (Boarded::First, work)
    }
}

impl<K, V> Clone for Flights<K, V> {
    fn clone(&self) -> Self {
        Self { running: self.running.clone() }
    }
}

impl<K, V> Default for Flights<K, V> {
    fn default() -> Self {
        Self { running: Arc::new(Mutex::new(Running { flights: HashMap::new(), last: 0 })) }
    }
}

/// Strikes a flight off the list when it has ended or nobody waits for it any more.
struct Landing<K: Eq + Hash, V> {
    running: Arc<Mutex<Running<K, V>>>,
    key: K,
    number: u64,
}

impl<K: Eq + Hash, V> Drop for Landing<K, V> {
    fn drop(&mut self) {
        let mut running = lock(&self.running);
        if running.flights.get(&self.key).is_some_and(|flight| flight.number == self.number) {
            running.flights.remove(&self.key);
        }
    }
}

/// The list is never left half-changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join_all;
    use tokio::sync::Notify;

    use super::*;

    /// Lets a caller ask, and go on waiting.
    fn ask<F: Future + Unpin>(caller: &mut F) {
        assert!(caller.now_or_never().is_none(), "there is nothing to wait for");
    }

    #[tokio::test]
    async fn many_callers_share_one_piece_of_work() {
        let flights = Flights::default();
        let (go, started) = (Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
        let work = || {
            let (go, started) = (go.clone(), started.clone());
            async move {
                let number = started.fetch_add(1, Ordering::Relaxed);
                go.notified().await;
                number
            }
        };
        let mut all = join_all((0..200).map(|_| Box::pin(flights.join("a", work))));
        ask(&mut all);
        go.notify_one();
        let outcomes = all.await;
        assert!(outcomes.iter().all(|&(_, number)| number == 0));
        assert_eq!(outcomes.iter().filter(|&&(boarded, _)| boarded == Boarded::First).count(), 1);
        go.notify_one();
        assert_eq!(flights.join("a", work).await, (Boarded::First, 1), "outcomes are not kept");
        assert!(lock(&flights.running).flights.is_empty());
    }

    #[tokio::test]
    async fn a_cancelled_leader_hands_over() {
        let flights: Flights<_, usize> = Flights::default();
        let (go, started) = (Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
        let join = || {
            let (go, started) = (go.clone(), started.clone());
            let work = || async move {
                started.fetch_add(1, Ordering::Relaxed);
                go.notified().await;
                7
            };
            Box::pin(flights.join("a", work))
        };
        let (mut leader, mut follower) = (join(), join());
        ask(&mut leader);
        ask(&mut follower);
        drop(leader);
        go.notify_one();
        assert_eq!(follower.await, (Boarded::Later, 7));
        assert_eq!(started.load(Ordering::Relaxed), 1, "the follower goes on with the same work");
    }

    #[tokio::test]
    async fn work_that_nobody_waits_for_is_dropped_and_can_be_started_again() {
        struct Dropped(Arc<AtomicUsize>);
        impl Drop for Dropped {
            fn drop(&mut self) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let flights: Flights<_, ()> = Flights::default();
        let dropped = Arc::new(AtomicUsize::new(0));
        let guard = Dropped(dropped.clone());
        let mut for_ever = Box::pin(flights.join("a", || async move {
            let _guard = guard;
            std::future::pending().await
        }));
        ask(&mut for_ever);
        assert_eq!(dropped.load(Ordering::Relaxed), 0);
        drop(for_ever);
        assert_eq!(dropped.load(Ordering::Relaxed), 1);
        assert!(lock(&flights.running).flights.is_empty());
        assert_eq!(flights.join("a", || async {}).await.0, Boarded::First);
    }
}
