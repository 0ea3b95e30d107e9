//! A frontend's side: the connection to an agent, and its engines as backends.

mod backend;
mod connecting;
mod connector;
mod images;
mod jobs;
mod lending;
mod running;
mod sending;
mod shared;
mod watching;

use std::net::IpAddr;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use chiasm_backend::{Death, ItemField};
use chiasm_kv::KeySecret;
use chiasm_types::MmHash;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

use crate::proto::agent_client::AgentClient;
use crate::proto::{
    DrainRequest, HelloReply, HelloRequest, MediaChunk, StatusReply, StatusRequest,
};
use crate::tensors;
use crate::tls::AgentTls;
use crate::{ANSWER_WITHIN, ASK_EVERY, CHUNK, MOST_MESSAGE_BYTES, PROTOCOLS, SENT_WITHIN};

use connecting::Connecting;
pub use connector::AgentConnector;
pub use images::AgentMedia;
use images::AgentWork;
pub use lending::Lending;
#[cfg(test)]
pub(crate) use sending::OwnMemory;

/// Bytes that an agent may have under way on a stream, and on a connection: what a network of 10
/// Gbit/s carries in some milliseconds.
pub(crate) const STREAM_WINDOW: u32 = 2 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;

/// How long an agent's machine may take to accept a connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(3);
/// How long an agent may take to answer what takes it no time.
const HELLO_WITHIN: Duration = Duration::from_secs(5);

/// This frontend, in this start of it.
static FRONTEND: LazyLock<u64> = LazyLock::new(rand::random);

/// Connections to one agent, made when they are needed and again after they were lost: no token
/// waits behind a file, or behind what there is to be told of a KV cache.
#[derive(Clone, Debug)]
pub struct AgentLink {
    address: Arc<str>,
    ip: Option<IpAddr>,
    /// Names this frontend among those of the agent.
    frontend: u64,
    connecting: Connecting,
    jobs: AgentClient<Channel>,
    watches: AgentClient<Channel>,
    files: AgentClient<Channel>,
    work: Arc<AgentWork>,
    lending: Lending,
}

/// What an agent says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// How many engines it has, numbered from 0.
    pub engines: u32,
    /// Tells this start of this agent from all others, whatever address it is reached at.
    pub incarnation: u64,
}

/// Whether an agent's engines are used, for whoever watches over it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AgentStatus {
    /// How many engines it has.
    pub engines: u32,
    /// How many of them are given jobs by at least one frontend.
    pub admitted: u32,
    /// Whether it refuses new jobs.
    pub draining: bool,
}

/// Why there is no link to an agent.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The address is none.
    #[error("'{0}' is no address of an agent: expected host:port")]
    Address(String),
    /// The agent can't be reached.
    #[error("the agent at {address} can't be reached: {reason}")]
    Unreachable {
        /// Where it should be.
        address: Arc<str>,
        /// Why not.
        reason: String,
    },
    /// The agent does not want this frontend.
    #[error("the agent at {address} refuses: {reason}")]
    Refused {
        /// Where it is.
        address: Arc<str>,
        /// Its words.
        reason: String,
    },
}

impl AgentLink {
    /// A link to the agent at `host:port`, with TLS or in plain text. Nothing is connected yet.
    /// Needs a Tokio runtime.
    ///
    /// # Errors
    /// [`LinkError::Address`].
    pub fn new(address: &str, tls: Option<Arc<AgentTls>>) -> Result<Self, LinkError> {
        let wrong = || LinkError::Address(address.to_owned());
        let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
        if host.is_empty() || port.parse::<u16>().is_err() {
            return Err(wrong());
        }
        // TLS is the connector's.
        let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|_| wrong())?;
        let endpoint = endpoint
            .connect_timeout(CONNECT_WITHIN)
            .http2_keep_alive_interval(ASK_EVERY)
            .keep_alive_timeout(ANSWER_WITHIN)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW);
        let connecting = Connecting::new(tls);
        let client = || {
            AgentClient::new(endpoint.connect_with_connector_lazy(connecting.clone()))
                .max_decoding_message_size(MOST_MESSAGE_BYTES)
                .max_encoding_message_size(MOST_MESSAGE_BYTES)
        };
        let ip = host.trim_matches(['[', ']']).parse().ok();
        Ok(Self {
            address: address.into(),
            ip,
            frontend: *FRONTEND,
            connecting: connecting.clone(),
            jobs: client(),
            watches: client(),
            files: client(),
            work: Arc::default(),
            lending: Lending::default(),
        })
    }

    /// Lends the agent tensors in place of sending them, where it reads them.
    #[must_use]
    pub fn with_lending(self, lending: &Lending) -> Self {
        Self { lending: lending.for_one_agent(), ..self }
    }

    /// Where the agent is.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Asks the agent what it is, once it and this frontend have found that they understand each
    /// other.
    ///
    /// # Errors
    /// [`LinkError::Unreachable`] and [`LinkError::Refused`].
    pub async fn greet(&self) -> Result<Greeting, LinkError> {
        let HelloReply { engines, incarnation, reads_tensors, .. } = self.hello().await?;
        self.lending.set_read(reads_tensors);
        Ok(Greeting { engines, incarnation })
    }

    /// Has the agent refuse new jobs, or take them again. How many run.
    ///
    /// # Errors
    /// Those of [`AgentLink::greet`].
    pub async fn drain(&self, draining: bool) -> Result<u64, LinkError> {
        let mut jobs = self.jobs.clone();
        let call = async move { jobs.drain(DrainRequest { draining }).await };
        self.answered(call).await.map(|reply| reply.running)
    }

    /// Asks the agent how it is.
    ///
    /// # Errors
    /// Those of [`AgentLink::greet`].
    pub async fn status(&self) -> Result<AgentStatus, LinkError> {
        let mut jobs = self.jobs.clone();
        let StatusReply { engines, admitted, draining } =
            self.answered(async move { jobs.status(StatusRequest {}).await }).await?;
        Ok(AgentStatus { engines, admitted, draining })
    }

    /// What calls go over, and files.
    #[cfg(test)]
    pub(crate) fn clients(&self) -> (AgentClient<Channel>, AgentClient<Channel>) {
        (self.jobs.clone(), self.files.clone())
    }

    async fn hello(&self) -> Result<HelloReply, LinkError> {
        let request = HelloRequest {
            oldest_protocol: *PROTOCOLS.start(),
            newest_protocol: *PROTOCOLS.end(),
            key_secret_fingerprint: Bytes::copy_from_slice(&KeySecret::of_process().fingerprint()),
        };
        let mut jobs = self.jobs.clone();
        self.answered(async move { jobs.hello(request).await }).await
    }

    /// The answer to a call that takes no time.
    async fn answered<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, LinkError> {
        let unreachable =
            |reason: String| LinkError::Unreachable { address: self.address.clone(), reason };
        match tokio::time::timeout(HELLO_WITHIN, call).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) if status.code() == Code::FailedPrecondition => {
                Err(LinkError::Refused {
                    address: self.address.clone(),
                    reason: status.message().to_owned(),
                })
            }
            Ok(Err(status)) => Err(unreachable(
                self.connecting.mistake().map_or_else(|| words(&status), str::to_owned),
            )),
            Err(_) => Err(unreachable(format!("it says nothing for {} s", HELLO_WITHIN.as_secs()))),
        }
    }

    /// Sends a file that the agent lacks.
    async fn put(&self, content: [u8; 32], modality: &str, file: Bytes) -> Result<(), Status> {
        let (length, modality) = (file.len() as u64, modality.to_owned());
        let mut rest = file;
        let mut is_first = true;
        let chunks = std::iter::from_fn(move || {
            if rest.is_empty() && !is_first {
                return None;
            }
            let bytes = rest.split_to(rest.len().min(CHUNK));
            let chunk = match is_first {
                true => {
                    let content = Bytes::copy_from_slice(&content);
                    MediaChunk { content, length, modality: modality.clone(), bytes }
                }
                false => MediaChunk { bytes, ..MediaChunk::default() },
            };
            is_first = false;
            Some(chunk)
        });
        let mut files = self.files.clone();
        sent(files.put_media(tokio_stream::iter(chunks))).await
    }

    /// Sends an item's tensors, which the agent can't make.
    async fn put_tensors(&self, hash: &MmHash, fields: &[ItemField]) -> Result<(), Status> {
        let mut files = self.files.clone();
        sent(files.put_tensors(tokio_stream::iter(tensors::to_messages(hash, fields)))).await
    }
}

/// Waits for the end of a transfer, for as long as one may take.
async fn sent<T>(put: impl Future<Output = Result<T, Status>>) -> Result<(), Status> {
    match tokio::time::timeout(SENT_WITHIN, put).await {
        Ok(put) => put.map(drop),
        Err(_) => Err(Status::deadline_exceeded(format!("it took {} s", SENT_WITHIN.as_secs()))),
    }
}

/// What a failed call says, for people.
fn words(status: &Status) -> String {
    // The innermost one says it in the plainest words.
    let cause =
        std::iter::successors(std::error::Error::source(status), |cause| cause.source()).last();
    let cause = cause.map(ToString::to_string).filter(|cause| !status.message().contains(cause));
    match (status.message(), cause) {
        (message, Some(cause)) => format!("{message}: {cause}"),
        ("", None) => format!("{:?}", status.code()),
        (message, None) => message.to_owned(),
    }
}

/// The end of an engine whose agent's connection failed. Clients may read it, so it has no address:
/// logs name the worker beside it.
fn lost(status: &Status) -> Death {
    Death::new(format!("the connection to its agent was lost: {}", words(status)))
}
