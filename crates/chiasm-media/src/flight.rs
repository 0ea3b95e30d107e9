//! Single flight: concurrent callers with the same key share one piece of work.

use std::collections::HashMap;
use std::future::Future;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared, WeakShared};

/// Work in flight, by key. Clones share their state.
///
/// A flight runs as long as at least one caller waits for it, and is dropped with the last caller.
/// Every caller that joined gets its outcome, errors included. Outcomes are not cached: a later
/// caller starts a new flight.
pub(crate) struct SingleFlight<K, V> {
    running: Arc<Mutex<Running<K, V>>>,
}

struct Running<K, V> {
    flights: HashMap<K, Flight<V>>,
    /// The number of the last flight. Numbers distinguish flights with the same key.
    last_number: u64,
}

struct Flight<V> {
    number: u64,
    work: WeakShared<BoxFuture<'static, V>>,
}

/// The role of a caller in a flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The caller started the flight.
    Leader,
    /// The caller joined a flight.
    Follower,
}

impl<K, V> SingleFlight<K, V>
where
    K: Clone + Eq + Hash + Send + 'static,
    V: Clone + Send + Sync + 'static,
{
    /// Joins the flight for `key`, or starts one with `start`, and waits for its outcome.
    pub(crate) async fn join<F>(&self, key: K, start: impl FnOnce() -> F) -> (Role, V)
    where
        F: Future<Output = V> + Send + 'static,
    {
        let (role, work) = self.join_or_start(key, start);
        (role, work.await)
    }

    fn join_or_start<F>(
        &self,
        key: K,
        start: impl FnOnce() -> F,
    ) -> (Role, Shared<BoxFuture<'static, V>>)
    where
        F: Future<Output = V> + Send + 'static,
    {
        let mut running = lock(&self.running);
        if let Some(work) = running.flights.get(&key).and_then(|flight| flight.work.upgrade()) {
            return (Role::Follower, work);
        }
        running.last_number += 1;
        let number = running.last_number;
        let cleanup = RemoveOnDrop { running: self.running.clone(), key: key.clone(), number };
        let work = start();
        let work = async move {
            let _cleanup = cleanup;
            work.await
        };
        let work = work.boxed().shared();
        if let Some(weak) = work.downgrade() {
            running.flights.insert(key, Flight { number, work: weak });
        }
        (Role::Leader, work)
    }
}

impl<K, V> Clone for SingleFlight<K, V> {
    fn clone(&self) -> Self {
        Self { running: self.running.clone() }
    }
}

impl<K, V> Default for SingleFlight<K, V> {
    fn default() -> Self {
        let running = Running { flights: HashMap::new(), last_number: 0 };
        Self { running: Arc::new(Mutex::new(running)) }
    }
}

/// Removes a flight when it has ended, or when its last caller has gone.
struct RemoveOnDrop<K: Eq + Hash, V> {
    running: Arc<Mutex<Running<K, V>>>,
    key: K,
    number: u64,
}

impl<K: Eq + Hash, V> Drop for RemoveOnDrop<K, V> {
    fn drop(&mut self) {
        let mut running = lock(&self.running);
        if running.flights.get(&self.key).is_some_and(|flight| flight.number == self.number) {
            running.flights.remove(&self.key);
        }
    }
}

/// Locks `mutex`, even if it is poisoned: no critical section here leaves the map half-changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join_all;
    use tokio::sync::Notify;

    use super::*;

    /// Polls a caller once. It joins its flight and stays pending.
    fn poll_pending<F: Future + Unpin>(caller: &mut F) {
        assert!(caller.now_or_never().is_none(), "the caller is not pending");
    }

    #[tokio::test]
    async fn concurrent_callers_share_one_flight() {
        let flights = SingleFlight::default();
        let go = Arc::new(Notify::new());
        let started = Arc::new(AtomicUsize::new(0));
        let work = || {
            let go = go.clone();
            let started = started.clone();
            async move {
                let number = started.fetch_add(1, Ordering::Relaxed);
                go.notified().await;
                number
            }
        };
        let mut all = join_all((0..200).map(|_| Box::pin(flights.join("a", work))));
        poll_pending(&mut all);
        go.notify_one();
        let outcomes = all.await;
        assert!(outcomes.iter().all(|&(_, number)| number == 0));
        assert_eq!(outcomes.iter().filter(|&&(role, _)| role == Role::Leader).count(), 1);
        go.notify_one();
        assert_eq!(flights.join("a", work).await, (Role::Leader, 1), "outcomes are not cached");
        assert!(lock(&flights.running).flights.is_empty());
    }

    #[tokio::test]
    async fn cancelled_leader_leaves_flight_to_follower() {
        let flights: SingleFlight<_, usize> = SingleFlight::default();
        let go = Arc::new(Notify::new());
        let started = Arc::new(AtomicUsize::new(0));
        let join = || {
            let go = go.clone();
            let started = started.clone();
            let work = || async move {
                started.fetch_add(1, Ordering::Relaxed);
                go.notified().await;
                7
            };
            Box::pin(flights.join("a", work))
        };
        let mut leader = join();
        let mut follower = join();
        poll_pending(&mut leader);
        poll_pending(&mut follower);
        drop(leader);
        go.notify_one();
        assert_eq!(follower.await, (Role::Follower, 7));
        assert_eq!(started.load(Ordering::Relaxed), 1, "the follower continues the same work");
    }

    #[tokio::test]
    async fn flight_without_callers_is_dropped() {
        struct Dropped(Arc<AtomicUsize>);
        impl Drop for Dropped {
            fn drop(&mut self) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let flights: SingleFlight<_, ()> = SingleFlight::default();
        let dropped = Arc::new(AtomicUsize::new(0));
        let guard = Dropped(dropped.clone());
        let mut endless = Box::pin(flights.join("a", || async move {
            let _guard = guard;
            std::future::pending().await
        }));
        poll_pending(&mut endless);
        assert_eq!(dropped.load(Ordering::Relaxed), 0);
        drop(endless);
        assert_eq!(dropped.load(Ordering::Relaxed), 1);
        assert!(lock(&flights.running).flights.is_empty());
        assert_eq!(flights.join("a", || async {}).await.0, Role::Leader);
    }
}
