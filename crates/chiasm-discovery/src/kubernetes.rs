//! Agents named by Kubernetes: the endpoints of a service, as the EndpointSlices of
//! `discovery.k8s.io/v1` say them.
//!
//! The account of the pod needs `list` and `watch` on `endpointslices` in the service's namespace.

mod api;
mod following;
mod message;
mod slices;

#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

pub(crate) use following::KubernetesUpstream;

use crate::DiscoveryError;

/// A service and which of its ports is the agents', as `kubernetes://namespace/service:port` says
/// it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    namespace: String,
    name: String,
    port: Option<Port>,
}

/// Which port of a service is the agents'. Without one, the service has to have a single port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Port {
    /// The port that the service calls so.
    Name(String),
    /// This port of the pods; it is not the service's own number where that is another one.
    Number(u16),
}

impl FromStr for Service {
    type Err = DiscoveryError;

    fn from_str(text: &str) -> Result<Self, DiscoveryError> {
        let wrong = |problem| DiscoveryError::KubernetesUrl {
            url: text.chars().take(300).collect(),
            problem,
        };
        let path =
            text.strip_prefix("kubernetes://").ok_or_else(|| wrong("it has another scheme"))?;
        let (namespace, service) =
            path.split_once('/').ok_or_else(|| wrong("it needs a namespace and a service"))?;
        let (name, port) = match service.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (service, None),
        };
        if !is_label(namespace) {
            return Err(wrong("that is no name of a namespace"));
        }
        if !is_label(name) {
            return Err(wrong("that is no name of a service"));
        }
        let port = match port {
            Some(port) => Some(Port::parse(port).ok_or_else(|| wrong("that is no port"))?),
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
        // IANA's service names have at most 15 characters, but slices may have names as long as a
        // label.
        is_label(text).then(|| Self::Name(text.to_owned()))
    }
}

/// A label of DNS (RFC 1123), which may stand in a URL as it is.
fn is_label(text: &str) -> bool {
    let is_within =
        text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    (1..=63).contains(&text.len()) && is_within && !text.starts_with('-') && !text.ends_with('-')
}

/// As it can be parsed again.
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
