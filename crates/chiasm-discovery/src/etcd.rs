//! Agents named by keys of etcd (3.4 or newer), by the JSON that it answers over HTTP beside gRPC.
//!
//! Below a prefix of ours, each key has a [`Candidate`] as its value. Keys of agents are put under
//! a lease by a [`Registration`]; keys that somebody else puts there count just as well. What
//! others keep in etcd can be followed as it is: [`Values`].

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

use following::EtcdUpstream;
use keys::Keys;

use crate::{DiscoveryError, Following, Tls, address, upstream};

const DEFAULT_PREFIX: &str = "chiasm/agents/";
/// The most servers that a URL may name; etcd's own advice is at most seven members.
const MOST_ENDPOINTS: usize = 32;
const LONGEST_PREFIX: usize = 512;

/// The servers of one etcd and a prefix of keys, as `etcd://host:port,host:port…/prefix` says it,
/// or `etcds://…` for TLS.
///
/// Without a prefix it is `chiasm/agents/`. A slash at its end is added where it is missing, so
/// that `a` does not mean what is below `ab`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Etcd {
    is_tls: bool,
    /// At least one, `host:port` each; asked in turn.
    endpoints: Vec<String>,
    prefix: String,
}

impl Etcd {
    /// The same servers, and what is below another prefix.
    ///
    /// # Errors
    /// [`DiscoveryError::EtcdUrl`] for a prefix that no URL can have.
    pub fn with_prefix(&self, prefix: &str) -> Result<Self, DiscoveryError> {
        let scheme = if self.is_tls { "etcds" } else { "etcd" };
        format!("{scheme}://{}/{prefix}", self.endpoints.join(",")).parse()
    }

    /// Follows the agents that keys below the prefix name.
    pub(crate) fn follow(self, tls: Tls) -> Result<Following, DiscoveryError> {
        Ok(upstream::follow(EtcdUpstream::<Keys>::new(self, tls)?))
    }

    /// Follows the values of all keys below the prefix, until what is returned is dropped. Servers
    /// that can't be reached are tried again and again. Needs a Tokio runtime.
    ///
    /// # Errors
    /// [`DiscoveryError::Certificates`] and [`DiscoveryError::Tls`] if the files of `tls` can't be
    /// used.
    pub fn follow_values(self, tls: Tls) -> Result<Following<Values>, DiscoveryError> {
        Ok(upstream::follow(EtcdUpstream::<values::KeptValues>::new(self, tls)?))
    }
}

impl FromStr for Etcd {
    type Err = DiscoveryError;

    fn from_str(text: &str) -> Result<Self, DiscoveryError> {
        let wrong =
            |problem| DiscoveryError::EtcdUrl { url: text.chars().take(300).collect(), problem };
        let (is_tls, rest) = match text.split_once("://") {
            Some(("etcd", rest)) => (false, rest),
            Some(("etcds", rest)) => (true, rest),
            _ => return Err(wrong("it has another scheme")),
        };
        let (servers, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if servers.is_empty() {
            return Err(wrong("it names no server"));
        }
        if servers.contains('@') {
            // Its words would show a password in logs, so the URL is not repeated.
            let url = format!("{}://…", if is_tls { "etcds" } else { "etcd" });
            let problem =
                "users and passwords are not supported: use etcds:// with a client's certificate";
            return Err(DiscoveryError::EtcdUrl { url, problem });
        }
        if prefix.len() > LONGEST_PREFIX
            || prefix.chars().any(|c| c.is_control() || c.is_whitespace())
        {
            return Err(wrong("its prefix is too long, or has spaces"));
        }
        if prefix.contains(['?', '#']) {
            return Err(wrong("its prefix has a query"));
        }
        let endpoints: Result<Vec<_>, _> =
            servers.split(',').map(|server| address::parse(server.trim())).collect();
        let endpoints = endpoints.map_err(|_| wrong("each server has to be host:port"))?;
        if endpoints.len() > MOST_ENDPOINTS {
            return Err(wrong("it names too many servers"));
        }
        let prefix = match prefix {
            "" => DEFAULT_PREFIX.to_owned(),
            prefix if prefix.ends_with('/') => prefix.to_owned(),
            prefix => format!("{prefix}/"),
        };
        Ok(Self { is_tls, endpoints, prefix })
    }
}

/// As it can be parsed again.
impl fmt::Display for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "etcds" } else { "etcd" };
        write!(f, "{scheme}://{}/{}", self.endpoints.join(","), self.prefix)
    }
}
