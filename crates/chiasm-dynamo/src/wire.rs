//! Requests to one worker: connections that are used again, each request acknowledged before the
//! next, and its answer called home.

use std::io;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::Begun;
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::answer::Answer;
use crate::call_home::{CallHome, Expected};
use crate::frame::{self, TwoPart};

/// The deadline for a connection to a worker.
const CONNECTED_WITHIN: Duration = Duration::from_secs(3);
/// The deadline for a worker's acknowledgement, which it sends before it looks at the request.
const TAKEN_WITHIN: Duration = Duration::from_secs(10);
/// Connections that are kept for later.
const MOST_IDLE: usize = 32;
/// Bytes of the words with which a worker refuses.
const MOST_WORDS: usize = 4096;

/// An error of a request that was not acknowledged.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AskError {
    /// Nobody listens there.
    #[error("it can't be connected to: {0}")]
    NotConnected(io::Error),
    /// The connection failed before the request was acknowledged.
    #[error("the connection was lost: {0}")]
    Lost(#[from] io::Error),
    /// Nothing comes back.
    #[error("it does not acknowledge a request within {} s", TAKEN_WITHIN.as_secs())]
    Silent,
    /// It is somebody who has no such endpoint, or takes nothing.
    #[error("it answers: {0}")]
    Refused(String),
    /// The request can't be written in the plane's form.
    #[error(transparent)]
    Unwritable(#[from] frame::FrameError),
    /// Its answer can't be called home to here.
    #[error("no calls of workers can be taken here: {0}")]
    NoHome(io::Error),
}

impl AskError {
    /// Returns `true` if the worker can't have begun with the request.
    pub(crate) fn is_unbegun(&self) -> bool {
        match self {
            Self::NotConnected(_) | Self::Refused(_) | Self::Unwritable(_) | Self::NoHome(_) => {
                true
            }
            Self::Lost(_) | Self::Silent => false,
        }
    }
}

/// The place of a worker's endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    /// `host:port`.
    pub(crate) address: String,
    /// The worker's name for the endpoint.
    pub(crate) path: String,
}

/// Connections to one worker.
#[derive(Debug)]
pub(crate) struct Wire {
    address: String,
    home: CallHome,
    idle: Mutex<Vec<TcpStream>>,
    /// The unfinished long messages of its answers.
    begun: Begun,
}

/// The header before a request's body (`RequestControlMessage` of Dynamo).
#[derive(Serialize)]
struct Control<'a> {
    id: &'a str,
    request_type: &'static str,
    response_type: &'static str,
    payload_codec: &'static str,
    connection_info: ConnectionInfo,
    metadata: Metadata,
}

/// None.
#[derive(Serialize)]
struct Metadata {}

#[derive(Serialize)]
struct ConnectionInfo {
    transport: &'static str,
    info: String,
}

#[derive(Serialize)]
struct Info<'a> {
    address: String,
    subject: &'a str,
    context: &'a str,
    stream_type: &'static str,
}

impl Wire {
    pub(crate) fn new(address: &str, home: CallHome) -> Self {
        Self { address: address.to_owned(), home, idle: Mutex::default(), begun: Begun::default() }
    }

    /// Opens a connection, also to check that the worker is there.
    pub(crate) async fn connect(&self) -> io::Result<TcpStream> {
        let connecting = timeout(CONNECTED_WITHIN, TcpStream::connect(&self.address));
        let stream = connecting.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// Sends a request to the endpoint at `path`. Returns when it is acknowledged, long before its
    /// answer begins.
    ///
    /// A kept connection may have been closed before the request arrived. If it ends without an
    /// acknowledgement, the request is sent once more, on a fresh connection. The worker may also
    /// have died of the request, so the failure of the second try is always [`AskError::Lost`].
    pub(crate) async fn ask(&self, path: &str, id: &str, body: &[u8]) -> Result<Answer, AskError> {
        let kept = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Some(kept) = kept else {
            let fresh = self.connect().await.map_err(AskError::NotConnected)?;
            return self.ask_on(fresh, path, id, body).await;
        };
        match self.ask_on(kept, path, id, body).await {
            Err(AskError::Lost(_)) => self.ask_on(self.connect().await?, path, id, body).await,
            asked => asked,
        }
    }

    async fn ask_on(
        &self,
        mut stream: TcpStream,
        path: &str,
        id: &str,
        body: &[u8],
    ) -> Result<Answer, AskError> {
        let from: IpAddr = stream.local_addr()?.ip().to_canonical();
        let expected = self.home.expect(from).await.map_err(AskError::NoHome)?;
        let payload = TwoPart::encode(&control(id, &expected), body);
        let request = frame::request(path, &payload)?;
        drop(payload);
        let words = timeout(TAKEN_WITHIN, exchange(&mut stream, &request))
            .await
            .map_err(|_| AskError::Silent)??;
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MOST_IDLE {
            idle.push(stream);
        }
        drop(idle);
        match words {
            None => Ok(Answer::new(expected, &self.begun)),
            Some(words) => Err(AskError::Refused(words)),
        }
    }
}

fn control(id: &str, expected: &Expected) -> Vec<u8> {
    let Expected { subject, address, .. } = expected;
    let info = Info { address: address.to_string(), subject, context: id, stream_type: "response" };
    // Strings of ours: nothing in it can fail.
    let info = serde_json::to_string(&info).unwrap_or_default();
    let control = Control {
        id,
        request_type: "single_in",
        response_type: "many_out",
        payload_codec: "msgpack",
        connection_info: ConnectionInfo { transport: "tcp_server", info },
        metadata: Metadata {},
    };
    serde_json::to_vec(&control).unwrap_or_default()
}

/// Sends a request. Returns the worker's words if it refuses the request.
async fn exchange(stream: &mut TcpStream, request: &[u8]) -> io::Result<Option<String>> {
    stream.write_all(request).await?;
    let length = stream.read_u32().await? as usize;
    if length == 0 {
        return Ok(None);
    }
    if length > MOST_WORDS {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "an acknowledgement is too long"));
    }
    let mut words = vec![0; length];
    stream.read_exact(&mut words).await?;
    Ok(Some(String::from_utf8_lossy(&words).into_owned()))
}
