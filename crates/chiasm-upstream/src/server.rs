//! Requests to one server, bounded in size and time.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use chiasm_backend::{DeathReason, JobError, PartialMessages};
use hyper::http::uri::PathAndQuery;
use hyper::{Method, Request, Uri};
use reqwest::header::{
    ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER,
};
use reqwest::{Response, StatusCode};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use rustls_platform_verifier::ConfigVerifierExt;
use tokio::time::timeout;

use crate::address::Upstream;
use crate::client::{Client, SendError, build_client, error_chain};
use crate::events::Events;
use crate::server_key::UpstreamKey;
use crate::setup_error::{AuthoritiesError, SetupError};

/// The header that selects one of a vLLM's engines, by its number among those of the server
/// (`_get_data_parallel_rank` in `entrypoints/generate/base/serving.py`).
const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// The maximum size of an answer that is read as a whole.
const MAX_BODY_BYTES: usize = 16 << 20;
/// The maximum number of bytes that are read of a refusal.
const MAX_REFUSAL_BYTES: usize = 64 << 10;
/// The pause after a 429 without `Retry-After`.
const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);
/// The deadline for an answer about the server itself.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// An error of a request to a server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestError {
    /// There is no connection, and nothing was sent.
    #[error("connecting failed: {0}")]
    NotConnected(String),
    /// The connection ended before the answer was complete.
    #[error("the connection was lost: {0}")]
    Lost(String),
    /// The server did not answer in time.
    #[error("no answer within {} s", QUERY_TIMEOUT.as_secs())]
    Late,
    /// The server refused the request.
    #[error("/{path} returned {status}: {message}")]
    Refused { status: StatusCode, path: &'static str, message: String },
    /// The answer is too long, or does not have the expected form.
    #[error("the answer of /{path} can't be read: {reason}")]
    Unreadable { path: &'static str, reason: String },
}

impl RequestError {
    /// Converts the error to the error of a job. The message does not contain the server's address,
    /// which clients must not see.
    pub(crate) fn into_job_error(self) -> JobError {
        match self {
            Self::NotConnected(_) => {
                JobError::NotTaken(DeathReason::new(format!("the server: {self}")))
            }
            Self::Lost(_) | Self::Late | Self::Refused { .. } | Self::Unreadable { .. } => {
                JobError::ServerFailed {
                    status: StatusCode::BAD_GATEWAY.as_u16(),
                    message: self.to_string(),
                }
            }
        }
    }
}

/// A client for one server. Clones share their connections.
#[derive(Clone)]
pub(crate) struct Server {
    client: Client,
    base: Uri,
    authorization: Option<Arc<UpstreamKey>>,
    /// The number of the engine that gets the requests, of a server with several.
    rank: Option<HeaderValue>,
    /// The unfinished long events of the server's answers.
    partial_messages: PartialMessages,
}

impl Server {
    /// Creates a client for the server at this address, and reads the files that `upstream` names.
    ///
    /// # Errors
    /// Returns [`SetupError`] if a file can't be used.
    pub(crate) fn new(upstream: &Upstream) -> Result<Self, SetupError> {
        let tls = match &upstream.ca_file {
            Some(path) => tls_trusting(path)
                .map_err(|source| SetupError::Authorities { path: path.clone(), source })?,
            None => ClientConfig::with_platform_verifier()?,
        };
        let authorization = upstream.api_key_file.clone().map(UpstreamKey::load).transpose()?;
        let url = upstream.base.as_str();
        Ok(Self {
            client: build_client(tls),
            base: url
                .parse::<Uri>()
                .map_err(|source| SetupError::Url { url: url.to_owned(), source })?,
            authorization: authorization.map(Arc::new),
            rank: upstream.rank.map(|rank| HeaderValue::from(rank.index)),
            partial_messages: PartialMessages::default(),
        })
    }

    /// Returns the key that is sent to the server, if there is one.
    pub(crate) fn key(&self) -> Option<Arc<UpstreamKey>> {
        self.authorization.clone()
    }

    /// Requests `path` and returns the body.
    pub(crate) async fn get(&self, path: &'static str) -> Result<Bytes, RequestError> {
        self.query(self.request(Method::GET, path), path).await
    }

    /// Sends a `POST` without a body and returns the body of the answer.
    pub(crate) async fn post_empty(&self, path: &'static str) -> Result<Bytes, RequestError> {
        self.query(self.request(Method::POST, path), path).await
    }

    /// Sends a JSON body with the headers of the client's request, and returns the head of the
    /// answer.
    pub(crate) async fn post(
        &self,
        path: &str,
        body: Bytes,
        headers: HeaderMap,
    ) -> Result<Response, RequestError> {
        let mut request = self.request(Method::POST, path);
        *request.body_mut() = body;
        request.headers_mut().extend(headers);
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(rank) = &self.rank {
            request.headers_mut().insert(RANK, rank.clone());
        }
        self.send(request).await
    }

    async fn query(
        &self,
        request: Request<Bytes>,
        path: &'static str,
    ) -> Result<Bytes, RequestError> {
        let answer = async { read_success(self.send(request).await?, path).await };
        timeout(QUERY_TIMEOUT, answer).await.map_err(|_| RequestError::Late)?
    }

    async fn send(&self, request: Request<Bytes>) -> Result<Response, RequestError> {
        self.client.send(request).await.map_err(|error| match error {
            SendError::NotConnected(message) => RequestError::NotConnected(message),
            SendError::Lost(message) => RequestError::Lost(message),
        })
    }

    fn request(&self, method: Method, path: &str) -> Request<Bytes> {
        let mut request = Request::new(Bytes::new());
        *request.method_mut() = method;
        *request.uri_mut() = self.uri(path);
        request.headers_mut().insert(ACCEPT, HeaderValue::from_static("*/*"));
        if let Some(key) = &self.authorization {
            request.headers_mut().insert(AUTHORIZATION, key.header());
        }
        request
    }

    /// Removes the server's address from its messages.
    pub(crate) fn redact(&self, text: &str) -> String {
        let Some(authority) = self.base.authority() else { return text.to_owned() };
        replace_name(&replace_name(text, authority.as_str()), authority.host())
    }

    /// Creates the event parser for one more answer.
    pub(crate) fn events(&self) -> Events {
        Events::new(&self.partial_messages)
    }

    /// Reads an unsuccessful answer within a deadline.
    pub(crate) async fn refusal(&self, response: Response) -> Refusal {
        let status = response.status();
        let retry_after = retry_after(response.headers(), SystemTime::now());
        let content_type = response
            .headers()
            .get(CONTENT_TYPE)
            .and_then(|kind| kind.to_str().ok())
            .map(str::to_owned);
        let body = read_prefix(response).await;
        let message = self.redact(&message(&body));
        Refusal { status, retry_after, message, content_type, body }
    }

    /// Joins `path` to the base, which ends with a slash.
    fn uri(&self, path: &str) -> Uri {
        let mut parts = self.base.clone().into_parts();
        let base = parts.path_and_query.as_ref().map_or("/", PathAndQuery::path);
        parts.path_and_query = format!("{base}{path}").parse().ok();
        Uri::from_parts(parts).unwrap_or_default()
    }
}

/// An unsuccessful answer.
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    retry_after: Option<Duration>,
    /// The server's message without its address.
    pub(crate) message: String,
    pub(crate) content_type: Option<String>,
    pub(crate) body: Bytes,
}

impl Refusal {
    /// Returns the error that the status stands for, as [`fault`] does.
    pub(crate) fn error(&self, is_about_model: bool) -> Option<JobError> {
        fault(self.status.as_u16(), self.retry_after, &self.message, is_about_model)
    }

    /// Returns `true` if a 404 is about a missing model rather than a missing path.
    pub(crate) fn names_model(&self) -> bool {
        let json: Option<serde_json::Value> = serde_json::from_slice(&self.body).ok();
        let error = json.as_ref().map(|json| json.get("error").unwrap_or(json));
        let param = error.and_then(|error| error.get("param")?.as_str());
        let code = error.and_then(|error| error.get("code")?.as_str());
        param == Some("model")
            || code == Some("model_not_found")
            || self.message.to_ascii_lowercase().contains("model")
    }
}

/// Returns the error that an unsuccessful status stands for. Returns `None` for a 4xx that is the
/// request's own fault, and for a 404 that is not about the model.
pub(crate) fn fault(
    status: u16,
    retry_after: Option<Duration>,
    message: &str,
    is_about_model: bool,
) -> Option<JobError> {
    let message = message.to_owned();
    match (status, retry_after) {
        (401 | 403, _) => Some(JobError::KeyRefused { status, message }),
        (429, retry_after) => Some(JobError::Overloaded {
            status,
            retry_after: retry_after.unwrap_or(DEFAULT_RETRY_AFTER),
            message,
        }),
        (503, Some(retry_after)) => Some(JobError::Overloaded { status, retry_after, message }),
        (404, _) if is_about_model => Some(JobError::UnknownModel { message }),
        (400..=499, _) => None,
        // Includes redirects: following one could send the key to another server.
        _ => Some(JobError::ServerFailed { status, message }),
    }
}

/// Parses `Retry-After`, which is a number of seconds or a date.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = value.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

/// Replaces a server's name in a message, except within longer words: the host name `vllm` does not
/// change `vllm-7b`.
fn replace_name(text: &str, name: &str) -> String {
    let is_word_char = |char: char| char.is_alphanumeric() || matches!(char, '-' | '_');
    let mut replaced = String::with_capacity(text.len());
    let mut copied = 0;
    for (begin, _) in text.match_indices(name) {
        let end = begin + name.len();
        if !text[..begin].ends_with(is_word_char) && !text[end..].starts_with(is_word_char) {
            replaced.push_str(&text[copied..begin]);
            replaced.push_str("the server");
            copied = end;
        }
    }
    replaced.push_str(&text[copied..]);
    replaced
}

/// Builds a TLS configuration that trusts only the CA certificates in a file.
fn tls_trusting(path: &Path) -> Result<ClientConfig, AuthoritiesError> {
    let mut authorities = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(path)? {
        authorities.add(certificate?)?;
    }
    if authorities.is_empty() {
        return Err(AuthoritiesError::Empty);
    }
    Ok(ClientConfig::builder().with_root_certificates(authorities).with_no_client_auth())
}

/// Reads the body of a successful answer.
async fn read_success(response: Response, path: &'static str) -> Result<Bytes, RequestError> {
    let status = response.status();
    let body = read_body(response, path).await?;
    if !status.is_success() {
        return Err(RequestError::Refused { status, path, message: message(&body) });
    }
    Ok(body)
}

/// Reads a whole body of at most [`MAX_BODY_BYTES`].
async fn read_body(mut response: Response, path: &'static str) -> Result<Bytes, RequestError> {
    let mut body = BytesMut::new();
    while let Some(chunk) = response.chunk().await.map_err(body_error)? {
        if body.len() + chunk.len() > MAX_BODY_BYTES {
            return Err(RequestError::Unreadable {
                path,
                reason: format!("more than {MAX_BODY_BYTES} bytes"),
            });
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body.freeze())
}

/// Reads the beginning of a refusal within a deadline. The size is bounded, because thousands of
/// requests may be refused at once.
async fn read_prefix(mut response: Response) -> Bytes {
    let mut body = BytesMut::new();
    let read = async {
        while body.len() < MAX_REFUSAL_BYTES
            && let Ok(Some(chunk)) = response.chunk().await
        {
            body.extend_from_slice(&chunk);
        }
    };
    // The bytes that arrived before the deadline are enough.
    let _ = timeout(QUERY_TIMEOUT, read).await;
    body.freeze()
}

/// Returns the message of an error body: `{"error": {"message": …}}` or `{"error": …}`, or the
/// beginning of the body. A proxy's HTML page is not shown.
fn message(body: &[u8]) -> String {
    /// The maximum number of characters of a message.
    const MAX_MESSAGE_CHARS: usize = 1000;
    let json: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let pointers = ["/error/message", "/message", "/error"];
    let text = json
        .as_ref()
        .and_then(|json| pointers.iter().find_map(|pointer| json.pointer(pointer)?.as_str()));
    let text = text.map_or_else(|| String::from_utf8_lossy(body), Into::into);
    if text.trim_start().starts_with('<') {
        return "it answered with an HTML page".to_owned();
    }
    text.chars().take(MAX_MESSAGE_CHARS).collect()
}

/// Converts an error of reading a body. The URL is stripped: it may contain secrets.
pub(crate) fn body_error(error: reqwest::Error) -> RequestError {
    RequestError::Lost(error_chain(&error.without_url()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_below_the_base() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = |text: &str| Server::new(&text.parse().unwrap()).unwrap();
        assert_eq!(server("vllm+http://h:1").uri("version"), "http://h:1/version");
        assert_eq!(server("vllm+http://h:1/a/b").uri("v1/models"), "http://h:1/a/b/v1/models");
    }

    fn refusal(status: u16, retry_after: Option<u64>, body: &'static str) -> Refusal {
        Refusal {
            status: StatusCode::from_u16(status).unwrap(),
            retry_after: retry_after.map(Duration::from_secs),
            message: message(body.as_bytes()),
            content_type: None,
            body: Bytes::from_static(body.as_bytes()),
        }
    }

    #[test]
    fn status_decides_the_error() {
        let error = |status, retry_after| refusal(status, retry_after, "words").error(true);
        assert!(matches!(error(401, None), Some(JobError::KeyRefused { status: 401, .. })));
        assert!(matches!(error(403, Some(9)), Some(JobError::KeyRefused { status: 403, .. })));
        let after = |error| match error {
            Some(JobError::Overloaded { status, retry_after, .. }) => {
                (status, retry_after.as_secs())
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(after(error(429, Some(7))), (429, 7));
        assert_eq!(after(error(429, None)), (429, 1));
        assert_eq!(after(error(503, Some(30))), (503, 30));
        for status in [302, 500, 502, 503, 504] {
            assert!(matches!(error(status, None), Some(JobError::ServerFailed { .. })), "{status}");
        }
        assert!(matches!(error(404, None), Some(JobError::UnknownModel { .. })));
        assert!(refusal(404, None, "words").error(false).is_none());
        for status in [400, 409, 413, 415, 422] {
            assert!(error(status, None).is_none(), "{status}");
        }
    }

    #[test]
    fn html_page_is_not_shown() {
        let page = refusal(501, None, "\n<!DOCTYPE HTML><p>Unsupported method</p>");
        assert_eq!(page.message, "it answered with an HTML page");
        assert_eq!(refusal(501, None, "not < done").message, "not < done");
    }

    #[test]
    fn missing_model_differs_from_missing_path() {
        let vllm =
            r#"{"error":{"message":"The model `x` does not exist.","param":"model","code":404}}"#;
        let openai = r#"{"error":{"message":"gone","code":"model_not_found"}}"#;
        for body in [vllm, openai, "no model named x"] {
            assert!(refusal(404, None, body).names_model(), "{body}");
        }
        for body in [r#"{"detail":"Not Found"}"#, "404 page not found", ""] {
            assert!(!refusal(404, None, body).names_model(), "{body}");
        }
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let parse = |text: &'static str| {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, HeaderValue::from_static(text))]);
            retry_after(&headers, SystemTime::UNIX_EPOCH + Duration::from_secs(60))
        };
        assert_eq!(parse("12"), Some(Duration::from_secs(12)));
        assert_eq!(parse("Thu, 01 Jan 1970 00:01:30 GMT"), Some(Duration::from_secs(30)));
        assert_eq!(parse("Thu, 01 Jan 1970 00:00:10 GMT"), Some(Duration::ZERO));
        assert_eq!(parse("soon"), None);
        assert_eq!(retry_after(&HeaderMap::new(), SystemTime::UNIX_EPOCH), None);
    }

    #[test]
    fn server_address_is_removed_from_its_messages() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = Server::new(&"http://gpu1.rack:8000/v1".parse().unwrap()).unwrap();
        assert_eq!(
            server.redact("see http://gpu1.rack:8000/x or gpu1.rack"),
            "see http://the server/x or the server"
        );
        let server = Server::new(&"http://vllm:8000/v1".parse().unwrap()).unwrap();
        assert_eq!(
            server.redact("vllm: no model vllm-7b at vllm:8000"),
            "the server: no model vllm-7b at the server"
        );
    }

    #[test]
    fn error_message_is_extracted_with_a_limit() {
        assert_eq!(message(br#"{"error": {"message": "no", "code": 400}}"#), "no");
        assert_eq!(message(br#"{"object": "error", "message": "no"}"#), "no");
        assert_eq!(message(br#"{"error": "unknown field"}"#), "unknown field");
        assert_eq!(message(b"Bad Gateway"), "Bad Gateway");
        assert_eq!(message(&[0xff; 5000]).chars().count(), 1000);
    }
}
