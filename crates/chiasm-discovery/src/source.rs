//! Sources of agents' addresses, parsed from a flag and followed.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use tokio::sync::watch;

use crate::access::OF_PODS;
use crate::kubernetes::KubernetesUpstream;
use crate::named::{Following, Named};
use crate::{Access, DiscoveryError, Etcd, MOST_ADDRESSES, Service, address, upstream};

/// A source of agents' addresses, parsed from a flag:
///
/// - `host:port,host:port…` names them;
/// - `etcd://host:port,host:port…/prefix` names a prefix in etcd, and `etcds://` one that is
///   reached with TLS;
/// - `kubernetes://namespace/service` or `kubernetes://namespace/service:port` names a service of
///   the cluster that this pod is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// These addresses, always.
    Static(BTreeSet<String>),
    /// The addresses in the keys below a prefix.
    Etcd(Etcd),
    /// The endpoints of a service.
    Kubernetes(Service),
}

impl Source {
    /// Follows the source until what is returned is dropped. A server that can't be reached is
    /// tried again and again. Needs a Tokio runtime.
    ///
    /// # Errors
    /// [`DiscoveryError::NoCluster`] if the source needs a cluster and `access` has none,
    /// [`DiscoveryError::Certificates`] and [`DiscoveryError::Tls`] if the files of `access` can't
    /// be used.
    pub fn follow(self, access: &Access) -> Result<Following, DiscoveryError> {
        match self {
            Self::Static(addresses) => {
                let named = watch::Sender::new(Named { addresses, is_current: true });
                Ok(Following::new(named, None))
            }
            Self::Etcd(etcd) => etcd.follow(access.etcd.clone()),
            Self::Kubernetes(service) => {
                let cluster = access.cluster.clone().ok_or(DiscoveryError::NoCluster(OF_PODS))?;
                Ok(upstream::follow(KubernetesUpstream::new(service, cluster)?))
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
            None if ["etcd", "etcds", "kubernetes", "k8s"].contains(&text.trim()) => {
                Err(DiscoveryError::NoPlace)
            }
            None => list(text).map(Self::Static),
        }
    }
}

fn list(text: &str) -> Result<BTreeSet<String>, DiscoveryError> {
    if text.trim().is_empty() {
        return Err(DiscoveryError::Nobody);
    }
    let addresses: BTreeSet<_> =
        text.split(',').map(|part| address::parse(part.trim())).collect::<Result<_, _>>()?;
    if addresses.len() > MOST_ADDRESSES {
        return Err(DiscoveryError::TooMany(addresses.len()));
    }
    Ok(addresses)
}

/// As it can be parsed again.
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
    async fn a_list_is_current_at_once_and_stays_until_it_is_dropped() {
        let source: Source = "B:2, a:1,[::1]:3,a:01".parse().unwrap();
        assert_eq!(source.to_string(), "[::1]:3,a:1,b:2");
        let following = source.follow(&Access::default()).unwrap();
        let mut named = following.named();
        let addresses = ["[::1]:3", "a:1", "b:2"].map(str::to_owned).into();
        assert_eq!(*named.borrow_and_update(), Named { addresses, is_current: true });
        drop(following);
        assert!(named.changed().await.is_err());
    }

    #[test]
    fn what_is_no_source_is_refused_with_a_reason() {
        for (text, reason) in [
            ("", "no agents are named"),
            (" ", "no agents are named"),
            ("a:1,,b:2", "'' is no address"),
            ("a:1,b", "'b' is no address"),
            ("consul://a:1", "'consul://' is no source"),
            ("http://a:1", "'http://' is no source"),
            ("etcd", "etcd://HOST:PORT/PREFIX"),
            ("k8s", "kubernetes://NAMESPACE/SERVICE"),
            ("etcd://", "names no server"),
            ("kubernetes://", "needs a namespace and a service"),
        ] {
            let error = text.parse::<Source>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
            assert!(!error.ends_with('.'), "{error}");
        }
    }

    #[test]
    fn a_service_needs_a_cluster() {
        let source: Source = "kubernetes://a/b".parse().unwrap();
        let error = source.follow(&Access::default()).unwrap_err();
        assert!(matches!(error, DiscoveryError::NoCluster(_)), "{error}");
    }

    proptest::proptest! {
        #[test]
        fn what_is_parsed_is_shown_so_that_it_is_parsed_to_the_same(text in "(etcds?://|kubernetes://|)[a-z0-9:/,.-]{0,30}") {
            if let Ok(source) = text.parse::<Source>() {
                proptest::prop_assert_eq!(source.to_string().parse::<Source>().unwrap(), source);
            }
        }
    }
}
