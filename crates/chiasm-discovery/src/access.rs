//! How servers are reached: certificates, and the cluster that a pod is in.

use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};

use url::Url;

use crate::DiscoveryError;

/// Where Kubernetes puts what a pod needs to speak to the API server.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const HOST: &str = "KUBERNETES_SERVICE_HOST";
const PORT: &str = "KUBERNETES_SERVICE_PORT";

/// How the servers of sources are reached. The default has nothing special: `etcds://` trusts whom
/// Mozilla trusts, no cluster is known.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// For `etcds://`.
    pub etcd: Tls,
    /// For `kubernetes://`.
    pub cluster: Option<ClusterAccess>,
}

/// Files in PEM for connections with TLS. They are read again for each new connection after a
/// failure, as certificates rotate.
#[derive(Clone, Debug, Default)]
pub struct Tls {
    /// The certificates of those who sign the server's. Without it these are Mozilla's.
    pub authority: Option<PathBuf>,
    /// Who this process is, for servers that ask for it.
    pub identity: Option<Identity>,
}

/// A certificate and its key, in PEM.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The certificate and those between it and the authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// The API server of a Kubernetes cluster, and this process's account there.
#[derive(Clone, Debug)]
pub struct ClusterAccess {
    /// The API server, `https` or `http`.
    pub server: Url,
    /// The file with the token that is sent to it; read for each request, as it rotates.
    pub token: Option<PathBuf>,
    /// The certificates of those who sign the server's.
    pub authority: Option<PathBuf>,
}

impl ClusterAccess {
    /// The cluster of the pod whose environment is read by `variable`; none outside of a pod.
    ///
    /// # Errors
    /// [`DiscoveryError::Cluster`] if a variable has something in it that Kubernetes does not put
    /// there.
    pub fn of_pod(
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, DiscoveryError> {
        let (Some(host), Some(port)) = (variable(HOST), variable(PORT)) else { return Ok(None) };
        let port: u16 =
            port.parse().map_err(|_| DiscoveryError::Cluster { variable: PORT, value: port })?;
        let authority = match host.parse::<Ipv6Addr>() {
            Ok(ip) => format!("[{ip}]"),
            Err(_) => host.clone(),
        };
        let wrong = |_| DiscoveryError::Cluster { variable: HOST, value: host.clone() };
        let server = Url::parse(&format!("https://{authority}:{port}/")).map_err(wrong)?;
        let file = |name: &str| Some(Path::new(SERVICE_ACCOUNT).join(name));
        Ok(Some(Self { server, token: file("token"), authority: file("ca.crt") }))
    }

    pub(crate) fn tls(&self) -> Tls {
        Tls { authority: self.authority.clone(), identity: None }
    }
}

/// The variable whose absence means that no cluster is known.
pub(crate) const OF_PODS: &str = HOST;

#[cfg(test)]
mod tests {
    use super::*;

    fn of(host: &str, port: &str) -> Result<Option<ClusterAccess>, DiscoveryError> {
        let values = [(HOST, host), (PORT, port)];
        ClusterAccess::of_pod(&|name| {
            let value = values.iter().find(|(known, _)| *known == name)?.1;
            (!value.is_empty()).then(|| value.to_owned())
        })
    }

    #[test]
    fn a_pod_is_told_where_its_cluster_is() {
        let cluster = of("10.0.0.1", "443").unwrap().unwrap();
        assert_eq!(cluster.server.as_str(), "https://10.0.0.1/");
        assert_eq!(
            cluster.token.unwrap(),
            Path::new("/var/run/secrets/kubernetes.io/serviceaccount/token")
        );
        assert_eq!(
            cluster.authority.unwrap(),
            Path::new("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")
        );
        assert_eq!(
            of("fd00::1", "6443").unwrap().unwrap().server.as_str(),
            "https://[fd00::1]:6443/"
        );
        assert!(of("", "443").unwrap().is_none());
        assert!(matches!(of("10.0.0.1", "x"), Err(DiscoveryError::Cluster { variable: PORT, .. })));
        assert!(matches!(of("a b", "443"), Err(DiscoveryError::Cluster { variable: HOST, .. })));
    }
}
