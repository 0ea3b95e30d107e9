//! Errors of a server's address and files, found before any request.

use std::path::PathBuf;

use hyper::http::uri::InvalidUri;
use rustls::pki_types::pem;

use crate::server_key::KeyFileError;

/// A setting of a server that can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// The file of CA certificates for the server's certificate is not usable.
    #[error("{}: {source}", path.display())]
    Authorities {
        /// The file.
        path: PathBuf,
        /// The error.
        source: AuthoritiesError,
    },
    /// The system's CA certificates can't be used.
    #[error(transparent)]
    Tls(#[from] rustls::Error),
    /// The API key file is not usable.
    #[error(transparent)]
    Key(#[from] KeyFileError),
    /// The server's URL is invalid.
    #[error("{url}: {source}")]
    Url {
        /// The URL.
        url: String,
        /// The error.
        source: InvalidUri,
    },
}

/// An error of a file of CA certificates.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuthoritiesError {
    /// The file can't be read or is not PEM.
    #[error(transparent)]
    Pem(#[from] pem::Error),
    /// A certificate in the file is not a CA's.
    #[error(transparent)]
    Certificate(#[from] rustls::Error),
    /// The file has no certificate.
    #[error("the file has no certificate")]
    Empty,
}
