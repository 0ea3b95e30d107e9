//! Errors of a source or a registration, found before any server is asked.

use std::path::PathBuf;

/// Why a source can't be followed, or an agent can't be registered. The texts say what to do.
///
/// A server that fails later is no error: it is logged, and asked again.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// An address that no agent can have.
    #[error(
        "'{0}' is no address of an agent: expected host:port, and brackets around an IPv6 address"
    )]
    Address(String),
    /// A list of addresses without any.
    #[error(
        "no agents are named: expected host:port,host:port,… or etcd://…, etcds://… or kubernetes://…"
    )]
    Nobody,
    /// More addresses than a source may name.
    #[error("{0} agents are named, and {most} are the most", most = crate::MOST_ADDRESSES)]
    TooMany(usize),
    /// A URL of no known kind.
    #[error(
        "'{0}://' is no source of agents: expected host:port,host:port,… or etcd://…, etcds://… or kubernetes://…"
    )]
    Scheme(String),
    /// The kind of a source without its place, as in `--discovery etcd`.
    #[error(
        "the place is missing: expected etcd://HOST:PORT/PREFIX, or kubernetes://NAMESPACE/SERVICE"
    )]
    NoPlace,
    /// A URL of etcd that can't be used.
    #[error("'{url}' can't be used: {problem}; expected etcd://host:port,host:port/prefix")]
    EtcdUrl {
        /// The given text.
        url: String,
        /// The problem.
        problem: &'static str,
    },
    /// A URL of Kubernetes that can't be used.
    #[error(
        "'{url}' can't be used: {problem}; expected kubernetes://namespace/service or kubernetes://namespace/service:port"
    )]
    KubernetesUrl {
        /// The given text.
        url: String,
        /// The problem.
        problem: &'static str,
    },
    /// Kubernetes is asked for outside of a pod.
    #[error("no cluster is known: kubernetes:// works in a pod, where {0} is set")]
    NoCluster(&'static str),
    /// A variable of the environment that Kubernetes sets, with something else in it.
    #[error("{variable} can't be used: '{value}'")]
    Cluster {
        /// The variable.
        variable: &'static str,
        /// The contents.
        value: String,
    },
    /// A file of certificates or of a key that can't be used.
    #[error("{} can't be used: {reason}", path.display())]
    Certificates {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// TLS can't be used.
    #[error("TLS can't be used: {0}")]
    Tls(String),
}
