//! Calls and streams with bounds of time and bytes.

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
use crate::lines::{LONGEST_LINE, Lines};
use crate::{DiscoveryError, Tls};

/// How long a connection may take to be made, and a call to be answered.
pub(crate) const CALL_WITHIN: Duration = Duration::from_secs(5);
/// The most bytes of an answer that is no stream.
const LONGEST_ANSWER: usize = 16 << 20;
/// The most bytes of a server's words on what went wrong that are shown.
const LONGEST_MESSAGE: usize = 300;

/// A client with connections of its own. Reads the files of `tls`.
pub(crate) fn client(tls: &Tls) -> Result<Client, DiscoveryError> {
    // No proxies: etcd and the API server are beside us. No redirects: a token must not follow one.
    // HTTP/1.1, so that a watch has a connection of its own and calls beside it are never behind
    // it.
    let client = Client::builder()
        .tls_backend_preconfigured(config(tls)?)
        .http1_only()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .referer(false)
        .user_agent(concat!("chiasm/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CALL_WITHIN);
    client.build().map_err(|error| DiscoveryError::Tls(error.to_string()))
}

/// As [`client`], beside the async threads.
pub(crate) async fn new_client(tls: &Tls) -> Result<Client, Failure> {
    let tls = tls.clone();
    match tokio::task::spawn_blocking(move || client(&tls)).await {
        Ok(client) => Ok(client?),
        Err(error) => Err(DiscoveryError::Tls(error.to_string()).into()),
    }
}

fn config(tls: &Tls) -> Result<ClientConfig, DiscoveryError> {
    let mut roots = RootCertStore::empty();
    match &tls.authority {
        Some(path) => {
            let (added, _) = roots.add_parsable_certificates(certificates(path)?);
            if added == 0 {
                let reason = "it has no certificate of an authority".to_owned();
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

/// The whole answer to a request, within `limit` from now.
pub(crate) async fn answer(request: RequestBuilder, limit: Duration) -> Result<Bytes, Failure> {
    let whole = async {
        let response = successful(request.send().await?).await?;
        bounded(response, LONGEST_ANSWER).await
    };
    timeout(limit, whole).await.unwrap_or(Err(Failure::Silent(limit)))
}

/// An answer that goes on for as long as there is something to tell. Its head is there within
/// `limit`.
pub(crate) async fn stream(
    request: RequestBuilder,
    limit: Duration,
) -> Result<LineStream, Failure> {
    let head = async { successful(request.send().await?).await };
    let response = timeout(limit, head).await.unwrap_or(Err(Failure::Silent(limit)))?;
    Ok(LineStream { response, lines: Lines::default() })
}

async fn successful(response: Response) -> Result<Response, Failure> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    // What it says is only for people: a status without words is fine.
    let body = bounded(response, LONGEST_ANSWER).await.unwrap_or_default();
    Err(Failure::Refused { status: status.as_u16(), message: words(&body) })
}

/// What a refusal says: the `message` of both servers' errors, or its text.
fn words(body: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    struct Refusal {
        message: String,
    }
    let text = match serde_json::from_slice::<Refusal>(body) {
        Ok(refusal) => refusal.message,
        Err(_) => String::from_utf8_lossy(&body[..body.len().min(LONGEST_MESSAGE)]).into_owned(),
    };
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(LONGEST_MESSAGE)
        .collect::<String>()
        .trim()
        .to_owned()
}

async fn bounded(mut response: Response, most: usize) -> Result<Bytes, Failure> {
    let mut body = bytes::BytesMut::new();
    while let Some(piece) = response.chunk().await? {
        if body.len() + piece.len() > most {
            return Err(Failure::TooLong(most));
        }
        body.extend_from_slice(&piece);
    }
    Ok(body.freeze())
}

/// An answer that comes line by line.
#[derive(Debug)]
pub(crate) struct LineStream {
    response: Response,
    lines: Lines,
}

impl LineStream {
    /// The next line; none at an orderly end. No line is lost when the future is dropped.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            let line = self.lines.next().map_err(|_| Failure::TooLong(LONGEST_LINE))?;
            if line.is_some() {
                return Ok(line);
            }
            match self.response.chunk().await? {
                Some(piece) => self.lines.push(&piece),
                None if self.lines.has_rest() => {
                    return Err(Failure::Unreachable("it was cut within a line".to_owned()));
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
    fn files_that_are_no_certificates_are_named() {
        let folder = TempDir::new().unwrap();
        let (missing, empty) = (folder.path().join("missing.pem"), folder.path().join("empty.pem"));
        std::fs::write(&empty, "nothing").unwrap();
        let identity =
            |path: &Path| Some(Identity { certificate: path.to_owned(), key: path.to_owned() });
        for (tls, name) in [
            (Tls { authority: Some(missing.clone()), identity: None }, "missing.pem"),
            (Tls { authority: Some(empty.clone()), identity: None }, "empty.pem"),
            (Tls { authority: None, identity: identity(&missing) }, "missing.pem"),
            (Tls { authority: None, identity: identity(&empty) }, "empty.pem"),
        ] {
            let error = client(&tls).unwrap_err();
            assert!(
                matches!(&error, DiscoveryError::Certificates { path, .. } if path.ends_with(name)),
                "{error}"
            );
        }
        assert!(client(&Tls::default()).is_ok());
    }

    #[test]
    fn refusals_are_told_in_the_words_of_the_server_as_one_short_line() {
        assert_eq!(words(br#"{"error":"x","message":"no leader","code":14}"#), "no leader");
        assert_eq!(words(b"404 page\nnot found\n"), "404 page not found");
        assert_eq!(words(&[b'a'; 5000]).len(), LONGEST_MESSAGE);
        assert_eq!(words(b"\xff"), "\u{fffd}");
    }
}
