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

/// Files of up to this many bytes are copied in place: that takes a hundred microseconds, and other
/// threads some tens.
const IN_PLACE: usize = 512 << 10;

/// A child that answers one call at a time. Dropping it kills it.
pub(crate) struct Child {
    connection: Connection,
    process: OwnedFd,
    spares: Arc<Spares>,
    /// The server that it was forked off. Its children end with it.
    server: Arc<Server>,
}

impl Child {
    /// Waits for the first words of a child that was just forked.
    pub(crate) async fn greeted(
        server: Arc<Server>,
        mut connection: Connection,
    ) -> Result<Self, ProcessorError> {
        let gone = |what: String| ProcessorError::Gone(format!("a child {what}"));
        let ready = connection.receive::<Ready>().await;
        let Ready { ready } = ready.map_err(|error| gone(format!("ended at once: {error}")))?;
        let pid = Pid::from_raw(ready).ok_or_else(|| gone("has no number".to_owned()))?;
        // It lives, as it has just spoken and waits for a call: the number is its own.
        let process =
            pidfd_open(pid, PidfdFlags::empty()).map_err(|error| gone(error.to_string()))?;
        Ok(Self { connection, process, spares: Arc::default(), server })
    }

    /// Returns `true` if it was forked off this server.
    pub(crate) fn is_of(&self, server: &Arc<Server>) -> bool {
        Arc::ptr_eq(&self.server, server)
    }

    /// Returns `true` if its server is lost and is being replaced.
    pub(crate) fn has_lost_server(&self) -> bool {
        self.server.is_lost()
    }

    /// Whether it is there and waits.
    pub(crate) fn is_idle(&self) -> bool {
        self.connection.is_quiet()
    }

    /// Memory of at least `length` bytes for an item of this child's, with its file.
    pub(crate) async fn memory(&self, file: Bytes, length: u64) -> io::Result<Memory> {
        if file.len() <= IN_PLACE {
            return self.spares.memory(&file, length);
        }
        let spares = self.spares.clone();
        let copied = tokio::task::spawn_blocking(move || spares.memory(&file, length)).await;
        copied.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Asks something. After an error other than [`ProcessorError::Refused`] the child is of no use
    /// any more.
    pub(crate) async fn call(
        &mut self,
        call: &Call<'_>,
        memory: Option<BorrowedFd<'_>>,
        patience: Duration,
    ) -> Result<Reply, ProcessorError> {
        let exchange = async {
            self.connection.send(call, memory).await?;
            self.connection.receive::<Reply>().await
        };
        match timeout(patience, exchange).await {
            Err(_) => Err(ProcessorError::TimedOut { after: patience }),
            Ok(Ok(Reply::Refused { reason })) => Err(ProcessorError::Refused(reason)),
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::InvalidData => {
                Err(ProcessorError::Nonsense(error.to_string()))
            }
            // The server's end is the reason then, and not the call.
            Ok(Err(_)) if self.server.is_ending().await => {
                Err(ProcessorError::Gone("it ended meanwhile".to_owned()))
            }
            Ok(Err(_)) => Err(ProcessorError::Died),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // It may have ended.
        let _ = pidfd_send_signal(&self.process, Signal::KILL);
    }
}
