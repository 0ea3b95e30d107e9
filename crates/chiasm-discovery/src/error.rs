//! Errors of a source or a registration that are found before any request.

use std::path::PathBuf;

/// An error that prevents following a source or registering an agent. The messages say what to do.
///
/// Later failures of a server are not errors: they are logged, and the server is tried again.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// An invalid address of an agent.
    #[error(
        "'{0}' is not an agent's address: expected host:port, with brackets around an IPv6 address"
    )]
    Address(String),
    /// An empty list of addresses.
    #[error(
        "the list of agents is empty: expected host:port,host:port,… or etcd://…, etcds://… \
         or kubernetes://…"
    )]
    EmptyList,
    /// More addresses than a source may name.
    #[error("{0} agents exceed the limit of {max}", max = crate::MAX_ADDRESSES)]
    TooMany(usize),
    /// A URL with an unknown scheme.
    #[error(
        "'{0}://' is not a source of agents: expected host:port,host:port,… or etcd://…, etcds://… \
         or kubernetes://…"
    )]
    Scheme(String),
    /// A malformed URL, such as `etcd//a:1/b`, or the kind of a source alone.
    #[error("expected etcd://HOST:PORT/PREFIX or kubernetes://NAMESPACE/SERVICE")]
    NotAUrl,
    /// An invalid URL of etcd.
    #[error("'{url}' can't be used: {problem}; expected etcd://host:port,host:port/prefix")]
    EtcdUrl {
        /// The given text.
        url: String,
        /// The problem.
        problem: &'static str,
    },
    /// An invalid URL of Kubernetes.
    #[error(
        "'{url}' can't be used: {problem}; expected kubernetes://namespace/service \
         or kubernetes://namespace/service:port"
    )]
    KubernetesUrl {
        /// The given text.
        url: String,
        /// The problem.
        problem: &'static str,
    },
    /// A URL of Kubernetes outside of a pod.
    #[error("kubernetes:// only works in a pod: {0} is not set")]
    NoCluster(&'static str),
    /// An environment variable of Kubernetes with an invalid value.
    #[error("{variable} can't be used: '{value}'")]
    Cluster {
        /// The variable.
        variable: &'static str,
        /// The variable's value.
        value: String,
    },
    /// An unusable file of certificates or of a key.
    #[error("{} can't be used: {reason}", path.display())]
    Certificates {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// TLS can't be set up.
    #[error("TLS can't be used: {0}")]
    Tls(String),
}
