//! Requests to one worker: connections are reused, and each request is acknowledged before the
//! next. The answer arrives over a connection from the worker.

use std::io;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::PartialMessages;
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::answer::Answer;
use crate::frame::{self, TwoPart};
use crate::response_listener::{ExpectedResponse, ResponseListener};

/// The deadline for a connection to a worker.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// The deadline for a worker's acknowledgement, which it sends before it reads the request.
const ACK_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum number of idle connections.
const MAX_IDLE_CONNECTIONS: usize = 32;
/// The maximum length of the reason with which a worker refuses a request.
const MAX_REFUSAL_BYTES: usize = 4096;

/// An error of a request that was not acknowledged.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    /// The connection failed, and nothing was sent.
    #[error("connecting failed: {0}")]
    NotConnected(io::Error),
    /// The connection failed before the request was acknowledged.
    #[error("the connection was lost: {0}")]
    Lost(#[from] io::Error),
    /// The worker did not acknowledge the request in time.
    #[error("no acknowledgement within {} s", ACK_TIMEOUT.as_secs())]
    Silent,
    /// The worker has no such endpoint, or refuses requests.
    #[error("the worker refused the request: {0}")]
    Refused(String),
    /// The request can't be encoded.
    #[error(transparent)]
    Unwritable(#[from] frame::FrameError),
    /// No listener for the answer can be opened.
    #[error("no listener for the worker's answer: {0}")]
    NoListener(io::Error),
}

impl RequestError {
    /// Returns `true` if the worker can't have begun with the request.
    pub(crate) fn is_unbegun(&self) -> bool {
        match self {
            Self::NotConnected(_)
            | Self::Refused(_)
            | Self::Unwritable(_)
            | Self::NoListener(_) => true,
            Self::Lost(_) | Self::Silent => false,
        }
    }
}

/// The address of a worker's endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Endpoint {
    /// `host:port`.
    pub(crate) address: String,
    /// The worker's name for the endpoint.
    pub(crate) path: String,
}

/// Connections to one worker.
#[derive(Debug)]
pub(crate) struct Wire {
    address: String,
    listener: ResponseListener,
    idle: Mutex<Vec<TcpStream>>,
    /// The unfinished long messages of the worker's answers.
    partial_messages: PartialMessages,
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

/// The empty metadata of a request.
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
    pub(crate) fn new(address: &str, listener: ResponseListener) -> Self {
        Self {
            address: address.to_owned(),
            listener,
            idle: Mutex::default(),
            partial_messages: PartialMessages::default(),
        }
    }

    /// Opens a connection. Also used to check that the worker is alive.
    pub(crate) async fn connect(&self) -> io::Result<TcpStream> {
        let connecting = timeout(CONNECT_TIMEOUT, TcpStream::connect(&self.address));
        let stream = connecting.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// Sends a request to the endpoint at `path`. Returns when the request is acknowledged, long
    /// before its answer begins.
    ///
    /// The worker may have closed an idle connection before the request arrived. If such a
    /// connection ends without an acknowledgement, the request is sent once more, on a fresh
    /// connection. The request may also have crashed the worker, so a failure of the second try is
    /// always [`RequestError::Lost`].
    pub(crate) async fn send(
        &self,
        path: &str,
        id: &str,
        body: &[u8],
    ) -> Result<Answer, RequestError> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Some(idle) = idle else {
            let fresh = self.connect().await.map_err(RequestError::NotConnected)?;
            return self.send_on(fresh, path, id, body).await;
        };
        match self.send_on(idle, path, id, body).await {
            Err(RequestError::Lost(_)) => self.send_on(self.connect().await?, path, id, body).await,
            result => result,
        }
    }

    async fn send_on(
        &self,
        mut stream: TcpStream,
        path: &str,
        id: &str,
        body: &[u8],
    ) -> Result<Answer, RequestError> {
        let from: IpAddr = stream.local_addr()?.ip().to_canonical();
        let expected = self.listener.expect(from).await.map_err(RequestError::NoListener)?;
        let payload = TwoPart::encode(&control(id, &expected), body);
        let request = frame::request(path, &payload)?;
        drop(payload);
        let refusal = timeout(ACK_TIMEOUT, exchange(&mut stream, &request))
            .await
            .map_err(|_| RequestError::Silent)??;
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE_CONNECTIONS {
            idle.push(stream);
        }
        drop(idle);
        match refusal {
            None => Ok(Answer::new(expected, &self.partial_messages)),
            Some(reason) => Err(RequestError::Refused(reason)),
        }
    }
}

fn control(id: &str, expected: &ExpectedResponse) -> Vec<u8> {
    let ExpectedResponse { subject, address, .. } = expected;
    let info = Info { address: address.to_string(), subject, context: id, stream_type: "response" };
    // Both values have only strings from this process, so serializing does not fail.
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

/// Sends a request and reads its acknowledgement. Returns the worker's reason if it refuses.
async fn exchange(stream: &mut TcpStream, request: &[u8]) -> io::Result<Option<String>> {
    stream.write_all(request).await?;
    let length = stream.read_u32().await? as usize;
    if length == 0 {
        return Ok(None);
    }
    if length > MAX_REFUSAL_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "an acknowledgement is too long"));
    }
    let mut reason = vec![0; length];
    stream.read_exact(&mut reason).await?;
    Ok(Some(String::from_utf8_lossy(&reason).into_owned()))
}
