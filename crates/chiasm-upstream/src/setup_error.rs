//! Errors of a server's address and files, before the server is asked.

use std::path::PathBuf;

use hyper::http::uri::InvalidUri;
use rustls::pki_types::pem;

use crate::server_key::KeyFileError;

/// A setting of a server that can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// The file of authorities that the server's certificate is checked against.
    #[error("{}: {source}", path.display())]
    Authorities {
        /// The file.
        path: PathBuf,
        /// The fault in it.
        source: AuthoritiesError,
    },
    /// The system's authorities can't be used.
    #[error(transparent)]
    Tls(#[from] rustls::Error),
    /// The file of the key that the server is shown.
    #[error(transparent)]
    Key(#[from] KeyFileError),
    /// The server's URL.
    #[error("{url}: {source}")]
    Url {
        /// The URL.
        url: String,
        /// The fault in it.
        source: InvalidUri,
    },
}

/// A file of authorities that can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuthoritiesError {
    /// It can't be read, or is no PEM.
    #[error(transparent)]
    Pem(#[from] pem::Error),
    /// It has a certificate that is no authority's.
    #[error(transparent)]
    Certificate(#[from] rustls::Error),
    /// It has none.
    #[error("it has no certificate")]
    Empty,
}
