//! Where a socket listens, or connects to.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

/// The two directions of a connection.
pub(crate) type Reading = Box<dyn AsyncRead + Send + Sync + Unpin>;
pub(crate) type Writing = Box<dyn AsyncWrite + Send + Sync + Unpin>;

pub(crate) enum Listener {
    Tcp(TcpListener),
    /// The file goes before the socket, which keeps its inode from being another file's.
    Unix(SocketFile, UnixListener),
}

/// The file of a Unix socket, which nothing else removes.
pub(crate) struct SocketFile {
    path: PathBuf,
    /// Tells it from one that a successor has made in its place.
    inode: u64,
}

impl SocketFile {
    fn at(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), inode: fs::symlink_metadata(path)?.ino() })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|file| file.ino() == self.inode)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::debug!(path = %self.path.display(), %error, "the file of a socket was not removed");
        }
    }
}

/// A connection, before anything has been said.
pub(crate) struct Stream {
    pub(crate) reading: Reading,
    pub(crate) writing: Writing,
    /// The other side; none for a Unix socket.
    pub(crate) peer: Option<IpAddr>,
}

/// A place as its address names it.
enum Place<'a> {
    /// Host and port.
    Tcp(&'a str),
    Unix(&'a Path),
}

impl<'a> Place<'a> {
    fn of(address: &'a str) -> io::Result<Self> {
        if let Some(place) = address.strip_prefix("tcp://") {
            return Ok(Self::Tcp(place));
        }
        let path = address.strip_prefix("ipc://").ok_or_else(|| {
            let expected =
                format!("{address} is no address of a socket, use tcp://host:port or ipc://path");
            io::Error::new(io::ErrorKind::InvalidInput, expected)
        })?;
        Ok(Self::Unix(Path::new(path)))
    }
}

impl Listener {
    pub(crate) async fn bind(address: &str) -> io::Result<Self> {
        Ok(match Place::of(address)? {
            Place::Tcp(place) => Self::Tcp(TcpListener::bind(place).await?),
            Place::Unix(path) => {
                let listener = UnixListener::bind(path)?;
                Self::Unix(SocketFile::at(path)?, listener)
            }
        })
    }

    /// The address as bound, in the form that peers are given.
    pub(crate) fn address(&self) -> io::Result<String> {
        match self {
            Self::Tcp(listener) => Ok(format!("tcp://{}", listener.local_addr()?)),
            Self::Unix(file, _) => Ok(format!("ipc://{}", file.path.display())),
        }
    }

    pub(crate) async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(listener) => {
                let (stream, from) = listener.accept().await?;
                Stream::tcp(stream, from)
            }
            Self::Unix(_, listener) => Ok(Stream::unix(listener.accept().await?.0)),
        }
    }
}

impl Stream {
    pub(crate) async fn connect(address: &str) -> io::Result<Self> {
        match Place::of(address)? {
            Place::Tcp(place) => {
                let stream = TcpStream::connect(place).await?;
                let to = stream.peer_addr()?;
                Self::tcp(stream, to)
            }
            Place::Unix(path) => UnixStream::connect(path).await.map(Self::unix),
        }
    }

    fn tcp(stream: TcpStream, peer: SocketAddr) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let (reading, writing) = stream.into_split();
        let peer = Some(peer.ip().to_canonical());
        Ok(Self { reading: Box::new(reading), writing: Box::new(writing), peer })
    }

    fn unix(stream: UnixStream) -> Self {
        let (reading, writing) = stream.into_split();
        Self { reading: Box::new(reading), writing: Box::new(writing), peer: None }
    }
}
