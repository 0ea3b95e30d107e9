//! Turns by address, for what takes much CPU time before it is known who asks for it.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex as SyncMutex, PoisonError, Weak};

use tokio::sync::{Mutex, Semaphore};
use tokio::task::spawn_blocking;

use crate::peer::Peer;

/// A few steps at once, each in a thread of its own, so that the system shares the CPUs between them and all else. Of one address there is
/// one step at a time, and it alone stands in line: who asks for many keeps others waiting no longer than who asks for one.
pub(super) struct Turns {
    of_all: Semaphore,
    /// There is one of each address that has a step, or waits for one.
    of_each: SyncMutex<HashMap<Peer, Weak<Mutex<()>>>>,
}

impl Turns {
    /// Lets as many steps run at once.
    pub(super) fn new(at_once: usize) -> Self {
        Self { of_all: Semaphore::new(at_once), of_each: SyncMutex::default() }
    }

    /// Runs a step of whoever is there, when it is their turn.
    pub(super) async fn take<T: Send + 'static>(
        &self,
        peer: Peer,
        step: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let own = self.of(peer);
        // Both let whoever came first go first.
        let _own = own.lock().await;
        let _turn = self.of_all.acquire().await.map_err(io::Error::other)?;
        Ok(spawn_blocking(step).await?)
    }

    fn of(&self, peer: Peer) -> Arc<Mutex<()>> {
        let mut each = self.of_each.lock().unwrap_or_else(PoisonError::into_inner);
        each.get(&peer).and_then(Weak::upgrade).unwrap_or_else(|| {
            each.retain(|_, own| own.strong_count() > 0);
            let own = Arc::default();
            each.insert(peer, Arc::downgrade(&own));
            own
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};
    use std::sync::mpsc;
    use std::task::Poll;

    use futures_util::future::join_all;
    use futures_util::poll;

    use super::*;

    #[tokio::test]
    async fn who_asks_for_many_keeps_others_waiting_no_longer_than_who_asks_for_one() {
        let peer = |number| Peer::at(IpAddr::V4(Ipv4Addr::new(10, 0, 0, number)));
        let (turns, order) = (Turns::new(1), Arc::new(SyncMutex::new(Vec::new())));
        let (go, wait) = mpsc::channel::<()>();
        let first = turns.take(peer(9), move || wait.recv().is_ok());
        tokio::pin!(first);
        assert!(matches!(poll!(&mut first), Poll::Pending));
        let mut steps = Vec::new();
        for number in [[1; 100].as_slice(), &[2, 3, 2, 3]].concat() {
            let order = order.clone();
            let mut step = Box::pin(turns.take(peer(number), move || order.lock().unwrap().push(number)));
            assert!(matches!(poll!(&mut step), Poll::Pending));
            steps.push(step);
        }
        go.send(()).unwrap();
        assert!(first.await.unwrap());
        assert!(join_all(steps).await.iter().all(Result::is_ok));
        let order = order.lock().unwrap();
        let last_of = |number| order.iter().rposition(|of| *of == number).unwrap();
        assert_eq!((order.len(), order[0]), (104, 1));
        assert!(last_of(2) <= 6 && last_of(3) <= 6, "{order:?}");
        // Nobody is remembered who is gone.
        drop(turns.of(peer(4)));
        assert_eq!(turns.of_each.lock().unwrap().len(), 1);
    }
}
