//! Messages over a Unix socket: a length of four bytes, little-endian, then that many bytes of
//! JSON. A message may carry a file descriptor.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream as StdUnixStream;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;

/// The maximum length of a message. Every item and prompt needs less.
const MAX_MESSAGE_BYTES: u32 = 256 << 20;

/// The number of bytes that are read before the buffer grows again.
const READ_CHUNK_BYTES: usize = 1 << 20;

/// One end of a connection.
pub(crate) struct Connection {
    stream: UnixStream,
}

impl Connection {
    /// Creates a connection. Returns this process's end, and the end for another process.
    pub(crate) fn pair() -> io::Result<(Self, StdUnixStream)> {
        let (local, remote) = StdUnixStream::pair()?;
        local.set_nonblocking(true)?;
        Ok((Self { stream: UnixStream::from_std(local)? }, remote))
    }

    /// Sends a message, and a file descriptor with it if there is one.
    pub(crate) async fn send(
        &mut self,
        message: &impl Serialize,
        file: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let mut bytes = vec![0; 4];
        serde_json::to_writer(&mut bytes, message)?;
        let length =
            u32::try_from(bytes.len() - 4).ok().filter(|&length| length <= MAX_MESSAGE_BYTES);
        bytes[..4].copy_from_slice(&length.ok_or(io::ErrorKind::FileTooLarge)?.to_le_bytes());
        let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
        let sent = self
            .stream
            .async_io(Interest::WRITABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut ancillary = SendAncillaryBuffer::new(&mut space);
                if !files.is_empty() {
                    ancillary.push(SendAncillaryMessage::ScmRights(&files));
                }
                let slices = [IoSlice::new(&bytes)];
                Ok(sendmsg(&self.stream, &slices, &mut ancillary, SendFlags::NOSIGNAL)?)
            })
            .await?;
        self.stream.write_all(&bytes[sent..]).await
    }

    /// Receives the next message. The buffer grows as bytes arrive, not by the announced length.
    pub(crate) async fn receive<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        let length = self.stream.read_u32_le().await?;
        if length > MAX_MESSAGE_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let length = length as usize;
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let begin = bytes.len();
            bytes.resize(length.min(begin + READ_CHUNK_BYTES), 0);
            self.stream.read_exact(&mut bytes[begin..]).await?;
        }
        serde_json::from_slice(&bytes)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Duplicates the connection, so that one task can wait for its end while others write to it.
    pub(crate) fn duplicate(&self) -> io::Result<Self> {
        let stream = StdUnixStream::from(self.stream.as_fd().try_clone_to_owned()?);
        Ok(Self { stream: UnixStream::from_std(stream)? })
    }

    /// Waits until the other end closes the connection or sends an unexpected message.
    pub(crate) async fn wait_finished(&self) {
        while self.stream.readable().await.is_ok() && self.is_quiet() {}
    }

    /// Returns `true` if the other end has closed the connection or sent an unexpected message.
    /// Polls the system, as the runtime may notice later.
    pub(crate) fn is_finished(&self) -> bool {
        let mut polled = [PollFd::new(&self.stream, PollFlags::IN)];
        matches!(poll(&mut polled, Some(&Timespec::default())), Ok(1..))
    }

    /// Returns `true` if the connection is open and nothing was received on it.
    pub(crate) fn is_quiet(&self) -> bool {
        let received = self.stream.try_read(&mut [0]);
        received.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use serde_json::{Value, json};

    use super::*;

    #[tokio::test]
    async fn connection_carries_long_messages_until_closed() {
        let (mut local, mut remote) = Connection::pair().unwrap();
        let long = json!({"text": "x".repeat(3 << 20)});
        let echo = std::thread::spawn(move || {
            let mut length = [0; 4];
            remote.read_exact(&mut length).unwrap();
            let mut message = vec![0; u32::from_le_bytes(length) as usize];
            remote.read_exact(&mut message).unwrap();
            remote.write_all(&length).unwrap();
            remote.write_all(&message).unwrap();
            remote
        });
        assert!(local.is_quiet());
        local.send(&long, None).await.unwrap();
        assert_eq!(local.receive::<Value>().await.unwrap(), long);
        let mut remote = echo.join().unwrap();
        remote.write_all(&[9, 9, 9, 99]).unwrap();
        assert!(local.receive::<Value>().await.is_err());
        drop(remote);
        assert!(local.receive::<Value>().await.is_err() && !local.is_quiet());
    }
}
