//! One child of the fork server.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::time::timeout;

use bytes::Bytes;

use crate::ProcessorError;
use crate::connection::Connection;
use crate::memory::{Memory, Spares};
use crate::message::{Call, Ready, Reply};
use crate::server::Server;

/// The maximum size of a file that is copied on the async thread. That takes 100 µs; moving to
/// another thread takes some tens of microseconds.
const MAX_INLINE_COPY_BYTES: usize = 512 << 10;

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

    /// Allocates memory for an item of this child: at least `length` bytes that begin with `file`.
    pub(crate) async fn allocate(&self, file: Bytes, length: u64) -> io::Result<Memory> {
        if file.len() <= MAX_INLINE_COPY_BYTES {
            return self.spares.allocate(&file, length);
        }
        let spares = self.spares.clone();
        let copied = tokio::task::spawn_blocking(move || spares.allocate(&file, length)).await;
        copied.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Sends a call and returns the reply. After an error other than [`ProcessorError::Refused`]
    /// the child must not be used again.
    pub(crate) async fn call(
        &mut self,
        call: &Call<'_>,
        memory: Option<BorrowedFd<'_>>,
        time_limit: Duration,
    ) -> Result<Reply, ProcessorError> {
        let exchange = async {
            self.connection.send(call, memory).await?;
            self.connection.receive::<Reply>().await
        };
        match timeout(time_limit, exchange).await {
            Err(_) => Err(ProcessorError::TimedOut { after: time_limit }),
            Ok(Ok(Reply::Refused { reason })) => Err(ProcessorError::Refused(reason)),
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::InvalidData => {
                Err(ProcessorError::InvalidReply(error.to_string()))
            }
            // The cause is the exit of the server, not the call.
            Ok(Err(_)) if self.server.has_ended().await => {
                Err(ProcessorError::Unavailable("it ended during the call".to_owned()))
            }
            Ok(Err(_)) => Err(ProcessorError::ChildDied),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Fails if the child has ended already.
        let _ = pidfd_send_signal(&self.process, Signal::KILL);
    }
}
