//! Requests to the hub: redirects, statuses, limits of time and bytes.

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

use crate::cache::MAX_LISTING;
use crate::listing::Listing;
use crate::repo::Commit;
use crate::settings::Token;
use crate::{HubError, HubSettings, RepoId, Revision};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The most time until the head of an answer is there.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// The most time that the whole of a listing may take.
const LISTING_TIMEOUT: Duration = Duration::from_secs(60);
/// The most redirects that one request follows.
const MAX_REDIRECTS: usize = 8;
/// The most bytes that the URL of a redirect may have; signed ones are long.
const MAX_URL: usize = 16 << 10;
/// How often a request is sent in vain before it is given up.
pub(crate) const TRIES: u32 = 4;

/// A client that speaks to one hub of one model.
#[derive(Debug)]
pub(crate) struct HubClient {
    http: Client,
    endpoint: Url,
    token: Option<Token>,
    repo: RepoId,
    revision: Revision,
    retry_pause: Duration,
}

/// What the answers on the way to a file said of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Linked {
    /// The value of `X-Linked-Etag`, which the hub sends with a redirect to where the file is.
    pub(crate) etag: Option<String>,
    /// The value of `X-Linked-Size`.
    pub(crate) size: Option<u64>,
    /// The value of `X-Repo-Commit`.
    pub(crate) commit: Option<String>,
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
            // A proxy would look for it on its own machine.
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

    /// The commit of the revision and its files.
    pub(crate) async fn listing(&self) -> Result<(Commit, Listing), HubError> {
        let path = ["api", "models"]
            .into_iter()
            .chain(self.repo.parts())
            .chain(["revision", self.revision.as_str()]);
        let mut url = self.url(path);
        url.set_query(Some("blobs=true"));
        let body = self.again(async || self.small_body(url.clone()).await).await?;
        let listing = Listing::of_answer(&body)
            .map_err(|error| self.refused(&url, "the files of the model", error.to_string()))?;
        match self.revision.commit() {
            Some(commit) if commit != listing.0 => {
                let problem = format!("it is of commit {}", listing.0.as_str());
                Err(self.refused(&url, &format!("commit {}", commit.as_str()), problem))
            }
            _ => Ok(listing),
        }
    }

    async fn small_body(&self, url: Url) -> Result<Vec<u8>, HubError> {
        let what = "the files of the model";
        let deadline = Instant::now() + LISTING_TIMEOUT;
        let (mut response, url, _) = self.send(Method::GET, url, 0, what).await?;
        self.check(&response, &url, what)?;
        let mut body = Vec::new();
        loop {
            let part = timeout_at(deadline, response.chunk()).await.map_err(|_| timed_out(&url))?;
            let Some(part) = part.map_err(|error| unreachable(&url, &error))? else {
                return Ok(body);
            };
            if (body.len() + part.len()) as u64 > MAX_LISTING {
                return Err(self.refused(
                    &url,
                    what,
                    format!("it is longer than {} MiB", MAX_LISTING >> 20),
                ));
            }
            body.extend_from_slice(&part);
        }
    }

    /// The URL of a file.
    pub(crate) fn file_url(&self, commit: &Commit, path: &str) -> Url {
        self.url(self.repo.parts().chain(["resolve", commit.as_str()]).chain(path.split('/')))
    }

    /// A URL below the endpoint. The parts are percent-encoded, slashes in them too.
    fn url<'a>(&self, parts: impl Iterator<Item = &'a str>) -> Url {
        let mut url = self.endpoint.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(parts);
        }
        url
    }

    /// Does it again, with longer and longer pauses, as long as what fails may pass.
    pub(crate) async fn again<T>(
        &self,
        doing: impl AsyncFn() -> Result<T, HubError>,
    ) -> Result<T, HubError> {
        let mut tries = 1;
        loop {
            match doing().await {
                Err(error) if error.is_passing() && tries < TRIES => {
                    self.pause(&error, tries).await
                }
                done => return done,
            }
            tries += 1;
        }
    }

    /// Waits before another try.
    pub(crate) async fn pause(&self, error: &HubError, tries: u32) {
        tracing::warn!(%error, "the hub is asked again");
        tokio::time::sleep(self.retry_pause * 2_u32.pow(tries.min(TRIES) - 1)).await;
    }

    /// Sends a request for what comes from byte `from` on, and follows redirects: to `http` and
    /// `https` alone, and never from the latter to the former. `HEAD` stops at the answer that says
    /// which file it is. The token is for the endpoint alone.
    ///
    /// The answer, the URL that it comes from, and what was said on the way.
    pub(crate) async fn send(
        &self,
        method: Method,
        mut url: Url,
        from: u64,
        what: &str,
    ) -> Result<(Response, Url, Linked), HubError> {
        let mut linked = Linked::default();
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
                timeout(HEAD_TIMEOUT, request.send()).await.map_err(|_| timed_out(&url))?;
            let response = response.map_err(|error| unreachable(&url, &error))?;
            if !is_plain(response.headers()) {
                return Err(self.refused(
                    &url,
                    what,
                    "it is compressed, though that was not asked for".to_owned(),
                ));
            }
            linked.read(response.headers());
            let is_known = method == Method::HEAD && linked.etag.is_some();
            if !response.status().is_redirection() || is_known {
                return Ok((response, url, linked));
            }
            url = self.target(&url, response.headers(), what)?;
        }
        Err(self.refused(&url, what, format!("more than {MAX_REDIRECTS} redirects")))
    }

    fn target(&self, from: &Url, headers: &HeaderMap, what: &str) -> Result<Url, HubError> {
        let location =
            headers.get(LOCATION).and_then(|location| str::from_utf8(location.as_bytes()).ok());
        let target = location
            .filter(|location| location.len() <= MAX_URL)
            .and_then(|location| from.join(location).ok());
        let Some(target) = target.filter(Url::has_host) else {
            return Err(self.refused(from, what, "a redirect to nowhere".to_owned()));
        };
        match (from.scheme(), target.scheme()) {
            ("https", "https") | ("http", "http" | "https") => Ok(target),
            (_, scheme) => Err(self.refused(
                from,
                what,
                format!("a redirect from {} to {scheme}", from.scheme()),
            )),
        }
    }

    /// What an answer other than a success means.
    pub(crate) fn check(&self, response: &Response, url: &Url, what: &str) -> Result<(), HubError> {
        let status = response.status();
        if status.is_success() {
            return Ok(());
        }
        let (endpoint, repo, with_token) =
            (self.host(), self.repo.to_string(), self.token.is_some());
        let is_hubs = url.origin() == self.endpoint.origin();
        // What the hub says it is: it answers 401 also for a model that does not exist, to who has
        // no token.
        let code = response.headers().get("x-error-code").and_then(|code| code.to_str().ok());
        Err(match (code, status) {
            (Some("RevisionNotFound"), _) if is_hubs => {
                HubError::NoSuchRevision { endpoint, repo, revision: self.revision.to_string() }
            }
            (Some("RepoNotFound"), _) if is_hubs => {
                HubError::NoSuchModel { endpoint, repo, with_token }
            }
            (_, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) if is_hubs => {
                HubError::Denied { endpoint, repo, status: status.as_u16(), with_token }
            }
            (None, StatusCode::NOT_FOUND) if is_hubs && url.path().contains("/api/") => {
                HubError::NoSuchModel { endpoint, repo, with_token }
            }
            _ => HubError::Status {
                host: host_of(url),
                status: status.as_u16(),
                what: what.to_owned(),
            },
        })
    }

    pub(crate) fn refused(&self, url: &Url, what: &str, problem: String) -> HubError {
        HubError::Refused { host: host_of(url), what: what.to_owned(), problem }
    }

    fn host(&self) -> String {
        host_of(&self.endpoint)
    }
}

impl Linked {
    fn read(&mut self, headers: &HeaderMap) {
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

/// The etag of an answer's own body.
pub(crate) fn etag(headers: &HeaderMap) -> Option<String> {
    headers.get(ETAG)?.to_str().ok().map(str::to_owned)
}

/// The bytes of an answer's own body.
pub(crate) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn is_plain(headers: &HeaderMap) -> bool {
    headers
        .get_all(CONTENT_ENCODING)
        .iter()
        .all(|encoding| encoding.as_bytes().eq_ignore_ascii_case(b"identity"))
}

/// TLS by ring. The certificate authorities that Mozilla trusts, and those of the file.
fn tls(certificates: Option<&Path>) -> Result<ClientConfig, HubError> {
    let problem = |problem: String| HubError::Setting { name: "SSL_CERT_FILE", problem };
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    if let Some(path) = certificates {
        let certificates = CertificateDer::pem_file_iter(path)
            .and_then(|certificates| certificates.collect::<Result<Vec<_>, _>>());
        let certificates = certificates
            .map_err(|error| problem(format!("can't be read, {}: {error}", path.display())))?;
        let (added, _) = roots.add_parsable_certificates(certificates);
        tracing::debug!(added, path = %path.display(), "trusts more certificates");
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

/// Host and port, without what may be secret in a signed URL.
pub(crate) fn host_of(url: &Url) -> String {
    let port = url.port().map_or_else(String::new, |port| format!(":{port}"));
    format!("{}{port}", url.host_str().unwrap_or_default())
}

pub(crate) fn timed_out(url: &Url) -> HubError {
    HubError::Unreachable { host: host_of(url), reason: "it takes too long".to_owned() }
}

pub(crate) fn unreachable(url: &Url, error: &reqwest::Error) -> HubError {
    HubError::Unreachable { host: host_of(url), reason: root_cause(error) }
}

/// The innermost error: the outer ones say the URL, which may be signed.
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
