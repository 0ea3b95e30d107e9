//! CPU-heavy steps for peers that have not authenticated yet, limited by address.

use std::io;

use chiasm_limit::KeyedLimiter;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use crate::peer::Peer;

/// A limit on CPU-heavy steps at once. Each step runs on a thread of its own, so that the system
/// shares the CPUs between the steps and everything else.
///
/// An address has one step at a time, and only that one waits for the limit: an address that asks
/// for many steps delays others no longer than one that asks for one.
pub(super) struct Steps {
    at_once: Semaphore,
    one_per_peer: KeyedLimiter<Peer>,
}

impl Steps {
    /// Lets as many steps run at once.
    pub(super) fn new(at_once: usize) -> Self {
        Self { at_once: Semaphore::new(at_once), one_per_peer: KeyedLimiter::new(1) }
    }

    /// Runs a step of a peer once it may run.
    ///
    /// # Errors
    /// The step panicked.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        peer: Peer,
        step: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        // Both are fair: first come, first served.
        let _of_peer = self.one_per_peer.acquire(peer).await;
        let _of_all = self.at_once.acquire().await.map_err(io::Error::other)?;
        Ok(spawn_blocking(step).await?)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};
    use std::sync::{Arc, Mutex, mpsc};
    use std::task::Poll;

    use futures_util::future::join_all;
    use futures_util::poll;

    use super::*;

    #[tokio::test]
    async fn peer_with_many_steps_delays_others_by_one() {
        let peer = |number| Peer::at(IpAddr::V4(Ipv4Addr::new(10, 0, 0, number)));
        let limit = Steps::new(1);
        let order = Arc::new(Mutex::new(Vec::new()));
        let (go, wait) = mpsc::channel::<()>();
        let first = limit.run(peer(9), move || wait.recv().is_ok());
        tokio::pin!(first);
        assert!(matches!(poll!(&mut first), Poll::Pending));
        let mut steps = Vec::new();
        for number in [[1; 100].as_slice(), &[2, 3, 2, 3]].concat() {
            let order = order.clone();
            let mut step =
                Box::pin(limit.run(peer(number), move || order.lock().unwrap().push(number)));
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
        assert!(limit.one_per_peer.is_empty());
    }
}
