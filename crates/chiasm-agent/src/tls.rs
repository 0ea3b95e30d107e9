//! TLS between frontends and agents. Both sides present certificates, which are reloaded when their
//! files change.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// The minimum interval between two checks of the files, which are made before a connection.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);
/// The maximum size of each file, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// The ALPN name of HTTP/2.
const PROTOCOL: &[u8] = b"h2";

/// The reason why certificates can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file can't be read, or has more than 1 MiB.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// A file lacks what it should contain.
    #[error("{path} has no {what} in PEM form: {source}")]
    Pem {
        /// The file.
        path: PathBuf,
        /// The expected content.
        what: &'static str,
        /// The error.
        source: pem::Error,
    },
    /// The key does not match the certificate, or they are of an unsupported kind.
    #[error("the certificate {certificate} and the key {key} can't be used: {source}")]
    Pair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// The error.
        source: rustls::Error,
    },
    /// A certificate that can't be an authority's.
    #[error("{path} has a certificate that can't be an authority's: {reason}")]
    Authority {
        /// The file.
        path: PathBuf,
        /// The error.
        reason: String,
    },
    /// The name that agents should have is not valid in a certificate.
    #[error("'{0}' is neither a host name nor an address")]
    Name(String),
}

/// The TLS settings of one side: its certificate, and how it verifies the other side.
#[derive(Debug)]
pub struct AgentTls {
    files: Files,
    /// The name that agents' certificates must have; `None` for the host that is connected to.
    agents: Option<ServerName<'static>>,
    current: Mutex<LoadedFiles>,
}

#[derive(Clone, Debug)]
struct Files {
    certificate: PathBuf,
    key: PathBuf,
    authorities: PathBuf,
}

/// The files as they were last loaded.
#[derive(Debug)]
struct LoadedFiles {
    contents: Contents,
    configs: TlsConfigs,
    checked_at: Instant,
    /// The error of the last check, if there was one.
    error: Option<String>,
}

/// The bytes of certificate, key and authorities.
type Contents = [Vec<u8>; 3];

/// The TLS configurations for both sides of a connection.
#[derive(Clone, Debug)]
pub(crate) struct TlsConfigs {
    pub(crate) server: Arc<ServerConfig>,
    pub(crate) client: Arc<ClientConfig>,
}

impl AgentTls {
    /// Loads PEM files: the certificate followed by its chain; its key; and the authorities of
    /// which one must have signed the other side's certificate.
    ///
    /// A frontend also requires an agent's certificate to name `agents` or, without it, the host
    /// that it connects to.
    ///
    /// # Errors
    /// [`TlsError`] if one of the files has invalid content.
    pub fn load(
        certificate: PathBuf,
        key: PathBuf,
        authorities: PathBuf,
        agents: Option<String>,
    ) -> Result<Arc<Self>, TlsError> {
        let parsed =
            agents.map(|name| ServerName::try_from(name.clone()).map_err(|_| TlsError::Name(name)));
        let agents = parsed.transpose()?;
        let files = Files { certificate, key, authorities };
        let contents = files.read()?;
        let configs = files.configs(&contents)?;
        let loaded = LoadedFiles { contents, configs, checked_at: Instant::now(), error: None };
        Ok(Arc::new(Self { files, agents, current: Mutex::new(loaded) }))
    }

    /// Returns the name that the certificate of an agent at this host must have.
    pub(crate) fn server_name(&self, host: &str) -> io::Result<ServerName<'static>> {
        match &self.agents {
            Some(name) => Ok(name.clone()),
            None => ServerName::try_from(host.to_owned()).map_err(io::Error::other),
        }
    }

    /// Returns the configurations for a new connection. If the files can't be used, a warning is
    /// logged and the previous ones stay.
    pub(crate) async fn configs(self: &Arc<Self>) -> TlsConfigs {
        if self.current().checked_at.elapsed() < RELOAD_INTERVAL {
            return self.current().configs.clone();
        }
        self.reload().await;
        self.current().configs.clone()
    }

    /// Reloads the files now. If they can't be used, a warning is logged and the previous ones
    /// stay.
    pub async fn reload(self: &Arc<Self>) {
        let this = self.clone();
        // Fails only if the runtime shuts down.
        let _ = tokio::task::spawn_blocking(move || this.reload_blocking()).await;
    }

    /// Loads the files if they have changed.
    fn reload_blocking(&self) {
        let read = self.files.read();
        let mut current = self.current();
        current.checked_at = Instant::now();
        let loaded = match read {
            Ok(contents) if contents == current.contents => {
                current.error = None;
                return;
            }
            Ok(contents) => self.files.configs(&contents).map(|configs| (contents, configs)),
            Err(error) => Err(error),
        };
        match loaded {
            Ok((contents, configs)) => {
                tracing::info!(
                    certificate = %self.files.certificate.display(),
                    "the certificate was reloaded"
                );
                current.contents = contents;
                current.configs = configs;
                current.error = None;
            }
            Err(error) => {
                let error = error.to_string();
                if current.error.as_ref() != Some(&error) {
                    tracing::warn!(
                        error,
                        "the new certificate can't be used; the old one stays in use"
                    );
                    current.error = Some(error);
                }
            }
        }
    }

    fn current(&self) -> MutexGuard<'_, LoadedFiles> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Files {
    fn read(&self) -> Result<Contents, TlsError> {
        Ok([read(&self.certificate)?, read(&self.key)?, read(&self.authorities)?])
    }

    fn configs(&self, [certificate, key, authorities]: &Contents) -> Result<TlsConfigs, TlsError> {
        let chain = chain(&self.certificate, certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|source| TlsError::Pem {
            path: self.key.clone(),
            what: "private key",
            source,
        })?;
        let authority_error =
            |reason: String| TlsError::Authority { path: self.authorities.clone(), reason };
        let mut roots = RootCertStore::empty();
        for certificate in self::chain(&self.authorities, authorities)? {
            roots.add(certificate).map_err(|error| authority_error(error.to_string()))?;
        }
        let roots = Arc::new(roots);
        let provider = Arc::new(ring::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let verifier =
            verifier.map_err(|error: VerifierBuilderError| authority_error(error.to_string()))?;
        let pair_error = |source| TlsError::Pair {
            certificate: self.certificate.clone(),
            key: self.key.clone(),
            source,
        };
        let server = server(provider.clone(), verifier, chain.clone(), key.clone_key())
            .map_err(pair_error)?;
        let client = client(provider, roots, chain, key).map_err(pair_error)?;
        Ok(TlsConfigs { server: Arc::new(server), client: Arc::new(client) })
    }
}

fn server(
    provider: Arc<CryptoProvider>,
    verifier: Arc<dyn rustls::server::danger::ClientCertVerifier>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<ServerConfig, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    Ok(config)
}

fn client(
    provider: Arc<CryptoProvider>,
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<ClientConfig, rustls::Error> {
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)?;
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    Ok(config)
}

fn chain(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let chain = chain
        .and_then(|chain| if chain.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(chain) });
    chain.map_err(|source| TlsError::Pem { path: path.to_owned(), what: "certificate", source })
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    let file_error = |source| TlsError::File { path: path.to_owned(), source };
    let length = fs::metadata(path).map_err(file_error)?.len();
    if length > MAX_FILE_BYTES {
        return Err(file_error(io::Error::other("the file has more than 1 MiB")));
    }
    fs::read(path).map_err(file_error)
}
