//! Discovery of the agents that a frontend connects to.
//!
//! A [`Source`] is the value of a flag: a list of addresses, a prefix in etcd, or a service of
//! Kubernetes. A frontend follows a source through a [`SourceFollower`], which has the addresses of
//! the moment. An agent announces itself in etcd with a [`Registration`].
//!
//! ```no_run
//! # async fn example() -> Result<(), chiasm_discovery::DiscoveryError> {
//! use chiasm_discovery::{Access, Source};
//!
//! let source: Source = "etcd://10.0.0.1:2379,10.0.0.2:2379/chiasm/agents/".parse()?;
//! let follower = source.follow(&Access::default())?;
//! let mut named = follower.subscribe();
//! while named.changed().await.is_ok() {
//!     println!("{:?}", named.borrow_and_update().addresses);
//! }
//! # Ok(()) }
//! ```
//!
//! Discovery does not detect whether an agent is alive; the connection to the agent does. While a
//! source is unavailable, its last addresses stay, marked as not current.
//!
//! | module | contents |
//! |---|---|
//! | `source` | the sources, parsed from a flag |
//! | `named` | the named agents, and the handle to a task that follows a source |
//! | `address` | parsing of `host:port` |
//! | `etcd` | agents and other data in etcd: its JSON API, following a prefix, registering |
//! | `kubernetes` | agents named by the EndpointSlices of a service |
//! | `access` | certificates, tokens and addresses for access to servers |
//! | `snapshot` | the trait of the state of a source |
//! | `publisher` | the loop that watches a server, reconnects and publishes snapshots |
//! | `failure` | the reasons for which a server is unavailable |
//! | `http` | calls and streams with timeouts and size limits |
//! | `bounded_list` | deserialization of lists with a bound on their length |
//! | `skipped` | one log line for all unusable entries of an answer |
//! | `lines` | splitting of a byte stream into lines |
//! | `backoff` | pauses before a server is tried again |
//!
//! Both servers are accessed by JSON over HTTP/1.1, because `etcd-client` needs `protoc` to build,
//! and `kube` would add 51 crates (docs/decisions/0002-own-etcd-client.md and
//! docs/decisions/0007-own-kubernetes-client.md).
#![forbid(unsafe_code)]

mod access;
mod address;
mod backoff;
mod bounded_list;
mod error;
mod etcd;
mod failure;
mod http;
mod kubernetes;
mod lines;
mod named;
mod publisher;
mod skipped;
mod snapshot;
mod source;

#[cfg(test)]
mod fake;

pub use access::{Access, ClusterAccess, Identity, Tls};
pub use error::DiscoveryError;
pub use etcd::{Candidate, Etcd, Registration, Values};
pub use kubernetes::{Port, Service};
pub use named::{NamedAgents, SourceFollower};
pub use source::Source;

/// The maximum number of agents that a source may name. More are ignored, with a warning.
pub const MAX_ADDRESSES: usize = 10_000;
