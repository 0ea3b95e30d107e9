//! One connection of a client, as those know it who serve it and those who need its place.

use std::net::IpAddr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use chiasm_limit::Owner;
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// The value of `waits_since` while the client is not waited for.
const ENGAGED: u64 = u64::MAX;

/// An open connection. It is *engaged* while a request that has arrived is answered, and else waits
/// for its client: for a head, for the rest of a body, or for an answer to be read.
#[derive(Debug)]
pub(crate) struct Connection {
    peer: IpAddr,
    owner: Owner,
    opened: Instant,
    /// Milliseconds from `opened` until the client began to be waited for, or [`ENGAGED`].
    waits_since: AtomicU64,
    ends_with_client: AtomicBool,
    has_large_body: AtomicBool,
    is_bulk: AtomicBool,
    task: OnceLock<AbortHandle>,
}

impl Connection {
    /// A connection from this address, which has just been opened.
    pub(crate) fn from_peer(peer: IpAddr) -> Self {
        Self {
            peer,
            owner: Owner::at(peer),
            opened: Instant::now(),
            waits_since: AtomicU64::new(0),
            ends_with_client: AtomicBool::new(false),
            has_large_body: AtomicBool::new(false),
            is_bulk: AtomicBool::new(false),
            task: OnceLock::new(),
        }
    }

    /// The address at the other end, which may be a proxy's.
    pub(crate) fn peer(&self) -> IpAddr {
        self.peer
    }

    /// The owner in whose share the connection is.
    pub(crate) fn owner(&self) -> Owner {
        self.owner
    }

    /// A request has arrived whole: the connection is kept until it is answered.
    pub(crate) fn engage(&self) {
        self.waits_since.store(ENGAGED, Ordering::Relaxed);
    }

    /// The client is waited for from now on.
    pub(crate) fn wait(&self) {
        // Nobody waits for 2^64 milliseconds.
        self.waits_since.store(self.opened.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// How long the client has been waited for; `None` while the connection is engaged.
    pub(crate) fn waits(&self, now: Instant) -> Option<Duration> {
        let since = self.waits_since.load(Ordering::Relaxed);
        (since != ENGAGED).then(|| {
            now.saturating_duration_since(self.opened).saturating_sub(Duration::from_millis(since))
        })
    }

    /// A large body arrives until this is dropped.
    pub(crate) fn receive_large_body(&self) -> LargeBody<'_> {
        self.has_large_body.store(true, Ordering::Relaxed);
        LargeBody { connection: self }
    }

    /// Whether a large body arrives.
    pub(crate) fn has_large_body(&self) -> bool {
        self.has_large_body.load(Ordering::Relaxed)
    }

    /// Tells whether the bulk threads serve the connection.
    pub(crate) fn set_bulk(&self, is_bulk: bool) {
        self.is_bulk.store(is_bulk, Ordering::Relaxed);
    }

    /// Whether the bulk threads serve the connection.
    pub(crate) fn is_bulk(&self) -> bool {
        self.is_bulk.load(Ordering::Relaxed)
    }

    /// The request under way ends when the client closes its side of the connection.
    pub(crate) fn ends_with_client(&self) {
        self.ends_with_client.store(true, Ordering::Relaxed);
    }

    /// Whether the request under way ends with its client, because an engine works for it.
    pub(crate) fn is_ended_by_client(&self) -> bool {
        self.ends_with_client.load(Ordering::Relaxed)
    }

    /// The request under way has its answer.
    pub(crate) fn answered(&self) {
        self.ends_with_client.store(false, Ordering::Relaxed);
        self.wait();
    }

    /// Tells by which task the connection is served.
    pub(crate) fn served_by(&self, task: AbortHandle) {
        // Told once.
        let _ = self.task.set(task);
    }

    /// Closes the connection, whatever is under way.
    pub(crate) fn close(&self) {
        if let Some(task) = self.task.get() {
            task.abort();
        }
    }
}

/// A large body that arrives.
#[derive(Debug)]
pub(crate) struct LargeBody<'a> {
    connection: &'a Connection,
}

impl Drop for LargeBody<'_> {
    fn drop(&mut self) {
        self.connection.has_large_body.store(false, Ordering::Relaxed);
    }
}
