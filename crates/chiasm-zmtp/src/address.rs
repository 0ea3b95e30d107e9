//! The addresses of sockets, with listeners and streams over TCP and Unix sockets.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

/// The reading half of a connection.
pub(crate) type Reader = Box<dyn AsyncRead + Send + Sync + Unpin>;
/// The writing half of a connection.
pub(crate) type Writer = Box<dyn AsyncWrite + Send + Sync + Unpin>;

/// A listening socket.
pub(crate) enum Listener {
    Tcp(TcpListener),
    /// The file is removed before the socket is closed: the open socket keeps another file from
    /// reusing its inode.
    Unix(SocketFile, UnixListener),
}

/// The file of a Unix socket, removed on drop. The system does not remove it.
pub(crate) struct SocketFile {
    path: PathBuf,
    /// Distinguishes the file from one that a later process has created at the same path.
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
            tracing::debug!(
                path = %self.path.display(),
                %error,
                "the file of a socket was not removed"
            );
        }
    }
}

/// A connection before its handshake.
pub(crate) struct Stream {
    pub(crate) reader: Reader,
    pub(crate) writer: Writer,
    /// The peer's address; `None` for a Unix socket.
    pub(crate) peer: Option<IpAddr>,
}

/// A parsed address.
enum Endpoint<'a> {
    /// Host and port.
    Tcp(&'a str),
    Unix(&'a Path),
}

impl<'a> Endpoint<'a> {
    fn parse(address: &'a str) -> io::Result<Self> {
        if let Some(host_and_port) = address.strip_prefix("tcp://") {
            return Ok(Self::Tcp(host_and_port));
        }
        let path = address.strip_prefix("ipc://").ok_or_else(|| {
            let expected =
                format!("{address} is not a socket address; use tcp://host:port or ipc://path");
            io::Error::new(io::ErrorKind::InvalidInput, expected)
        })?;
        Ok(Self::Unix(Path::new(path)))
    }
}

impl Listener {
    pub(crate) async fn bind(address: &str) -> io::Result<Self> {
        Ok(match Endpoint::parse(address)? {
            Endpoint::Tcp(host_and_port) => Self::Tcp(TcpListener::bind(host_and_port).await?),
            Endpoint::Unix(path) => {
                let listener = UnixListener::bind(path)?;
                Self::Unix(SocketFile::at(path)?, listener)
            }
        })
    }

    /// Returns the bound address, in the form that peers need to connect.
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
        match Endpoint::parse(address)? {
            Endpoint::Tcp(host_and_port) => {
                let stream = TcpStream::connect(host_and_port).await?;
                let to = stream.peer_addr()?;
                Self::tcp(stream, to)
            }
            Endpoint::Unix(path) => UnixStream::connect(path).await.map(Self::unix),
        }
    }

    fn tcp(stream: TcpStream, peer: SocketAddr) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let (reader, writer) = stream.into_split();
        let peer = Some(peer.ip().to_canonical());
        Ok(Self { reader: Box::new(reader), writer: Box::new(writer), peer })
    }

    fn unix(stream: UnixStream) -> Self {
        let (reader, writer) = stream.into_split();
        Self { reader: Box::new(reader), writer: Box::new(writer), peer: None }
    }
}
