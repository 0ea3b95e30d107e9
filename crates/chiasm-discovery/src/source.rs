//! Sources of agents' addresses, parsed from a flag.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use tokio::sync::watch;

use crate::access::HOST_VARIABLE;
use crate::kubernetes::KubernetesWatcher;
use crate::named::{NamedAgents, SourceFollower};
use crate::{Access, DiscoveryError, Etcd, MAX_ADDRESSES, Service, address, publisher};

/// A source of agents' addresses, parsed from a flag:
///
/// - `host:port,host:port…` is a list of addresses;
/// - `etcd://host:port,host:port…/prefix` is a prefix in etcd, and `etcds://…` one with TLS;
/// - `kubernetes://namespace/service` or `kubernetes://namespace/service:port` is a service of the
///   cluster that this pod runs in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A fixed list of addresses.
    Static(BTreeSet<String>),
    /// The addresses in the keys below a prefix.
    Etcd(Etcd),
    /// The endpoints of a service.
    Kubernetes(Service),
}

impl Source {
    /// Follows the source until the returned handle is dropped. An unreachable server is retried
    /// without limit. Requires a Tokio runtime.
    ///
    /// # Errors
    /// [`DiscoveryError::NoCluster`] if the source needs a cluster and `access` has none,
    /// [`DiscoveryError::Certificates`] and [`DiscoveryError::Tls`] if the files of `access` can't
    /// be used.
    pub fn follow(self, access: &Access) -> Result<SourceFollower, DiscoveryError> {
        match self {
            Self::Static(addresses) => {
                let named = watch::Sender::new(NamedAgents { addresses, is_current: true });
                Ok(SourceFollower::new(named, None))
            }
            Self::Etcd(etcd) => etcd.follow(access.etcd.clone()),
            Self::Kubernetes(service) => {
                let cluster = access.cluster.clone();
                let cluster = cluster.ok_or(DiscoveryError::NoCluster(HOST_VARIABLE))?;
                Ok(publisher::follow(KubernetesWatcher::new(service, cluster)?))
            }
        }
    }
}

impl FromStr for Source {
    type Err = DiscoveryError;

    fn from_str(text: &str) -> Result<Self, DiscoveryError> {
        match text.split_once("://") {
            Some(("etcd" | "etcds", _)) => text.parse().map(Self::Etcd),
            Some(("kubernetes", _)) => text.parse().map(Self::Kubernetes),
            Some((scheme, _)) => Err(DiscoveryError::Scheme(scheme.chars().take(40).collect())),
            None if text.contains('/')
                || ["etcd", "etcds", "kubernetes", "k8s"].contains(&text.trim()) =>
            {
                Err(DiscoveryError::NotAUrl)
            }
            None => parse_list(text).map(Self::Static),
        }
    }
}

fn parse_list(text: &str) -> Result<BTreeSet<String>, DiscoveryError> {
    if text.trim().is_empty() {
        return Err(DiscoveryError::EmptyList);
    }
    let addresses: BTreeSet<_> =
        text.split(',').map(|part| address::parse(part.trim())).collect::<Result<_, _>>()?;
    if addresses.len() > MAX_ADDRESSES {
        return Err(DiscoveryError::TooMany(addresses.len()));
    }
    Ok(addresses)
}

/// Writes the form that [`FromStr`] parses.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Static(addresses) => {
                for (n, address) in addresses.iter().enumerate() {
                    write!(f, "{}{address}", if n == 0 { "" } else { "," })?;
                }
                Ok(())
            }
            Self::Etcd(etcd) => etcd.fmt(f),
            Self::Kubernetes(service) => service.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn static_list_is_current_until_dropped() {
        let source: Source = "B:2, a:1,[::1]:3,a:01".parse().unwrap();
        assert_eq!(source.to_string(), "[::1]:3,a:1,b:2");
        let follower = source.follow(&Access::default()).unwrap();
        let mut named = follower.subscribe();
        let addresses = ["[::1]:3", "a:1", "b:2"].map(str::to_owned).into();
        assert_eq!(*named.borrow_and_update(), NamedAgents { addresses, is_current: true });
        drop(follower);
        assert!(named.changed().await.is_err());
    }

    #[test]
    fn invalid_source_is_refused_with_reason() {
        for (text, reason) in [
            ("", "list of agents is empty"),
            (" ", "list of agents is empty"),
            ("a:1,,b:2", "'' is not an agent's address"),
            ("a:1,b", "'b' is not an agent's address"),
            ("consul://a:1", "'consul://' is not a source"),
            ("http://a:1", "'http://' is not a source"),
            ("etcd", "etcd://HOST:PORT/PREFIX"),
            ("k8s", "kubernetes://NAMESPACE/SERVICE"),
            ("etcd//x", "expected etcd://HOST:PORT/PREFIX"),
            ("etcd://", "server is missing"),
            ("kubernetes://", "a namespace and a service"),
        ] {
            let error = text.parse::<Source>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
            assert!(!error.ends_with('.'), "{error}");
        }
    }

    #[test]
    fn service_without_cluster_is_refused() {
        let source: Source = "kubernetes://a/b".parse().unwrap();
        let error = source.follow(&Access::default()).unwrap_err();
        assert!(matches!(error, DiscoveryError::NoCluster(_)), "{error}");
    }

    proptest::proptest! {
        #[test]
        fn display_is_inverse_of_parse(
            text in "(etcds?://|kubernetes://|)[a-z0-9:/,.-]{0,30}"
        ) {
            if let Ok(source) = text.parse::<Source>() {
                proptest::prop_assert_eq!(source.to_string().parse::<Source>().unwrap(), source);
            }
        }
    }
}
