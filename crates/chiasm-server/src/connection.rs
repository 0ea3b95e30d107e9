//! The state of a client connection, shared by its task, its requests and the connection table.

use std::net::IpAddr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use chiasm_limit::Owner;
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// The value of `waiting_since` while the connection is engaged.
const ENGAGED: u64 = u64::MAX;

/// An open connection. It is *engaged* while it answers a complete request. Otherwise it waits for
/// its client: for a request head, for the rest of a body, or to read an answer.
#[derive(Debug)]
pub(crate) struct Connection {
    peer: IpAddr,
    owner: Owner,
    opened: Instant,
    /// Milliseconds from `opened` until the connection began to wait for its client, or
    /// [`ENGAGED`].
    waiting_since: AtomicU64,
    cancels_on_disconnect: AtomicBool,
    has_large_body: AtomicBool,
    is_bulk: AtomicBool,
    task: OnceLock<AbortHandle>,
}

impl Connection {
    /// Creates the state of a connection from this address that has just been opened.
    pub(crate) fn from_peer(peer: IpAddr) -> Self {
        Self {
            peer,
            owner: Owner::from_address(peer),
            opened: Instant::now(),
            waiting_since: AtomicU64::new(0),
            cancels_on_disconnect: AtomicBool::new(false),
            has_large_body: AtomicBool::new(false),
            is_bulk: AtomicBool::new(false),
            task: OnceLock::new(),
        }
    }

    /// Returns the address at the other end, which may be a proxy's.
    pub(crate) fn peer(&self) -> IpAddr {
        self.peer
    }

    /// Returns the owner whose share the connection counts towards.
    pub(crate) fn owner(&self) -> Owner {
        self.owner
    }

    /// Marks the connection as engaged, because a complete request has arrived.
    pub(crate) fn engage(&self) {
        self.waiting_since.store(ENGAGED, Ordering::Relaxed);
    }

    /// Marks the connection as waiting for its client.
    pub(crate) fn start_waiting(&self) {
        // No connection lasts 2^64 milliseconds.
        self.waiting_since.store(self.opened.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// Returns the time for which the connection has waited for its client; `None` while it is
    /// engaged.
    pub(crate) fn waiting_time(&self, now: Instant) -> Option<Duration> {
        let since = self.waiting_since.load(Ordering::Relaxed);
        (since != ENGAGED).then(|| {
            now.saturating_duration_since(self.opened).saturating_sub(Duration::from_millis(since))
        })
    }

    /// Marks the connection as receiving a large body until the guard is dropped.
    pub(crate) fn receive_large_body(&self) -> LargeBodyGuard<'_> {
        self.has_large_body.store(true, Ordering::Relaxed);
        LargeBodyGuard { connection: self }
    }

    /// Returns `true` while a large body arrives.
    pub(crate) fn has_large_body(&self) -> bool {
        self.has_large_body.load(Ordering::Relaxed)
    }

    /// Sets whether the bulk threads serve the connection.
    pub(crate) fn set_bulk(&self, is_bulk: bool) {
        self.is_bulk.store(is_bulk, Ordering::Relaxed);
    }

    /// Returns `true` if the bulk threads serve the connection.
    pub(crate) fn is_bulk(&self) -> bool {
        self.is_bulk.load(Ordering::Relaxed)
    }

    /// Cancels the current request when the client closes its side of the connection.
    pub(crate) fn cancel_on_disconnect(&self) {
        self.cancels_on_disconnect.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if a disconnect of the client cancels the current request, because an engine
    /// works for it.
    pub(crate) fn cancels_on_disconnect(&self) -> bool {
        self.cancels_on_disconnect.load(Ordering::Relaxed)
    }

    /// Marks the current request as answered.
    pub(crate) fn finish_request(&self) {
        self.cancels_on_disconnect.store(false, Ordering::Relaxed);
        self.start_waiting();
    }

    /// Sets the task that serves the connection.
    pub(crate) fn set_task(&self, task: AbortHandle) {
        // Set only once.
        let _ = self.task.set(task);
    }

    /// Closes the connection, even in the middle of a request.
    pub(crate) fn close(&self) {
        if let Some(task) = self.task.get() {
            task.abort();
        }
    }
}

/// Marks a connection as receiving a large body.
#[derive(Debug)]
pub(crate) struct LargeBodyGuard<'a> {
    connection: &'a Connection,
}

impl Drop for LargeBodyGuard<'_> {
    fn drop(&mut self) {
        self.connection.has_large_body.store(false, Ordering::Relaxed);
    }
}
