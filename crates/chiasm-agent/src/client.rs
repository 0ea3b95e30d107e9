//! The frontend's side: the connection to an agent, and the agent's engines as backends.

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
use chiasm_backend::{DeathReason, ItemField, VideoPart};
use chiasm_kv::KeySecret;
use chiasm_types::MmHash;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

use crate::proto::agent_client::AgentClient;
use crate::proto::{
    DrainRequest, HelloReply, HelloRequest, MediaChunk, StatusReply, StatusRequest,
};
use crate::tls::AgentTls;
use crate::{
    CHUNK_BYTES, KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT, MAX_MESSAGE_BYTES, PROTOCOL_VERSIONS,
    TRANSFER_TIMEOUT,
};
use crate::{cuts, tensors};

use connecting::Dialer;
pub use connector::AgentConnector;
pub use images::AgentMedia;
use images::AgentWork;
pub use lending::Lending;
#[cfg(test)]
pub(crate) use sending::OwnMemory;

/// The flow-control window of a stream, in bytes: what a network of 10 Gbit/s carries in some
/// milliseconds.
pub(crate) const STREAM_WINDOW_BYTES: u32 = 2 << 20;
/// The flow-control window of a connection, in bytes.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;

/// The timeout for connecting to an agent's machine.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// The timeout for calls that an agent answers at once.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// The id of this start of this frontend.
static FRONTEND: LazyLock<u64> = LazyLock::new(rand::random);

/// Connections to one agent, which are made on demand and again after they are lost.
///
/// Jobs, watches and files have connections of their own, so that no token waits behind a file or
/// behind KV cache updates.
#[derive(Clone, Debug)]
pub struct AgentLink {
    address: Arc<str>,
    ip: Option<IpAddr>,
    /// The id of this frontend among those of the agent.
    frontend: u64,
    dialer: Dialer,
    jobs: AgentClient<Channel>,
    watches: AgentClient<Channel>,
    files: AgentClient<Channel>,
    work: Arc<AgentWork>,
    lending: Lending,
}

/// An agent's answer to the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// The number of the agent's engines, which are numbered from 0.
    pub engines: u32,
    /// The id of this start of the agent, whatever address it is reached at.
    pub incarnation: u64,
}

/// The status of an agent, for monitoring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AgentStatus {
    /// The number of the agent's engines.
    pub engines: u32,
    /// The number of engines that at least one frontend has admitted.
    pub admitted: u32,
    /// `true` if the agent refuses new jobs.
    pub draining: bool,
}

/// An error of a link to an agent.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The text is not an address.
    #[error("'{0}' is not the address of an agent: expected host:port")]
    Address(String),
    /// The agent can't be reached.
    #[error("the agent at {address} can't be reached: {reason}")]
    Unreachable {
        /// The agent's address.
        address: Arc<str>,
        /// The error.
        reason: String,
    },
    /// The agent refuses this frontend.
    #[error("the agent at {address} refuses this frontend: {reason}")]
    Refused {
        /// The agent's address.
        address: Arc<str>,
        /// The agent's message.
        reason: String,
    },
}

impl AgentLink {
    /// Creates a link to the agent at `host:port`, with TLS or in plain text. Connects on first
    /// use. Needs a Tokio runtime.
    ///
    /// # Errors
    /// [`LinkError::Address`].
    pub fn new(address: &str, tls: Option<Arc<AgentTls>>) -> Result<Self, LinkError> {
        let invalid = || LinkError::Address(address.to_owned());
        let (host, port) = address.rsplit_once(':').ok_or_else(invalid)?;
        if host.is_empty() || port.parse::<u16>().is_err() {
            return Err(invalid());
        }
        // The dialer adds TLS.
        let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|_| invalid())?;
        let endpoint = endpoint
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
            .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
        let dialer = Dialer::new(tls);
        let client = || {
            AgentClient::new(endpoint.connect_with_connector_lazy(dialer.clone()))
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(MAX_MESSAGE_BYTES)
        };
        let ip = host.trim_matches(['[', ']']).parse().ok();
        Ok(Self {
            address: address.into(),
            ip,
            frontend: *FRONTEND,
            dialer: dialer.clone(),
            jobs: client(),
            watches: client(),
            files: client(),
            work: Arc::default(),
            lending: Lending::default(),
        })
    }

    /// Lends tensors to the agent instead of sending them, if the agent reads them.
    #[must_use]
    pub fn with_lending(self, lending: &Lending) -> Self {
        Self { lending: lending.for_one_agent(), ..self }
    }

    /// Returns the agent's address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Performs the handshake with the agent: checks that both sides understand each other.
    ///
    /// # Errors
    /// [`LinkError::Unreachable`] and [`LinkError::Refused`].
    pub async fn greet(&self) -> Result<Greeting, LinkError> {
        let HelloReply { engines, incarnation, reads_tensors, .. } = self.hello().await?;
        self.lending.set_agent_reads(reads_tensors);
        Ok(Greeting { engines, incarnation })
    }

    /// Makes the agent refuse new jobs, or accept them again. Returns the number of running jobs.
    ///
    /// # Errors
    /// The errors of [`AgentLink::greet`].
    pub async fn drain(&self, draining: bool) -> Result<u64, LinkError> {
        let mut jobs = self.jobs.clone();
        let call = async move { jobs.drain(DrainRequest { draining }).await };
        self.call(call).await.map(|reply| reply.running)
    }

    /// Returns the agent's status.
    ///
    /// # Errors
    /// The errors of [`AgentLink::greet`].
    pub async fn status(&self) -> Result<AgentStatus, LinkError> {
        let mut jobs = self.jobs.clone();
        let StatusReply { engines, admitted, draining } =
            self.call(async move { jobs.status(StatusRequest {}).await }).await?;
        Ok(AgentStatus { engines, admitted, draining })
    }

    /// Returns the clients for calls and for files.
    #[cfg(test)]
    pub(crate) fn clients(&self) -> (AgentClient<Channel>, AgentClient<Channel>) {
        (self.jobs.clone(), self.files.clone())
    }

    async fn hello(&self) -> Result<HelloReply, LinkError> {
        let request = HelloRequest {
            oldest_protocol: *PROTOCOL_VERSIONS.start(),
            newest_protocol: *PROTOCOL_VERSIONS.end(),
            key_secret_fingerprint: Bytes::copy_from_slice(&KeySecret::for_process().fingerprint()),
        };
        let mut jobs = self.jobs.clone();
        self.call(async move { jobs.hello(request).await }).await
    }

    /// Waits for the answer to a call that the agent answers at once.
    async fn call<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, LinkError> {
        let unreachable =
            |reason: String| LinkError::Unreachable { address: self.address.clone(), reason };
        match tokio::time::timeout(CALL_TIMEOUT, call).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) if status.code() == Code::FailedPrecondition => {
                Err(LinkError::Refused {
                    address: self.address.clone(),
                    reason: status.message().to_owned(),
                })
            }
            Ok(Err(status)) => Err(unreachable(
                self.dialer.tls_mismatch().map_or_else(|| describe(&status), str::to_owned),
            )),
            Err(_) => Err(unreachable(format!("no answer within {} s", CALL_TIMEOUT.as_secs()))),
        }
    }

    /// Sends a file that the agent lacks.
    async fn put_file(&self, content: [u8; 32], modality: &str, file: Bytes) -> Result<(), Status> {
        let length = file.len() as u64;
        let modality = modality.to_owned();
        let mut rest = file;
        let mut is_first = true;
        let chunks = std::iter::from_fn(move || {
            if rest.is_empty() && !is_first {
                return None;
            }
            let bytes = rest.split_to(rest.len().min(CHUNK_BYTES));
            let chunk = if is_first {
                let content = Bytes::copy_from_slice(&content);
                MediaChunk { content, length, modality: modality.clone(), bytes }
            } else {
                MediaChunk { bytes, ..MediaChunk::default() }
            };
            is_first = false;
            Some(chunk)
        });
        let mut files = self.files.clone();
        wait_for_transfer(files.put_media(tokio_stream::iter(chunks))).await
    }

    /// Sends an item's tensors.
    async fn put_tensors(&self, hash: &MmHash, fields: &[ItemField]) -> Result<(), Status> {
        let mut files = self.files.clone();
        let chunks = tokio_stream::iter(tensors::to_messages(hash, fields));
        wait_for_transfer(files.put_tensors(chunks)).await
    }

    /// Sends a video's cut.
    async fn put_cut(&self, hash: &MmHash, parts: Vec<VideoPart>) -> Result<(), Status> {
        let mut files = self.files.clone();
        let chunks = tokio_stream::iter(cuts::to_messages(hash, parts));
        wait_for_transfer(files.put_cut(chunks)).await
    }
}

/// Waits for the end of a transfer, for at most [`TRANSFER_TIMEOUT`].
async fn wait_for_transfer<T>(put: impl Future<Output = Result<T, Status>>) -> Result<(), Status> {
    match tokio::time::timeout(TRANSFER_TIMEOUT, put).await {
        Ok(put) => put.map(drop),
        Err(_) => Err(Status::deadline_exceeded(format!(
            "not complete after {} s",
            TRANSFER_TIMEOUT.as_secs()
        ))),
    }
}

/// Describes a failed call for operators.
fn describe(status: &Status) -> String {
    // The innermost error has the clearest message.
    let cause =
        std::iter::successors(std::error::Error::source(status), |cause| cause.source()).last();
    let cause = cause.map(ToString::to_string).filter(|cause| !status.message().contains(cause));
    match (status.message(), cause) {
        (message, Some(cause)) => format!("{message}: {cause}"),
        ("", None) => format!("{:?}", status.code()),
        (message, None) => message.to_owned(),
    }
}

/// Returns the death reason of an engine whose agent's connection failed. Clients may read it, so
/// it has no address: logs name the worker beside it.
fn connection_lost(status: &Status) -> DeathReason {
    DeathReason::new(format!("the connection to the agent was lost: {}", describe(status)))
}
