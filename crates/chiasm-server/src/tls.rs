//! TLS: the server's certificate and its key, read again when their files change.

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

/// The interval at which the files are read to see whether they have changed. Their contents are
/// compared, as whoever renews certificates may exchange a symbolic link, or keep the files' times.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Most bytes of one of the files. A chain has some kB.
const MOST: u64 = 1 << 20;
/// The one protocol that is spoken within TLS, by its name in ALPN.
const PROTOCOL: &[u8] = b"http/1.1";

/// Why a certificate can't be served.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file can't be read.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file has more than 1 MiB, or is none.
    #[error("{0} is no file of at most 1 MiB")]
    NoSuchPem(PathBuf),
    /// The certificate's file has none, or a broken one.
    #[error("{path} has no chain of certificates in PEM form: {source}")]
    Chain {
        /// The file.
        path: PathBuf,
        /// The error.
        source: pem::Error,
    },
    /// The key's file has none that is not encrypted.
    #[error(
        "{path} has no private key in PEM form (PKCS #8, PKCS #1 or SEC 1, not encrypted): {source}"
    )]
    Key {
        /// The file.
        path: PathBuf,
        /// The error.
        source: pem::Error,
    },
    /// They are not of each other, or of a kind that is not known.
    #[error("the certificate {certificate} and the key {key} can't be served: {source}")]
    Pair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// The error.
        source: rustls::Error,
    },
    /// No thread could read the files.
    #[error("the certificate could not be read: {0}")]
    NoThread(#[from] tokio::task::JoinError),
}

/// The server's certificate, with the chain that proves it, and its key.
#[derive(Debug)]
pub struct Certificate {
    files: Files,
    current: RwLock<Current>,
}

#[derive(Debug)]
struct Current {
    /// Of both files.
    digest: blake3::Hash,
    /// It holds the sessions that clients may resume, too. So these end with the certificate.
    tls: Arc<ServerConfig>,
}

impl Certificate {
    /// Reads a certificate and its key from PEM files. The first certificate is the server's; each
    /// further one proves the one before it.
    ///
    /// # Errors
    /// [`CertificateError`] if a file can't be read or is not what it should be, or if the key is
    /// not the certificate's.
    pub fn load(certificate: PathBuf, key: PathBuf) -> Result<Self, CertificateError> {
        let files = Files { certificate, key };
        let current = RwLock::new(files.read()?.current(&files)?);
        Ok(Self { files, current })
    }

    /// Reads the files again for as long as this is waited for. New connections have what was read
    /// last; those that are open stay as they are. Of what can't be served a warning is logged,
    /// once.
    pub async fn follow(&self) {
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut told = None;
        loop {
            look.tick().await;
            match self.reload().await {
                Ok(_) => told = None,
                Err(error) => {
                    let error = error.to_string();
                    if told.as_ref() != Some(&error) {
                        tracing::warn!(%error, "the new certificate is not taken, the old one stays");
                        told = Some(error);
                    }
                }
            }
        }
    }

    /// Reads the files now. Returns whether they have changed.
    ///
    /// # Errors
    /// [`CertificateError`] if they can't be served. What was read before stays.
    pub async fn reload(&self) -> Result<bool, CertificateError> {
        let files = self.files.clone();
        let known = self.current.read().unwrap_or_else(PoisonError::into_inner).digest;
        let read = move || {
            let read = files.read()?;
            if read.digest() == known { Ok(None) } else { read.current(&files).map(Some) }
        };
        let Some(new) = tokio::task::spawn_blocking(read).await?? else { return Ok(false) };
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = new;
        tracing::info!(certificate = %self.files.certificate.display(), "the certificate has been read again");
        Ok(true)
    }

    /// Returns the configuration for a new connection.
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
        // The length, so that no byte can move from one file to the other unseen.
        digest
            .update(&self.certificate.len().to_le_bytes())
            .update(&self.certificate)
            .update(&self.key);
        digest.finalize()
    }

    fn current(&self, files: &Files) -> Result<Current, CertificateError> {
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
        Ok(Current { digest: self.digest(), tls: Arc::new(tls) })
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
    let fault = |source| CertificateError::File { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    // Opening a pipe would wait for whoever writes to it.
    if fs::metadata(path).map_err(fault)?.is_file() {
        File::open(path)
            .and_then(|file| file.take(MOST + 1).read_to_end(&mut bytes))
            .map_err(fault)?;
        if bytes.len() as u64 <= MOST {
            return Ok(bytes);
        }
    }
    Err(CertificateError::NoSuchPem(path.to_owned()))
}

#[cfg(test)]
pub(crate) mod tests;
