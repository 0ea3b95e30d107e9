//! Requests to one server, bounded in size and time.

use std::fs;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use chiasm_backend::Begun;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Certificate, Client, Response, StatusCode};
use tokio::time::timeout;
use url::Url;

use crate::address::Upstream;
use crate::events::Events;

/// Most bytes of an answer that is read as a whole.
const MOST: usize = 16 << 20;
/// Most bytes of what a server says of a request that it refuses.
const MOST_WORDS: usize = 64 << 10;
/// What a server may take to say something of itself.
const ASKED: Duration = Duration::from_secs(5);
/// What a connection may take to be made.
const CONNECTED: Duration = Duration::from_secs(3);

/// Why there is no answer, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AskError {
    /// Nobody answers there, or not in time.
    #[error("it can't be reached: {0}")]
    Unreachable(String),
    /// It refuses.
    #[error("it answers {status} to {path}: {message}")]
    Refused { status: StatusCode, path: &'static str, message: String },
    /// Its answer is too long, or not of the form that is expected.
    #[error("its answer to {path} can't be read: {reason}")]
    Unreadable { path: &'static str, reason: String },
}

/// One server. Clones share their connections.
#[derive(Clone)]
pub(crate) struct Server {
    client: Client,
    base: Url,
    authorization: Option<HeaderValue>,
    /// What it has begun to say.
    begun: Begun,
}

impl Server {
    /// The server of this address. Its files are read now.
    ///
    /// # Errors
    /// Words that say which file can't be used.
    pub(crate) fn new(upstream: &Upstream) -> Result<Self, String> {
        let client =
            Client::builder().no_proxy().connect_timeout(CONNECTED).redirect(reqwest::redirect::Policy::none());
        // Tokens are small and wanted at once.
        let mut client = client.tcp_nodelay(true).pool_max_idle_per_host(1024);
        if let Some(path) = &upstream.ca_file {
            let pem = fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
            let unusable = |error: reqwest::Error| format!("{}: {error}", path.display());
            let certificates = Certificate::from_pem_bundle(&pem).map_err(unusable)?;
            client = client.tls_certs_only(certificates);
        }
        let authorization = upstream.api_key_file.as_ref().map(|path| {
            let key = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
            let mut value = HeaderValue::from_str(&format!("Bearer {}", key.trim()))
                .map_err(|_| format!("{}: a key is a line of printable characters", path.display()))?;
            value.set_sensitive(true);
            Ok::<_, String>(value)
        });
        Ok(Self {
            client: client.build().map_err(|error| error.to_string())?,
            base: upstream.base.clone(),
            authorization: authorization.transpose()?,
            begun: Begun::default(),
        })
    }

    /// What it says at this path.
    pub(crate) async fn get(&self, path: &'static str) -> Result<Bytes, AskError> {
        let request = self.with_key(self.client.get(self.url(path))).timeout(ASKED);
        read(request.send().await.map_err(unreachable)?, path).await
    }

    /// What it says when this is asked of it, without a body.
    pub(crate) async fn post_empty(&self, path: &'static str) -> Result<Bytes, AskError> {
        let request = self.with_key(self.client.post(self.url(path))).timeout(ASKED);
        read(request.send().await.map_err(unreachable)?, path).await
    }

    /// Sends a body of JSON, with headers of the request that it is of. The answer is read by who asks.
    pub(crate) async fn post(&self, path: &str, body: Vec<u8>, headers: HeaderMap) -> Result<Response, AskError> {
        let request = self.with_key(self.client.post(self.url(path))).headers(headers);
        let request = request.header(CONTENT_TYPE, HeaderValue::from_static("application/json")).body(body);
        request.send().await.map_err(unreachable)
    }

    fn with_key(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.authorization {
            Some(key) => request.header(AUTHORIZATION, key.clone()),
            None => request,
        }
    }

    /// The events of one more answer.
    pub(crate) fn events(&self) -> Events {
        Events::counted(&self.begun)
    }

    /// The base, which ends with a slash, with this below it.
    fn url(&self, path: &str) -> Url {
        let mut url = self.base.clone();
        url.set_path(&format!("{}{path}", self.base.path()));
        url
    }
}

/// The body of an answer that is a success.
async fn read(response: Response, path: &'static str) -> Result<Bytes, AskError> {
    let status = response.status();
    let body = whole(response, path).await?;
    match status.is_success() {
        true => Ok(body),
        false => Err(AskError::Refused { status, path, message: message(&body) }),
    }
}

/// All of a body.
async fn whole(mut response: Response, path: &'static str) -> Result<Bytes, AskError> {
    let mut body = BytesMut::new();
    while let Some(chunk) = response.chunk().await.map_err(unreachable)? {
        if body.len() + chunk.len() > MOST {
            return Err(AskError::Unreadable { path, reason: format!("it has more than {MOST} bytes") });
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body.freeze())
}

/// The beginning of what a server says of a request that it refuses, as far as it comes soon: it may say anything to each of thousands.
pub(crate) async fn beginning(mut response: Response) -> Bytes {
    let mut body = BytesMut::new();
    let read = async {
        while body.len() < MOST_WORDS
            && let Ok(Some(chunk)) = response.chunk().await
        {
            body.extend_from_slice(&chunk);
        }
    };
    // What has come by then will do.
    let _ = timeout(ASKED, read).await;
    body.freeze()
}

/// What an answer that is an error says: `{"error": {"message": …}}` or `{"error": …}`, or its begin as it is.
pub(crate) fn message(body: &[u8]) -> String {
    /// Characters of a message that are passed on.
    const SHOWN: usize = 1000;
    let json: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let places = ["/error/message", "/message", "/error"];
    let text = json.as_ref().and_then(|json| places.iter().find_map(|place| json.pointer(place)?.as_str()));
    let text = text.map_or_else(|| String::from_utf8_lossy(body), Into::into);
    text.chars().take(SHOWN).collect()
}

/// The error without the address, which may be nobody's business, and with its cause.
pub(crate) fn unreachable(error: reqwest::Error) -> AskError {
    let error = error.without_url();
    let mut words = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        words = format!("{words}: {error}");
        cause = error.source();
    }
    AskError::Unreachable(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_below_the_base() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = |text: &str| Server::new(&text.parse().unwrap()).unwrap();
        assert_eq!(server("vllm+http://h:1").url("version").as_str(), "http://h:1/version");
        assert_eq!(server("vllm+http://h:1/a/b").url("v1/models").as_str(), "http://h:1/a/b/v1/models");
    }

    #[test]
    fn an_errors_message_is_found_and_short() {
        assert_eq!(message(br#"{"error": {"message": "no", "code": 400}}"#), "no");
        assert_eq!(message(br#"{"object": "error", "message": "no"}"#), "no");
        assert_eq!(message(br#"{"error": "unknown field"}"#), "unknown field");
        assert_eq!(message(b"Bad Gateway"), "Bad Gateway");
        assert_eq!(message(&[0xff; 5000]).chars().count(), 1000);
    }
}
