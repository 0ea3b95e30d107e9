//! One child of the fork server.

use std::future::Future;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::time::{Instant, timeout};

use bytes::Bytes;

use crate::ProcessorError;
use crate::connection::Connection;
use crate::memory::{Memory, Spares};
use crate::message::{Call, Ready, Reply};
use crate::server::Server;

/// The maximum size of a file that is copied on the async thread. That takes 100 µs; moving to
/// another thread takes some tens of microseconds.
pub(crate) const MAX_INLINE_COPY_BYTES: usize = 512 << 10;

/// A child that answers one call at a time. Dropping it kills it.
pub(crate) struct Child {
    connection: Connection,
    process: OwnedFd,
    spares: Arc<Spares>,
    /// The server that forked this child. The child ends with the server.
    server: Arc<Server>,
}

impl Child {
    /// Waits for the first message of a child that was just forked.
    pub(crate) async fn after_fork(
        server: Arc<Server>,
        mut connection: Connection,
    ) -> Result<Self, ProcessorError> {
        let unavailable = |what: String| ProcessorError::Unavailable(format!("a child {what}"));
        let ready = connection.receive::<Ready>().await;
        let Ready { ready } =
            ready.map_err(|error| unavailable(format!("ended immediately: {error}")))?;
        let pid = Pid::from_raw(ready);
        let pid = pid.ok_or_else(|| unavailable("sent an invalid process id".to_owned()))?;
        // The id was not reused: the child has just sent its message and waits for a call.
        let process =
            pidfd_open(pid, PidfdFlags::empty()).map_err(|error| unavailable(error.to_string()))?;
        Ok(Self { connection, process, spares: Arc::default(), server })
    }

    /// Returns `true` if `server` forked this child.
    pub(crate) fn belongs_to(&self, server: &Arc<Server>) -> bool {
        Arc::ptr_eq(&self.server, server)
    }

    /// Returns `true` if the child's server is lost and is being replaced.
    pub(crate) fn has_lost_server(&self) -> bool {
        self.server.is_lost()
    }

    /// Returns `true` if the child is alive and waits for a call.
    pub(crate) fn is_idle(&self) -> bool {
        self.connection.is_quiet()
    }

    /// Allocates memory for a call of this child: at least `length` bytes that begin with a file,
    /// given in pieces.
    pub(crate) async fn allocate(&self, pieces: Vec<Bytes>, length: u64) -> io::Result<Memory> {
        if pieces.iter().map(Bytes::len).sum::<usize>() <= MAX_INLINE_COPY_BYTES {
            return self.spares.allocate(&pieces, length);
        }
        let spares = self.spares.clone();
        let copied = tokio::task::spawn_blocking(move || spares.allocate(&pieces, length)).await;
        copied.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Sends a call and returns the reply. After an error other than [`ProcessorError::Refused`]
    /// the child must not be used again.
    pub(crate) async fn call(
        &mut self,
        call: &Call<'_>,
        memory: Option<BorrowedFd<'_>>,
        budget: &mut TimeBudget,
    ) -> Result<Reply, ProcessorError> {
        self.send(call, memory, budget).await?;
        self.receive(budget).await
    }

    /// Sends a call, or a message during a call.
    pub(crate) async fn send(
        &mut self,
        call: &Call<'_>,
        memory: Option<BorrowedFd<'_>>,
        budget: &mut TimeBudget,
    ) -> Result<(), ProcessorError> {
        match budget.spend(self.connection.send(call, memory)).await? {
            Ok(()) => Ok(()),
            Err(error) => Err(self.explain(error).await),
        }
    }

    /// Receives the next reply to the current call.
    pub(crate) async fn receive(
        &mut self,
        budget: &mut TimeBudget,
    ) -> Result<Reply, ProcessorError> {
        match budget.spend(self.connection.receive::<Reply>()).await? {
            Ok(Reply::Refused { reason }) => Err(ProcessorError::Refused(reason)),
            Ok(reply) => Ok(reply),
            Err(error) => Err(self.explain(error).await),
        }
    }

    /// Converts an error of the connection.
    async fn explain(&self, error: io::Error) -> ProcessorError {
        if error.kind() == io::ErrorKind::InvalidData {
            return ProcessorError::InvalidReply(error.to_string());
        }
        if self.server.has_ended().await {
            // The cause is the exit of the server, not the call.
            return ProcessorError::Unavailable("it ended during the call".to_owned());
        }
        ProcessorError::ChildDied
    }
}

/// The time that a child may take for a call. Only the time counts in which this process waits for
/// the child.
#[derive(Debug)]
pub(crate) struct TimeBudget {
    limit: Duration,
    left: Duration,
}

impl TimeBudget {
    /// Creates a budget of which nothing is spent.
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, left: limit }
    }

    /// Waits for `work` while there is time left.
    async fn spend<T>(&mut self, work: impl Future<Output = T>) -> Result<T, ProcessorError> {
        let start = Instant::now();
        let outcome = timeout(self.left, work).await;
        self.left = self.left.saturating_sub(start.elapsed());
        outcome.map_err(|_| ProcessorError::TimedOut { after: self.limit })
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Fails if the child has ended already.
        let _ = pidfd_send_signal(&self.process, Signal::KILL);
    }
}
