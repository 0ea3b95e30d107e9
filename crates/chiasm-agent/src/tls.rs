//! TLS between frontends and agents. Both show certificates, which are read again when their files
//! have changed.

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

/// The files are looked at before a connection is made, but no more often than this.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Most bytes of one of the files.
const MOST: u64 = 1 << 20;
/// The name of HTTP/2 in ALPN.
const PROTOCOL: &[u8] = b"h2";

/// Why certificates can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file can't be read, or has more than 1 MiB.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file has not what it is for.
    #[error("{path} has no {what} in PEM form: {source}")]
    Pem {
        /// The file.
        path: PathBuf,
        /// What it should have.
        what: &'static str,
        /// What is wrong with it.
        source: pem::Error,
    },
    /// The key is not the certificate's, or they are of a kind that is not known.
    #[error("the certificate {certificate} and the key {key} can't be used: {source}")]
    Pair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// What is wrong with them.
        source: rustls::Error,
    },
    /// An authority's certificate is none.
    #[error("{path} has a certificate that can't be an authority's: {reason}")]
    Authority {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The name that agents are to have can't stand in a certificate.
    #[error("'{0}' is no name of a host, and no address")]
    Name(String),
}

/// What one side shows the other, and what it wants to see.
#[derive(Debug)]
pub struct AgentTls {
    files: Files,
    /// What agents' certificates must name, if not the host that is connected to.
    agents: Option<ServerName<'static>>,
    current: Mutex<Current>,
}

#[derive(Clone, Debug)]
struct Files {
    certificate: PathBuf,
    key: PathBuf,
    authorities: PathBuf,
}

/// What the files had when they were last taken over.
#[derive(Debug)]
struct Current {
    contents: Contents,
    sides: Sides,
    looked: Instant,
    /// What was wrong with the files when they were last looked at.
    wrong: Option<String>,
}

/// The bytes of certificate, key and authorities.
type Contents = [Vec<u8>; 3];

/// The settings of both sides of a connection.
#[derive(Clone, Debug)]
pub(crate) struct Sides {
    pub(crate) server: Arc<ServerConfig>,
    pub(crate) client: Arc<ClientConfig>,
}

impl AgentTls {
    /// Reads PEM files: the certificate, with those that prove it behind it; its key; and the
    /// authorities of which one must have signed the other side's certificate. A frontend also
    /// wants an agent's certificate to name `agents` or, without it, the host that it connects to.
    ///
    /// # Errors
    /// [`TlsError`] if one of them is not what it should be.
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
        let sides = files.sides(&contents)?;
        let current = Mutex::new(Current { contents, sides, looked: Instant::now(), wrong: None });
        Ok(Arc::new(Self { files, agents, current }))
    }

    /// What the certificate of an agent at this host must name.
    pub(crate) fn name_at(&self, host: &str) -> io::Result<ServerName<'static>> {
        match &self.agents {
            Some(name) => Ok(name.clone()),
            None => ServerName::try_from(host.to_owned()).map_err(io::Error::other),
        }
    }

    /// What a connection that is made now has. Files that can't be used leave what was there
    /// before, with a warning.
    pub(crate) async fn sides(self: &Arc<Self>) -> Sides {
        if self.current().looked.elapsed() < LOOK_EVERY {
            return self.current().sides.clone();
        }
        self.reload().await;
        self.current().sides.clone()
    }

    /// Reads the files now. Files that can't be used leave what was there before, with a warning.
    pub async fn reload(self: &Arc<Self>) {
        let this = self.clone();
        // It fails only with the runtime.
        let _ = tokio::task::spawn_blocking(move || this.look()).await;
    }

    /// Takes over what the files have now.
    fn look(&self) {
        let read = self.files.read();
        let mut current = self.current();
        current.looked = Instant::now();
        let new = match read {
            Ok(contents) if contents == current.contents => {
                current.wrong = None;
                return;
            }
            Ok(contents) => self.files.sides(&contents).map(|sides| (contents, sides)),
            Err(error) => Err(error),
        };
        match new {
            Ok((contents, sides)) => {
                tracing::info!(certificate = %self.files.certificate.display(), "the certificate has been read again");
                (current.contents, current.sides, current.wrong) = (contents, sides, None);
            }
            Err(error) => {
                let error = error.to_string();
                if current.wrong.as_ref() != Some(&error) {
                    tracing::warn!(error, "the new certificate is not taken, the old one stays");
                    current.wrong = Some(error);
                }
            }
        }
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Files {
    fn read(&self) -> Result<Contents, TlsError> {
        Ok([read(&self.certificate)?, read(&self.key)?, read(&self.authorities)?])
    }

    fn sides(&self, [certificate, key, authorities]: &Contents) -> Result<Sides, TlsError> {
        let chain = chain(&self.certificate, certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|source| TlsError::Pem {
            path: self.key.clone(),
            what: "private key",
            source,
        })?;
        let authority =
            |reason: String| TlsError::Authority { path: self.authorities.clone(), reason };
        let mut roots = RootCertStore::empty();
        for certificate in self::chain(&self.authorities, authorities)? {
            roots.add(certificate).map_err(|error| authority(error.to_string()))?;
        }
        let (roots, provider) = (Arc::new(roots), Arc::new(ring::default_provider()));
        let verifier =
            WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let verifier =
            verifier.map_err(|error: VerifierBuilderError| authority(error.to_string()))?;
        let pair = |source| TlsError::Pair {
            certificate: self.certificate.clone(),
            key: self.key.clone(),
            source,
        };
        let server =
            server(provider.clone(), verifier, chain.clone(), key.clone_key()).map_err(pair)?;
        let client = client(provider, roots, chain, key).map_err(pair)?;
        Ok(Sides { server: Arc::new(server), client: Arc::new(client) })
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
    let fault = |source| TlsError::File { path: path.to_owned(), source };
    let length = fs::metadata(path).map_err(fault)?.len();
    if length > MOST {
        return Err(fault(io::Error::other("it has more than 1 MiB")));
    }
    fs::read(path).map_err(fault)
}
