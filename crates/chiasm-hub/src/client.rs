//! The HTTP client of the hub: redirects, statuses, timeouts and size limits.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, ETAG, HeaderMap, HeaderValue,
    LOCATION, RANGE,
};
use reqwest::{Client, Method, Response, StatusCode};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use tokio::time::{Instant, timeout, timeout_at};
use url::{Host, Url};

use crate::cache::MAX_LISTING_BYTES;
use crate::listing::Listing;
use crate::repo::Commit;
use crate::settings::Token;
use crate::{HubError, HubSettings, RepoId, Revision};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The timeout for the head of a response.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// The timeout for a whole listing.
const LISTING_TIMEOUT: Duration = Duration::from_secs(60);
/// The maximum number of redirects that one request follows.
const MAX_REDIRECTS: usize = 8;
/// The maximum length of a redirect's URL. Signed URLs are long.
const MAX_URL_BYTES: usize = 16 << 10;
/// The maximum number of failed attempts of a request.
pub(crate) const MAX_ATTEMPTS: u32 = 4;

/// An HTTP client for one revision of one model on the hub.
#[derive(Debug)]
pub(crate) struct HubClient {
    http: Client,
    endpoint: Url,
    token: Option<Token>,
    repo: RepoId,
    revision: Revision,
    retry_pause: Duration,
}

/// The description of a file in the headers of the responses that led to it.
#[derive(Clone, Debug, Default)]
pub(crate) struct FileHeaders {
    /// The value of `X-Linked-Etag`, which the hub sends with a redirect to the file's storage.
    pub(crate) etag: Option<String>,
    /// The value of `X-Linked-Size`.
    pub(crate) size: Option<u64>,
    /// The value of `X-Repo-Commit`.
    pub(crate) commit: Option<String>,
}

/// A response and its origin.
pub(crate) struct HubResponse {
    pub(crate) response: Response,
    /// The URL that sent the response, after redirects.
    pub(crate) url: Url,
    /// The headers of the response and of the redirects before it.
    pub(crate) headers: FileHeaders,
}

impl HubClient {
    pub(crate) fn new(
        settings: &HubSettings,
        repo: &RepoId,
        revision: &Revision,
    ) -> Result<Self, HubError> {
        let tls = tls(settings.certificates.as_deref())?;
        let mut builder = Client::builder()
            .tls_backend_preconfigured(tls)
            .redirect(reqwest::redirect::Policy::none())
            .referer(false)
            .user_agent(concat!("chiasm/", env!("CARGO_PKG_VERSION")))
            .default_headers(HeaderMap::from_iter([(
                ACCEPT_ENCODING,
                HeaderValue::from_static("identity"),
            )]))
            .connect_timeout(CONNECT_TIMEOUT);
        if is_loopback(&settings.endpoint) {
            // A proxy would connect to its own loopback address.
            builder = builder.no_proxy();
        }
        let http = builder.build().map_err(|error| HubError::Setting {
            name: "HTTPS_PROXY",
            problem: format!("or TLS can't be used: {}", root_cause(&error)),
        })?;
        Ok(Self {
            http,
            endpoint: settings.endpoint.clone(),
            token: settings.token.clone(),
            repo: repo.clone(),
            revision: revision.clone(),
            retry_pause: settings.retry_pause,
        })
    }

    /// Fetches the commit of the revision and the list of its files.
    pub(crate) async fn listing(&self) -> Result<(Commit, Listing), HubError> {
        let path = ["api", "models"]
            .into_iter()
            .chain(self.repo.parts())
            .chain(["revision", self.revision.as_str()]);
        let mut url = self.url(path);
        url.set_query(Some("blobs=true"));
        let body = self.retry(async || self.small_body(url.clone()).await).await?;
        let listing = Listing::from_response(&body)
            .map_err(|error| self.refused(&url, "the files of the model", error.to_string()))?;
        match self.revision.commit() {
            Some(commit) if commit != listing.0 => {
                let problem = format!("its commit is {}", listing.0.as_str());
                Err(self.refused(&url, &format!("commit {}", commit.as_str()), problem))
            }
            _ => Ok(listing),
        }
    }

    /// Fetches the body of a listing, of at most [`MAX_LISTING_BYTES`].
    async fn small_body(&self, url: Url) -> Result<Vec<u8>, HubError> {
        let resource = "the files of the model";
        let deadline = Instant::now() + LISTING_TIMEOUT;
        let HubResponse { mut response, url, .. } =
            self.send(Method::GET, url, 0, resource).await?;
        self.check(&response, &url, resource)?;
        let mut body = Vec::new();
        loop {
            let chunk = timeout_at(deadline, response.chunk()).await;
            let chunk = chunk.map_err(|_| timeout_error(&url))?;
            let Some(chunk) = chunk.map_err(|error| connection_error(&url, &error))? else {
                return Ok(body);
            };
            if (body.len() + chunk.len()) as u64 > MAX_LISTING_BYTES {
                return Err(self.refused(
                    &url,
                    resource,
                    format!("it is longer than {} MiB", MAX_LISTING_BYTES >> 20),
                ));
            }
            body.extend_from_slice(&chunk);
        }
    }

    /// Returns the URL of a file.
    pub(crate) fn file_url(&self, commit: &Commit, path: &str) -> Url {
        self.url(self.repo.parts().chain(["resolve", commit.as_str()]).chain(path.split('/')))
    }

    /// Returns a URL below the endpoint. The parts are percent-encoded, including their slashes.
    fn url<'a>(&self, parts: impl Iterator<Item = &'a str>) -> Url {
        let mut url = self.endpoint.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(parts);
        }
        url
    }

    /// Runs `operation` until it succeeds or fails permanently, at most [`MAX_ATTEMPTS`] times. The
    /// pauses grow exponentially.
    pub(crate) async fn retry<T>(
        &self,
        operation: impl AsyncFn() -> Result<T, HubError>,
    ) -> Result<T, HubError> {
        let mut attempts = 1;
        loop {
            match operation().await {
                Err(error) if error.is_transient() && attempts < MAX_ATTEMPTS => {
                    self.pause_before_retry(&error, attempts).await
                }
                result => return result,
            }
            attempts += 1;
        }
    }

    /// Waits before the next attempt, after `attempts` failed ones.
    pub(crate) async fn pause_before_retry(&self, error: &HubError, attempts: u32) {
        tracing::warn!(%error, "a request to the hub failed and is retried");
        tokio::time::sleep(self.retry_pause * 2_u32.pow(attempts.min(MAX_ATTEMPTS) - 1)).await;
    }

    /// Sends a request for the bytes from `from` on, and follows redirects.
    ///
    /// Redirects may only lead to `http` and `https`, and not from `https` to `http`. A `HEAD`
    /// request stops at the first response with `X-Linked-Etag`. The token is only sent to the
    /// endpoint.
    pub(crate) async fn send(
        &self,
        method: Method,
        mut url: Url,
        from: u64,
        resource: &str,
    ) -> Result<HubResponse, HubError> {
        let mut file_headers = FileHeaders::default();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.http.request(method.clone(), url.clone());
            if from > 0 {
                request = request.header(RANGE, format!("bytes={from}-"));
            }
            if let Some(token) =
                self.token.as_ref().filter(|_| url.origin() == self.endpoint.origin())
            {
                request = request.header(AUTHORIZATION, token.header());
            }
            let response =
                timeout(HEAD_TIMEOUT, request.send()).await.map_err(|_| timeout_error(&url))?;
            let response = response.map_err(|error| connection_error(&url, &error))?;
            if !is_plain(response.headers()) {
                return Err(self.refused(
                    &url,
                    resource,
                    "its body is compressed, but only identity encoding was requested".to_owned(),
                ));
            }
            file_headers.add(response.headers());
            let is_described = method == Method::HEAD && file_headers.etag.is_some();
            if !response.status().is_redirection() || is_described {
                return Ok(HubResponse { response, url, headers: file_headers });
            }
            url = self.redirect_target(&url, response.headers(), resource)?;
        }
        Err(self.refused(&url, resource, format!("more than {MAX_REDIRECTS} redirects")))
    }

    fn redirect_target(
        &self,
        from: &Url,
        headers: &HeaderMap,
        resource: &str,
    ) -> Result<Url, HubError> {
        let location =
            headers.get(LOCATION).and_then(|location| str::from_utf8(location.as_bytes()).ok());
        let target = location
            .filter(|location| location.len() <= MAX_URL_BYTES)
            .and_then(|location| from.join(location).ok());
        let Some(target) = target.filter(Url::has_host) else {
            return Err(self.refused(
                from,
                resource,
                "a redirect without a valid target".to_owned(),
            ));
        };
        match (from.scheme(), target.scheme()) {
            ("https", "https") | ("http", "http" | "https") => Ok(target),
            (_, scheme) => Err(self.refused(
                from,
                resource,
                format!("a redirect from {} to {scheme}", from.scheme()),
            )),
        }
    }

    /// Returns an error for a response without a success status.
    pub(crate) fn check(
        &self,
        response: &Response,
        url: &Url,
        resource: &str,
    ) -> Result<(), HubError> {
        let status = response.status();
        if status.is_success() {
            return Ok(());
        }
        let endpoint = host_with_port(&self.endpoint);
        let repo = self.repo.to_string();
        let with_token = self.token.is_some();
        let is_from_hub = url.origin() == self.endpoint.origin();
        // The status is not enough: without a token, the hub also sends 401 for a model that does
        // not exist.
        let code = response.headers().get("x-error-code").and_then(|code| code.to_str().ok());
        Err(match (code, status) {
            (Some("RevisionNotFound"), _) if is_from_hub => {
                HubError::NoSuchRevision { endpoint, repo, revision: self.revision.to_string() }
            }
            (Some("RepoNotFound"), _) if is_from_hub => {
                HubError::NoSuchModel { endpoint, repo, with_token }
            }
            (_, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) if is_from_hub => {
                HubError::Denied { endpoint, repo, status: status.as_u16(), with_token }
            }
            (None, StatusCode::NOT_FOUND) if is_from_hub && url.path().contains("/api/") => {
                HubError::NoSuchModel { endpoint, repo, with_token }
            }
            _ => HubError::Status {
                host: host_with_port(url),
                status: status.as_u16(),
                resource: resource.to_owned(),
            },
        })
    }

    /// Creates the error for a refused response.
    pub(crate) fn refused(&self, url: &Url, resource: &str, problem: String) -> HubError {
        HubError::Refused { host: host_with_port(url), resource: resource.to_owned(), problem }
    }
}

impl FileHeaders {
    /// Adds the headers of a response. Values of earlier responses have precedence.
    fn add(&mut self, headers: &HeaderMap) {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let set = |known: &mut Option<String>, new: Option<&str>| {
            if known.is_none() {
                *known = new.map(str::to_owned);
            }
        };
        set(&mut self.etag, text("x-linked-etag"));
        set(&mut self.commit, text("x-repo-commit"));
        self.size = self.size.or_else(|| text("x-linked-size")?.parse().ok());
    }
}

/// Returns the ETag of a response's own body.
pub(crate) fn etag(headers: &HeaderMap) -> Option<String> {
    headers.get(ETAG)?.to_str().ok().map(str::to_owned)
}

/// Returns the length of a response's own body, in bytes.
pub(crate) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Returns `true` if the body is not compressed.
fn is_plain(headers: &HeaderMap) -> bool {
    headers
        .get_all(CONTENT_ENCODING)
        .iter()
        .all(|encoding| encoding.as_bytes().eq_ignore_ascii_case(b"identity"))
}

/// Creates a TLS configuration with ring. It trusts Mozilla's certificate authorities and those in
/// the file `certificates`.
fn tls(certificates: Option<&Path>) -> Result<ClientConfig, HubError> {
    let problem = |problem: String| HubError::Setting { name: "SSL_CERT_FILE", problem };
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    if let Some(path) = certificates {
        let certificates = CertificateDer::pem_file_iter(path)
            .and_then(|certificates| certificates.collect::<Result<Vec<_>, _>>());
        let certificates = certificates
            .map_err(|error| problem(format!("can't be read, {}: {error}", path.display())))?;
        let (added, _) = roots.add_parsable_certificates(certificates);
        tracing::debug!(added, path = %path.display(), "added trusted certificates");
    }
    let mut tls =
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| problem(format!("or TLS can't be used: {error}")))?
            .with_root_certificates(roots)
            .with_no_client_auth();
    tls.alpn_protocols = vec![b"h2".into(), b"http/1.1".into()];
    Ok(tls)
}

fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        None => false,
    }
}

/// Returns the host and a non-default port. The rest of a signed URL may be secret.
pub(crate) fn host_with_port(url: &Url) -> String {
    let port = url.port().map_or_else(String::new, |port| format!(":{port}"));
    format!("{}{port}", url.host_str().unwrap_or_default())
}

pub(crate) fn timeout_error(url: &Url) -> HubError {
    HubError::Unreachable { host: host_with_port(url), reason: "the request timed out".to_owned() }
}

pub(crate) fn connection_error(url: &Url, error: &reqwest::Error) -> HubError {
    HubError::Unreachable { host: host_with_port(url), reason: root_cause(error) }
}

/// Returns the text of the innermost error. The outer errors contain the URL, which may be signed.
fn root_cause(error: &reqwest::Error) -> String {
    let mut cause: &(dyn Error + 'static) = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    match cause.downcast_ref::<reqwest::Error>() {
        Some(_) => "the connection failed".to_owned(),
        None => cause.to_string(),
    }
}
