//! CPU-heavy steps for peers that have not authenticated yet, limited by address.

use std::io;

use chiasm_limit::KeyedLimiter;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use crate::peer::Peer;

/// A limit on concurrent CPU-heavy steps. Each step runs on a thread of its own, so that the system
/// shares the CPUs between the steps and everything else.
///
/// An address has one step at a time, and only that one waits for the limit. So an address with
/// many steps delays others no longer than one with a single step.
pub(super) struct Steps {
    permits: Semaphore,
    one_per_peer: KeyedLimiter<Peer>,
}

impl Steps {
    /// Lets up to `max_concurrent` steps run at once.
    pub(super) fn new(max_concurrent: usize) -> Self {
        Self { permits: Semaphore::new(max_concurrent), one_per_peer: KeyedLimiter::new(1) }
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
        // Both queues are first come, first served.
        let _peer_permit = self.one_per_peer.acquire(peer).await;
        let _permit = self.permits.acquire().await.map_err(io::Error::other)?;
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
        let peer = |number| Peer::from_address(IpAddr::V4(Ipv4Addr::new(10, 0, 0, number)));
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
        let last_of = |number| order.iter().rposition(|peer| *peer == number).unwrap();
        assert_eq!((order.len(), order[0]), (104, 1));
        assert!(last_of(2) <= 6 && last_of(3) <= 6, "{order:?}");
        assert!(limit.one_per_peer.is_empty());
    }
}
