//! Agents named by keys of etcd (3.4 or newer), through etcd's JSON gateway over HTTP.
//!
//! Each key below the prefix has a [`Candidate`] as its value. Agents put their keys under a lease
//! with a [`Registration`]; keys that other programs put are equally valid. [`Values`] are other
//! data in etcd.

mod api;
mod candidate;
mod following;
mod keys;
mod message;
mod registration;
mod values;

#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

pub use candidate::Candidate;
pub use registration::Registration;
pub use values::Values;

use following::EtcdWatcher;
use keys::AgentKeys;

use crate::{DiscoveryError, SourceFollower, Tls, address, publisher};

const DEFAULT_PREFIX: &str = "chiasm/agents/";
/// The maximum number of servers in a URL. etcd recommends at most seven members.
const MAX_ENDPOINTS: usize = 32;
const MAX_PREFIX_BYTES: usize = 512;

/// The servers of one etcd and a prefix of keys, parsed from `etcd://host:port,host:port…/prefix`,
/// or from `etcds://…` for TLS.
///
/// The default prefix is `chiasm/agents/`. A missing slash at the end is added, so that `a` does
/// not include the keys below `ab`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Etcd {
    is_tls: bool,
    /// At least one `host:port`. When a server fails, the next one is used.
    endpoints: Vec<String>,
    prefix: String,
}

impl Etcd {
    /// Returns the same servers with another prefix.
    ///
    /// # Errors
    /// [`DiscoveryError::EtcdUrl`] if the prefix is not valid in a URL.
    pub fn with_prefix(&self, prefix: &str) -> Result<Self, DiscoveryError> {
        let scheme = if self.is_tls { "etcds" } else { "etcd" };
        format!("{scheme}://{}/{prefix}", self.endpoints.join(",")).parse()
    }

    /// Follows the agents that are named by the keys below the prefix.
    pub(crate) fn follow(self, tls: Tls) -> Result<SourceFollower, DiscoveryError> {
        Ok(publisher::follow(EtcdWatcher::<AgentKeys>::new(self, tls)?))
    }

    /// Follows the values of all keys below the prefix until the returned handle is dropped.
    /// Unreachable servers are retried without limit. Requires a Tokio runtime.
    ///
    /// # Errors
    /// [`DiscoveryError::Certificates`] and [`DiscoveryError::Tls`] if the files of `tls` can't be
    /// used.
    pub fn follow_values(self, tls: Tls) -> Result<SourceFollower<Values>, DiscoveryError> {
        Ok(publisher::follow(EtcdWatcher::<values::StoredValues>::new(self, tls)?))
    }
}

impl FromStr for Etcd {
    type Err = DiscoveryError;

    fn from_str(text: &str) -> Result<Self, DiscoveryError> {
        let invalid =
            |problem| DiscoveryError::EtcdUrl { url: text.chars().take(300).collect(), problem };
        let (is_tls, rest) = match text.split_once("://") {
            Some(("etcd", rest)) => (false, rest),
            Some(("etcds", rest)) => (true, rest),
            _ => return Err(invalid("the scheme is unknown")),
        };
        let (servers, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if servers.is_empty() {
            return Err(invalid("the server is missing"));
        }
        if servers.contains('@') {
            // The URL is not repeated, because a password would appear in logs.
            let url = format!("{}://…", if is_tls { "etcds" } else { "etcd" });
            let problem =
                "users and passwords are not supported: use etcds:// with a client's certificate";
            return Err(DiscoveryError::EtcdUrl { url, problem });
        }
        if prefix.len() > MAX_PREFIX_BYTES
            || prefix.chars().any(|c| c.is_control() || c.is_whitespace())
        {
            return Err(invalid("the prefix is too long or has spaces"));
        }
        if prefix.contains(['?', '#']) {
            return Err(invalid("the prefix has a query"));
        }
        let endpoints: Result<Vec<_>, _> =
            servers.split(',').map(|server| address::parse(server.trim())).collect();
        let endpoints = endpoints.map_err(|_| invalid("each server must be host:port"))?;
        if endpoints.len() > MAX_ENDPOINTS {
            return Err(invalid("too many servers"));
        }
        let prefix = match prefix {
            "" => DEFAULT_PREFIX.to_owned(),
            prefix if prefix.ends_with('/') => prefix.to_owned(),
            prefix => format!("{prefix}/"),
        };
        Ok(Self { is_tls, endpoints, prefix })
    }
}

/// Writes the form that [`FromStr`] parses.
impl fmt::Display for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "etcds" } else { "etcd" };
        write!(f, "{scheme}://{}/{}", self.endpoints.join(","), self.prefix)
    }
}
