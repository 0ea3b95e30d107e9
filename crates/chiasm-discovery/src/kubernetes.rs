//! Agents named by Kubernetes: the endpoints of a service, from the EndpointSlices of
//! `discovery.k8s.io/v1`.
//!
//! The pod's account needs `list` and `watch` on `endpointslices` in the service's namespace.

mod api;
mod following;
mod message;
mod slices;

#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

pub(crate) use following::KubernetesWatcher;

use crate::DiscoveryError;

/// A service and the agents' port, parsed from `kubernetes://namespace/service:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    namespace: String,
    name: String,
    port: Option<Port>,
}

/// The agents' port among those of a service. It may only be left out if the service has one port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Port {
    /// The port's name in the service.
    Name(String),
    /// The port's number in the pods, which may differ from the number in the service.
    Number(u16),
}

impl FromStr for Service {
    type Err = DiscoveryError;

    fn from_str(text: &str) -> Result<Self, DiscoveryError> {
        let invalid = |problem| DiscoveryError::KubernetesUrl {
            url: text.chars().take(300).collect(),
            problem,
        };
        let path =
            text.strip_prefix("kubernetes://").ok_or_else(|| invalid("the scheme is unknown"))?;
        let (namespace, service) = path
            .split_once('/')
            .ok_or_else(|| invalid("a namespace and a service are required"))?;
        let (name, port) = match service.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (service, None),
        };
        if !is_label(namespace) {
            return Err(invalid("the namespace is invalid"));
        }
        if !is_label(name) {
            return Err(invalid("the service name is invalid"));
        }
        let port = match port {
            Some(port) => Some(Port::parse(port).ok_or_else(|| invalid("the port is invalid"))?),
            None => None,
        };
        Ok(Self { namespace: namespace.to_owned(), name: name.to_owned(), port })
    }
}

impl Port {
    fn parse(text: &str) -> Option<Self> {
        if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
            return text.parse().ok().filter(|&port| port > 0).map(Self::Number);
        }
        // IANA limits service names to 15 characters, but slices allow the length of a label.
        is_label(text).then(|| Self::Name(text.to_owned()))
    }
}

/// Returns `true` for a label of DNS (RFC 1123). A label needs no escaping in a URL.
fn is_label(text: &str) -> bool {
    let has_valid_bytes =
        text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    (1..=63).contains(&text.len())
        && has_valid_bytes
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Writes the form that [`FromStr`] parses.
impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kubernetes://{}/{}", self.namespace, self.name)?;
        match &self.port {
            Some(Port::Name(name)) => write!(f, ":{name}"),
            Some(Port::Number(number)) => write!(f, ":{number}"),
            None => Ok(()),
        }
    }
}
