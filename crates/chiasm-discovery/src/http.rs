//! HTTP calls and streams with timeouts and size limits.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use reqwest::{Client, RequestBuilder, Response};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tokio::time::timeout;

use crate::failure::Failure;
use crate::lines::{Lines, MAX_LINE_BYTES};
use crate::{DiscoveryError, Tls};

/// The timeout for connecting, and for a call.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum size of an answer that is not a stream.
const MAX_ANSWER_BYTES: usize = 16 << 20;
/// The maximum length of a server's error message, in bytes and in characters.
const MAX_MESSAGE_LEN: usize = 300;

/// Creates a client with its own connections. Blocks while it reads the files of `tls`.
pub(crate) fn build_client_blocking(tls: &Tls) -> Result<Client, DiscoveryError> {
    // No proxies, because etcd and the API server are in the same network. No redirects, because a
    // token must not follow one. HTTP/1.1, so that a watch has its own connection and does not
    // delay calls.
    let client = Client::builder()
        .tls_backend_preconfigured(config(tls)?)
        .http1_only()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .referer(false)
        .user_agent(concat!("chiasm/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CALL_TIMEOUT);
    client.build().map_err(|error| DiscoveryError::Tls(error.to_string()))
}

/// Creates a client as [`build_client_blocking`] does, on a blocking thread.
pub(crate) async fn build_client(tls: &Tls) -> Result<Client, Failure> {
    let tls = tls.clone();
    match tokio::task::spawn_blocking(move || build_client_blocking(&tls)).await {
        Ok(client) => Ok(client?),
        Err(error) => Err(DiscoveryError::Tls(error.to_string()).into()),
    }
}

/// Creates a TLS configuration with ring.
fn config(tls: &Tls) -> Result<ClientConfig, DiscoveryError> {
    let mut roots = RootCertStore::empty();
    match &tls.authority {
        Some(path) => {
            let (added, _) = roots.add_parsable_certificates(certificates(path)?);
            if added == 0 {
                let reason = "the file has no CA certificate".to_owned();
                return Err(DiscoveryError::Certificates { path: path.clone(), reason });
            }
        }
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
    }
    let problem = |error: rustls::Error| DiscoveryError::Tls(error.to_string());
    let config =
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(problem)?
            .with_root_certificates(roots);
    let mut config = match &tls.identity {
        Some(identity) => {
            let key = PrivateKeyDer::from_pem_file(&identity.key)
                .map_err(|error| unusable(&identity.key, &error))?;
            config
                .with_client_auth_cert(certificates(&identity.certificate)?, key)
                .map_err(problem)?
        }
        None => config.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"http/1.1".into()];
    Ok(config)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, DiscoveryError> {
    let certificates = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    certificates.map_err(|error| unusable(path, &error))
}

fn unusable(path: &Path, error: &rustls::pki_types::pem::Error) -> DiscoveryError {
    DiscoveryError::Certificates { path: path.to_owned(), reason: error.to_string() }
}

/// Sends a request and returns the body of the answer. `limit` is the timeout for all of it.
pub(crate) async fn call(request: RequestBuilder, limit: Duration) -> Result<Bytes, Failure> {
    let whole = async {
        let response = check_status(request.send().await?).await?;
        read_body(response, MAX_ANSWER_BYTES).await
    };
    timeout(limit, whole).await.unwrap_or(Err(Failure::Silent(limit)))
}

/// Sends a request whose answer is an endless stream of lines. `limit` is the timeout for the head
/// of the answer.
pub(crate) async fn open_stream(
    request: RequestBuilder,
    limit: Duration,
) -> Result<LineStream, Failure> {
    let head = async { check_status(request.send().await?).await };
    let response = timeout(limit, head).await.unwrap_or(Err(Failure::Silent(limit)))?;
    Ok(LineStream { response, lines: Lines::default() })
}

/// Returns an error for a response without a success status.
async fn check_status(response: Response) -> Result<Response, Failure> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    // The message is only informative, so its absence is no error.
    let body = read_body(response, MAX_ANSWER_BYTES).await.unwrap_or_default();
    Err(Failure::Refused { status: status.as_u16(), message: error_message(&body) })
}

/// Returns the message of an error's body: the field `message`, which both servers have, or the
/// text.
fn error_message(body: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    struct ErrorBody {
        message: String,
    }
    let text = match serde_json::from_slice::<ErrorBody>(body) {
        Ok(error) => error.message,
        Err(_) => String::from_utf8_lossy(&body[..body.len().min(MAX_MESSAGE_LEN)]).into_owned(),
    };
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(MAX_MESSAGE_LEN)
        .collect::<String>()
        .trim()
        .to_owned()
}

/// Reads a body of at most `max_bytes`.
async fn read_body(mut response: Response, max_bytes: usize) -> Result<Bytes, Failure> {
    let mut body = bytes::BytesMut::new();
    while let Some(piece) = response.chunk().await? {
        if body.len() + piece.len() > max_bytes {
            return Err(Failure::TooLong(max_bytes));
        }
        body.extend_from_slice(&piece);
    }
    Ok(body.freeze())
}

/// An answer that is a stream of lines.
#[derive(Debug)]
pub(crate) struct LineStream {
    response: Response,
    lines: Lines,
}

impl LineStream {
    /// Returns the next line, or `None` at the end of the stream. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            let line = self.lines.next().map_err(|_| Failure::TooLong(MAX_LINE_BYTES))?;
            if line.is_some() {
                return Ok(line);
            }
            match self.response.chunk().await? {
                Some(piece) => self.lines.push(&piece),
                None if self.lines.has_rest() => {
                    return Err(Failure::Unreachable(
                        "the stream was cut within a line".to_owned(),
                    ));
                }
                None => return Ok(None),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::Identity;

    #[test]
    fn unusable_certificate_file_is_named() {
        let folder = TempDir::new().unwrap();
        let missing = folder.path().join("missing.pem");
        let empty = folder.path().join("empty.pem");
        std::fs::write(&empty, "nothing").unwrap();
        let identity =
            |path: &Path| Some(Identity { certificate: path.to_owned(), key: path.to_owned() });
        for (tls, name) in [
            (Tls { authority: Some(missing.clone()), identity: None }, "missing.pem"),
            (Tls { authority: Some(empty.clone()), identity: None }, "empty.pem"),
            (Tls { authority: None, identity: identity(&missing) }, "missing.pem"),
            (Tls { authority: None, identity: identity(&empty) }, "empty.pem"),
        ] {
            let error = build_client_blocking(&tls).unwrap_err();
            assert!(
                matches!(&error, DiscoveryError::Certificates { path, .. } if path.ends_with(name)),
                "{error}"
            );
        }
        assert!(build_client_blocking(&Tls::default()).is_ok());
    }

    #[test]
    fn error_message_is_one_short_line() {
        let body = br#"{"error":"x","message":"no leader","code":14}"#;
        assert_eq!(error_message(body), "no leader");
        assert_eq!(error_message(b"404 page\nnot found\n"), "404 page not found");
        assert_eq!(error_message(&[b'a'; 5000]).len(), MAX_MESSAGE_LEN);
        assert_eq!(error_message(b"\xff"), "\u{fffd}");
    }
}
