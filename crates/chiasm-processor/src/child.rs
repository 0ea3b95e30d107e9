//! One child of the fork server.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::time::timeout;

use crate::ProcessorError;
use crate::connection::Connection;
use crate::message::{Call, Ready, Reply};

/// A child that answers one call at a time. Dropping it kills it.
pub(crate) struct Child {
    connection: Connection,
    process: OwnedFd,
}

impl Child {
    /// Waits for the first words of a child that was just forked.
    pub(crate) async fn greeted(mut connection: Connection, patience: Duration) -> Result<Self, ProcessorError> {
        let gone = |what: String| ProcessorError::Gone(format!("a child {what}"));
        let ready = timeout(patience, connection.receive::<Ready>()).await;
        let Ready { ready } = ready
            .map_err(|_| gone("does not begin".to_owned()))?
            .map_err(|error| gone(format!("ended at once: {error}")))?;
        let pid = Pid::from_raw(ready).ok_or_else(|| gone("has no number".to_owned()))?;
        // It lives, as it has just spoken and waits for a call: the number is its own.
        let process = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| gone(error.to_string()))?;
        Ok(Self { connection, process })
    }

    /// Whether it is there and waits.
    pub(crate) fn is_idle(&self) -> bool {
        self.connection.is_quiet()
    }

    /// Asks something. After an error other than [`ProcessorError::Refused`] the child is of no use any more.
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
