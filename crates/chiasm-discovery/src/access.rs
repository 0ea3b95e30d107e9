//! Access to servers: certificates, and the cluster that a pod runs in.

use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};

use url::Url;

use crate::DiscoveryError;

/// The folder in which Kubernetes puts a pod's credentials for the API server.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The variable with the API server's host. It is missing outside of a pod.
pub(crate) const HOST_VARIABLE: &str = "KUBERNETES_SERVICE_HOST";
const PORT_VARIABLE: &str = "KUBERNETES_SERVICE_PORT";

/// Access to the servers of sources. By default, `etcds://` trusts Mozilla's certificate
/// authorities and there is no cluster.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// The files for `etcds://`.
    pub etcd: Tls,
    /// The cluster for `kubernetes://`.
    pub cluster: Option<ClusterAccess>,
}

/// PEM files for TLS. They are read again when connecting after a failure, because certificates
/// rotate.
#[derive(Clone, Debug, Default)]
pub struct Tls {
    /// The certificates of the authorities that sign the server's certificate. `None` stands for
    /// those that Mozilla trusts.
    pub authority: Option<PathBuf>,
    /// The certificate of this process, for servers that request one.
    pub identity: Option<Identity>,
}

/// PEM files of a certificate and its key.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The certificate and any intermediate certificates.
    pub certificate: PathBuf,
    /// The certificate's private key.
    pub key: PathBuf,
}

/// The API server of a Kubernetes cluster, and this process's account there.
#[derive(Clone, Debug)]
pub struct ClusterAccess {
    /// The URL of the API server, `https` or `http`.
    pub server: Url,
    /// The file with the token for the server. It is read for each request, because it rotates.
    pub token: Option<PathBuf>,
    /// The certificates of the authorities that sign the server's certificate.
    pub authority: Option<PathBuf>,
}

impl ClusterAccess {
    /// Returns the cluster of this pod, given its environment variables. Returns `None` outside of
    /// a pod.
    ///
    /// # Errors
    /// [`DiscoveryError::Cluster`] if a variable of Kubernetes has an invalid value.
    pub fn from_pod_env(
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, DiscoveryError> {
        let Some(host) = variable(HOST_VARIABLE) else { return Ok(None) };
        let Some(port) = variable(PORT_VARIABLE) else { return Ok(None) };
        let port: u16 = port
            .parse()
            .map_err(|_| DiscoveryError::Cluster { variable: PORT_VARIABLE, value: port })?;
        let url_host = match host.parse::<Ipv6Addr>() {
            Ok(ip) => format!("[{ip}]"),
            Err(_) => host.clone(),
        };
        let invalid = |_| DiscoveryError::Cluster { variable: HOST_VARIABLE, value: host.clone() };
        let server = Url::parse(&format!("https://{url_host}:{port}/")).map_err(invalid)?;
        let file = |name: &str| Some(Path::new(SERVICE_ACCOUNT).join(name));
        Ok(Some(Self { server, token: file("token"), authority: file("ca.crt") }))
    }

    /// Returns the files for TLS connections to the API server.
    pub(crate) fn tls(&self) -> Tls {
        Tls { authority: self.authority.clone(), identity: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(host: &str, port: &str) -> Result<Option<ClusterAccess>, DiscoveryError> {
        let values = [(HOST_VARIABLE, host), (PORT_VARIABLE, port)];
        ClusterAccess::from_pod_env(&|name| {
            let value = values.iter().find(|(known, _)| *known == name)?.1;
            (!value.is_empty()).then(|| value.to_owned())
        })
    }

    #[test]
    fn cluster_is_read_from_pod_environment() {
        let access = cluster("10.0.0.1", "443").unwrap().unwrap();
        assert_eq!(access.server.as_str(), "https://10.0.0.1/");
        assert_eq!(
            access.token.unwrap(),
            Path::new("/var/run/secrets/kubernetes.io/serviceaccount/token")
        );
        assert_eq!(
            access.authority.unwrap(),
            Path::new("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")
        );
        assert_eq!(
            cluster("fd00::1", "6443").unwrap().unwrap().server.as_str(),
            "https://[fd00::1]:6443/"
        );
        assert!(cluster("", "443").unwrap().is_none());
        assert!(matches!(
            cluster("10.0.0.1", "x"),
            Err(DiscoveryError::Cluster { variable: PORT_VARIABLE, .. })
        ));
        assert!(matches!(
            cluster("a b", "443"),
            Err(DiscoveryError::Cluster { variable: HOST_VARIABLE, .. })
        ));
    }
}
