//! Messages over a Unix socket: a length of four bytes, little-endian, then that many bytes of
//! JSON. A file may come along.

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

/// Beyond the description of any item, and any prompt.
const MOST_BYTES: u32 = 256 << 20;

/// Bytes that are read before more memory is asked for.
const STEP: usize = 1 << 20;

/// One end of a connection.
pub(crate) struct Connection {
    stream: UnixStream,
}

impl Connection {
    /// Our end, and the other one for a process.
    pub(crate) fn pair() -> io::Result<(Self, StdUnixStream)> {
        let (ours, theirs) = StdUnixStream::pair()?;
        ours.set_nonblocking(true)?;
        Ok((Self { stream: UnixStream::from_std(ours)? }, theirs))
    }

    /// Says something, and hands over a file with it.
    pub(crate) async fn send(
        &mut self,
        message: &impl Serialize,
        file: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let mut bytes = vec![0; 4];
        serde_json::to_writer(&mut bytes, message)?;
        let length = u32::try_from(bytes.len() - 4).ok().filter(|&length| length <= MOST_BYTES);
        bytes[..4].copy_from_slice(&length.ok_or(io::ErrorKind::FileTooLarge)?.to_le_bytes());
        let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
        let sent = self
            .stream
            .async_io(Interest::WRITABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut along = SendAncillaryBuffer::new(&mut space);
                if !files.is_empty() {
                    along.push(SendAncillaryMessage::ScmRights(&files));
                }
                Ok(sendmsg(&self.stream, &[IoSlice::new(&bytes)], &mut along, SendFlags::NOSIGNAL)?)
            })
            .await?;
        self.stream.write_all(&bytes[sent..]).await
    }

    /// The next message. Memory is taken as its bytes come.
    pub(crate) async fn receive<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        let length = self.stream.read_u32_le().await?;
        if length > MOST_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let (length, mut bytes) = (length as usize, Vec::new());
        while bytes.len() < length {
            let begin = bytes.len();
            bytes.resize(length.min(begin + STEP), 0);
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

    /// Waits until the other end closes the connection, or sends something unasked.
    pub(crate) async fn is_over(&self) {
        while self.stream.readable().await.is_ok() && self.is_quiet() {}
    }

    /// Returns `true` if the other end has closed the connection, or sent something unasked. Asks
    /// the system, as the runtime may learn of this later.
    pub(crate) fn is_over_now(&self) -> bool {
        let mut polled = [PollFd::new(&self.stream, PollFlags::IN)];
        matches!(poll(&mut polled, Some(&Timespec::default())), Ok(1..))
    }

    /// Whether the other end is there and has nothing to say.
    pub(crate) fn is_quiet(&self) -> bool {
        matches!(self.stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use serde_json::{Value, json};

    use super::*;

    #[tokio::test]
    async fn a_message_arrives_whole_and_its_end_is_noticed() {
        let (mut ours, mut theirs) = Connection::pair().unwrap();
        let long = json!({"text": "x".repeat(3 << 20)});
        let echo = std::thread::spawn(move || {
            let mut length = [0; 4];
            theirs.read_exact(&mut length).unwrap();
            let mut message = vec![0; u32::from_le_bytes(length) as usize];
            theirs.read_exact(&mut message).unwrap();
            theirs.write_all(&length).unwrap();
            theirs.write_all(&message).unwrap();
            theirs
        });
        assert!(ours.is_quiet());
        ours.send(&long, None).await.unwrap();
        assert_eq!(ours.receive::<Value>().await.unwrap(), long);
        let mut theirs = echo.join().unwrap();
        theirs.write_all(&[9, 9, 9, 99]).unwrap();
        assert!(ours.receive::<Value>().await.is_err());
        drop(theirs);
        assert!(ours.receive::<Value>().await.is_err() && !ours.is_quiet());
    }
}
