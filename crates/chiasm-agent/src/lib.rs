//! The engines of another machine.
//!
//! An agent runs beside the engines of one machine and owns them: it launches them, processes media
//! beside their memory and knows exactly what their KV caches hold. Frontends on any machine reach
//! each of its engines as a [`Backend`](chiasm_backend::Backend), over gRPC: jobs go as tokens,
//! media items as encoded files, once for all engines of the machine; those that only the frontend
//! can make go as tensors, and others too where that is quicker than to wait for the agent to make
//! them. Tensors are sent, or read out of the frontend's memory by NIXL.
//!
//! | module | is |
//! |---|---|
//! | `server` | the agent: what frontends may ask of it |
//! | `client` | a frontend's side: connections to agents, backends, jobs that run there |
//! | `job` | jobs as messages, and back |
//! | `answer` | outputs and failures of jobs as messages, and back |
//! | `others` | what frontends know of each other's jobs as messages, and back |
//! | `tensors` | an item's tensors as messages, and back |
//! | `capabilities` | what an engine can do as a message, and back |
//! | `tls`, `wire` | certificates of both sides; a connection with them or in plain text |
//! | `peer` | the address of a frontend, by which it has its share of an agent |
//! | `proto` | the messages; written by `cargo xtask agent-proto` from `proto/agent.proto` |
#![forbid(unsafe_code)]

mod answer;
mod capabilities;
mod client;
mod job;
mod others;
mod peer;
mod server;
mod tensors;
mod tls;
mod wire;

pub use client::{
    AgentConnector, AgentLink, AgentMedia, AgentStatus, Greeting, Lending, LinkError,
};
pub use server::{AgentServer, Drain, serve};
pub use tls::{AgentTls, TlsError};

#[allow(missing_docs, unreachable_pub, clippy::pedantic, clippy::all, reason = "it is generated")]
mod proto {
    include!("generated/chiasm.agent.v1.rs");
}

/// The versions of the protocol that this build speaks.
const PROTOCOLS: std::ops::RangeInclusive<u32> = 2..=2;

/// Bytes of a file or of tensors in one message.
const CHUNK: usize = 256 << 10;

/// How long a file or tensors may be on their way, and a message.
const SENT_WITHIN: std::time::Duration = std::time::Duration::from_secs(30);

/// Bytes of one message, either way. The largest are log probabilities of long prompts.
const MOST_MESSAGE_BYTES: usize = 64 << 20;

/// How often a connection that says nothing is asked for a sign of life, and how long that may
/// take: together the time in which a silent machine is noticed.
const ASK_EVERY: std::time::Duration = std::time::Duration::from_secs(1);
const ANSWER_WITHIN: std::time::Duration = std::time::Duration::from_millis(1500);

#[cfg(test)]
mod tests;
