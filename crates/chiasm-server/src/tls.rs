//! The server's TLS certificate and key, reloaded when their files change.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::time::MissedTickBehavior;

/// The interval at which the files are checked for changes. Their contents are compared, as a
/// renewal may replace a symbolic link or keep the files' times.
const RELOAD_INTERVAL: Duration = Duration::from_secs(5);
/// The maximum size of each file, in bytes. A chain has some kB.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// The only protocol offered in TLS, by its ALPN name.
const PROTOCOL: &[u8] = b"http/1.1";

/// The reason why a certificate can't be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file can't be read.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// A path is not a regular file, or its file has more than 1 MiB.
    #[error("{0} is not a regular file of at most 1 MiB")]
    InvalidFile(PathBuf),
    /// The certificate's file has no valid chain.
    #[error("{path} has no chain of certificates in PEM form: {source}")]
    Chain {
        /// The file.
        path: PathBuf,
        /// The error.
        source: pem::Error,
    },
    /// The key's file has no unencrypted key.
    #[error(
        "{path} has no private key in PEM form (PKCS #8, PKCS #1 or SEC 1, not encrypted): {source}"
    )]
    Key {
        /// The file.
        path: PathBuf,
        /// The error.
        source: pem::Error,
    },
    /// The certificate and the key do not match, or are of an unsupported kind.
    #[error("the certificate {certificate} and the key {key} can't be used: {source}")]
    Pair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// The error.
        source: rustls::Error,
    },
    /// The blocking task that reads the files failed.
    #[error("the certificate could not be read: {0}")]
    ReadTask(#[from] tokio::task::JoinError),
}

/// The server's certificate with its chain and key.
#[derive(Debug)]
pub struct Certificate {
    files: Files,
    current: RwLock<LoadedCertificate>,
}

#[derive(Debug)]
struct LoadedCertificate {
    /// The digest of both files.
    digest: blake3::Hash,
    /// The TLS configuration. It also holds the sessions that clients may resume, so these end with
    /// the certificate.
    tls: Arc<ServerConfig>,
}

impl Certificate {
    /// Loads a certificate and its key from PEM files. The first certificate is the server's; each
    /// further certificate certifies its predecessor.
    ///
    /// # Errors
    /// [`CertificateError`] if a file can't be read or has invalid content, or if the key does not
    /// match the certificate.
    pub fn load(certificate: PathBuf, key: PathBuf) -> Result<Self, CertificateError> {
        let files = Files { certificate, key };
        let current = RwLock::new(files.read()?.parse(&files)?);
        Ok(Self { files, current })
    }

    /// Reloads the files periodically; never returns. New connections use the latest valid
    /// certificate, and open ones keep theirs. Each new error is logged once as a warning.
    pub async fn follow(&self) {
        let mut interval = tokio::time::interval(RELOAD_INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut logged = None;
        loop {
            interval.tick().await;
            let Err(error) = self.reload().await else {
                logged = None;
                continue;
            };
            let error = error.to_string();
            if logged.as_ref() != Some(&error) {
                tracing::warn!(%error, "the new certificate can't be used; the old one stays in use");
                logged = Some(error);
            }
        }
    }

    /// Reloads the files now. Returns `true` if they have changed.
    ///
    /// # Errors
    /// [`CertificateError`] if they can't be used. The previous certificate stays.
    pub async fn reload(&self) -> Result<bool, CertificateError> {
        let files = self.files.clone();
        let known = self.current.read().unwrap_or_else(PoisonError::into_inner).digest;
        let read = move || {
            let read = files.read()?;
            if read.digest() == known { Ok(None) } else { read.parse(&files).map(Some) }
        };
        let Some(new) = tokio::task::spawn_blocking(read).await?? else { return Ok(false) };
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = new;
        tracing::info!(
            certificate = %self.files.certificate.display(),
            "the certificate was reloaded"
        );
        Ok(true)
    }

    /// Returns the TLS configuration for a new connection.
    pub(crate) fn current(&self) -> Arc<ServerConfig> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).tls.clone()
    }
}

#[derive(Clone, Debug)]
struct Files {
    certificate: PathBuf,
    key: PathBuf,
}

/// The contents of both files.
struct Pems {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl Files {
    fn read(&self) -> Result<Pems, CertificateError> {
        Ok(Pems { certificate: read(&self.certificate)?, key: read(&self.key)? })
    }
}

impl Pems {
    fn digest(&self) -> blake3::Hash {
        let mut digest = blake3::Hasher::new();
        // The length is hashed, so that moving bytes from one file to the other changes the digest.
        digest
            .update(&self.certificate.len().to_le_bytes())
            .update(&self.certificate)
            .update(&self.key);
        digest.finalize()
    }

    fn parse(&self, files: &Files) -> Result<LoadedCertificate, CertificateError> {
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&self.certificate).collect();
        let chain = chain.and_then(|chain| {
            if chain.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(chain) }
        });
        let chain = chain.map_err(|source| CertificateError::Chain {
            path: files.certificate.clone(),
            source,
        })?;
        let key = PrivateKeyDer::from_pem_slice(&self.key);
        let key =
            key.map_err(|source| CertificateError::Key { path: files.key.clone(), source })?;
        let tls = config(chain, key).map_err(|source| {
            let certificate = files.certificate.clone();
            let key = files.key.clone();
            CertificateError::Pair { certificate, key, source }
        })?;
        Ok(LoadedCertificate { digest: self.digest(), tls: Arc::new(tls) })
    }
}

fn config(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<ServerConfig, rustls::Error> {
    let mut tls = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    tls.alpn_protocols = vec![PROTOCOL.to_vec()];
    Ok(tls)
}

fn read(path: &Path) -> Result<Vec<u8>, CertificateError> {
    let file_error = |source| CertificateError::File { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    // Opening a pipe would block until something opens it for writing.
    if fs::metadata(path).map_err(file_error)?.is_file() {
        File::open(path)
            .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes))
            .map_err(file_error)?;
        if bytes.len() as u64 <= MAX_FILE_BYTES {
            return Ok(bytes);
        }
    }
    Err(CertificateError::InvalidFile(path.to_owned()))
}

#[cfg(test)]
pub(crate) mod tests;
