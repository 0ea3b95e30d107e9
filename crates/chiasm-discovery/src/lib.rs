//! Finds the agents that a frontend should try.
//!
//! A [`Source`] is what a flag says: a list of addresses, a prefix in etcd or a service of
//! Kubernetes. A frontend follows it: [`Following`] has the addresses that are named now. An agent
//! beside a source in etcd has a [`Registration`] there.
//!
//! ```no_run
//! # async fn example() -> Result<(), chiasm_discovery::DiscoveryError> {
//! use chiasm_discovery::{Access, Source};
//!
//! let source: Source = "etcd://10.0.0.1:2379,10.0.0.2:2379/chiasm/agents/".parse()?;
//! let following = source.follow(&Access::default())?;
//! let mut named = following.named();
//! while named.changed().await.is_ok() {
//!     println!("{:?}", named.borrow_and_update().addresses);
//! }
//! # Ok(()) }
//! ```
//!
//! A source only suggests. While it is silent or gone, the addresses that it named last stay,
//! marked as not current; whether an agent lives is decided by the connection to it, never here.
//!
//! | module | is |
//! |---|---|
//! | `source` | what a flag says, and following it |
//! | `named` | which agents are named now |
//! | `address` | `host:port`, checked |
//! | `etcd` | agents named by keys of etcd: its JSON API, following a prefix, registering; and what others keep there |
//! | `kubernetes` | agents named by the EndpointSlices of a service |
//! | `access` | how servers are reached: certificates, the cluster that a pod is in |
//! | `picture` | the trait of what a source names |
//! | `upstream` | keeps following a server through its failures |
//! | `failure` | why a server does not answer |
//! | `http` | calls and streams with bounds of time and bytes |
//! | `few` | lists that are bounded before they are in memory |
//! | `skipped` | entries that name nothing usable, as one line of the log |
//! | `lines` | a stream's bytes as lines |
//! | `backoff` | pauses between tries |
//!
//! Both servers are spoken to by their JSON over HTTP/1.1: `etcd-client` needs `protoc` to build,
//! and `kube` would bring 51 more crates (docs/decisions says more on both).
#![forbid(unsafe_code)]

mod access;
mod address;
mod backoff;
mod error;
mod etcd;
mod failure;
mod few;
mod http;
mod kubernetes;
mod lines;
mod named;
mod picture;
mod skipped;
mod source;
mod upstream;

#[cfg(test)]
mod fake;

pub use access::{Access, ClusterAccess, Identity, Tls};
pub use error::DiscoveryError;
pub use etcd::{Candidate, Etcd, Registration, Values};
pub use kubernetes::{Port, Service};
pub use named::{Following, Named};
pub use source::Source;

/// The most agents that a source may name; more are ignored, with a warning.
pub const MOST_ADDRESSES: usize = 10_000;
