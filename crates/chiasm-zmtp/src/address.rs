//! Where a socket listens.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};

/// The two directions of a connection.
pub(crate) type Reading = Box<dyn AsyncRead + Send + Sync + Unpin>;
pub(crate) type Writing = Box<dyn AsyncWrite + Send + Sync + Unpin>;

pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, SocketFile),
}

/// The file of a Unix socket, which nothing else removes.
pub(crate) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0) {
            tracing::debug!(path = %self.0.display(), %error, "the file of a socket was not removed");
        }
    }
}

/// A connection, before anything has been said.
pub(crate) struct Stream {
    pub(crate) reading: Reading,
    pub(crate) writing: Writing,
    /// Where it comes from; none for a Unix socket.
    pub(crate) from: Option<IpAddr>,
}

impl Listener {
    /// Listens at `tcp://host:port` or `ipc://path`.
    pub(crate) async fn bind(address: &str) -> io::Result<Self> {
        if let Some(place) = address.strip_prefix("tcp://") {
            return Ok(Self::Tcp(TcpListener::bind(place).await?));
        }
        let Some(path) = address.strip_prefix("ipc://") else {
            let expected = format!("{address} is no address of a socket, use tcp://host:port or ipc://path");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, expected));
        };
        Ok(Self::Unix(UnixListener::bind(path)?, SocketFile(Path::new(path).to_owned())))
    }

    /// The address as bound, in the form that peers are given.
    pub(crate) fn address(&self) -> io::Result<String> {
        match self {
            Self::Tcp(listener) => Ok(format!("tcp://{}", listener.local_addr()?)),
            Self::Unix(_, SocketFile(path)) => Ok(format!("ipc://{}", path.display())),
        }
    }

    pub(crate) async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(listener) => {
                let (stream, from) = listener.accept().await?;
                stream.set_nodelay(true)?;
                let (reading, writing) = stream.into_split();
                let from = Some(from.ip().to_canonical());
                Ok(Stream { reading: Box::new(reading), writing: Box::new(writing), from })
            }
            Self::Unix(listener, _) => {
                let (reading, writing) = listener.accept().await?.0.into_split();
                Ok(Stream { reading: Box::new(reading), writing: Box::new(writing), from: None })
            }
        }
    }
}
