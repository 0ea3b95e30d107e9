//! Pages of which web sites may ask, as their visitors' browsers want to know (CORS,
//! <https://fetch.spec.whatwg.org/#http-cors-protocol>).
//!
//! What is answered is what vLLM answers, which leaves it to Starlette's `CORSMiddleware`; but
//! errors have the headers too, also those about keys.

use axum::extract::Request;
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, VARY,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::response::{IntoResponse, Response};

use crate::error::HttpError;

/// Seconds for which a browser may remember the answer to a question, as Starlette says.
const MAX_AGE: &str = "600";
/// What a browser is told of all methods. It takes no `*` where credentials are allowed.
const METHODS: [&str; 7] = ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"];
/// What each page may send anyway.
const HEADERS: [&str; 4] = ["accept", "accept-language", "content-language", "content-type"];

/// Names of which some are allowed, or all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allowed {
    /// All of them.
    All,
    /// These.
    These(Vec<String>),
}

impl Allowed {
    /// These names, or all if `*` is among them.
    pub fn new(names: Vec<String>) -> Self {
        if names.iter().any(|name| name == "*") { Self::All } else { Self::These(names) }
    }

    fn has(&self, name: &[u8]) -> bool {
        match self {
            Self::All => true,
            Self::These(names) => names.iter().any(|known| known.as_bytes() == name),
        }
    }
}

/// A name that can't be among those that are allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CorsError {
    /// An origin that no browser names like that.
    #[error(
        "'{0}' is no origin: a scheme, a host and a port if it is not the scheme's own, such as https://example.com:8443"
    )]
    Origin(String),
    /// A method with characters that no method has.
    #[error("'{0}' is no method")]
    Method(String),
    /// A header with characters that no header has.
    #[error("'{0}' is no header")]
    Header(String),
}

/// Which pages may ask, and what.
#[derive(Clone, Debug)]
pub struct Cors {
    origins: Allowed,
    methods: Allowed,
    headers: Allowed,
    allows_credentials: bool,
    /// What browsers are told of `methods`.
    told_methods: HeaderValue,
    /// What browsers are told of `headers` where not all are allowed.
    told_headers: HeaderValue,
}

impl Cors {
    /// Pages of these origins may send these methods and headers, and those that each page may send
    /// anyway. With `allows_credentials` browsers send along what they have for this server:
    /// cookies, certificates, passwords of HTTP.
    ///
    /// # Errors
    /// [`CorsError`] for a name that is none. Origins are lower case, have no path and no port that
    /// is their scheme's own: another one would be the origin of no page. `null` is that of pages
    /// without one.
    pub fn new(
        origins: Allowed,
        methods: Allowed,
        headers: Allowed,
        allows_credentials: bool,
    ) -> Result<Self, CorsError> {
        if let Some(origin) = names(&origins).find(|origin| !is_origin(origin)) {
            return Err(CorsError::Origin(origin.to_owned()));
        }
        if let Some(method) =
            names(&methods).find(|method| Method::from_bytes(method.as_bytes()).is_err())
        {
            return Err(CorsError::Method(method.to_owned()));
        }
        if let Some(header) =
            names(&headers).find(|header| HeaderName::from_bytes(header.as_bytes()).is_err())
        {
            return Err(CorsError::Header(header.to_owned()));
        }
        let headers = match headers {
            Allowed::All => Allowed::All,
            Allowed::These(names) => {
                let names = names.into_iter().map(|name| name.to_ascii_lowercase());
                Allowed::These(names.chain(HEADERS.map(str::to_owned)).collect())
            }
        };
        let told_methods = match &methods {
            Allowed::All => METHODS.join(", "),
            Allowed::These(names) => names.join(", "),
        };
        let told_methods =
            HeaderValue::try_from(&told_methods).map_err(|_| CorsError::Method(told_methods))?;
        let told_headers = names(&headers).collect::<Vec<_>>().join(", ");
        let told_headers =
            HeaderValue::try_from(&told_headers).map_err(|_| CorsError::Header(told_headers))?;
        Ok(Self { origins, methods, headers, allows_credentials, told_methods, told_headers })
    }

    /// The answer to a browser that asks what a page may send, without what [`Self::tell`] adds;
    /// `None` if the request is something else. It needs no key, as browsers send none with it.
    pub(crate) fn preflight(&self, request: &Request) -> Option<Response> {
        let headers = request.headers();
        let (origin, method) = (headers.get(ORIGIN)?, headers.get(ACCESS_CONTROL_REQUEST_METHOD)?);
        if request.method() != Method::OPTIONS {
            return None;
        }
        let asked = headers.get(ACCESS_CONTROL_REQUEST_HEADERS);
        let refused = |what: &HeaderName| {
            let message = "the server's --allowed-origins, --allowed-methods and --allowed-headers don't let pages do that";
            Some(HttpError::refused_page(what.as_str(), message).into_response())
        };
        if !self.origins.has(origin.as_bytes()) {
            return refused(&ORIGIN);
        }
        if !self.methods.has(method.as_bytes()) {
            return refused(&ACCESS_CONTROL_REQUEST_METHOD);
        }
        if !asked.is_none_or(|asked| self.has_headers(asked)) {
            return refused(&ACCESS_CONTROL_REQUEST_HEADERS);
        }
        let mut answer = ().into_response();
        let told = answer.headers_mut();
        told.insert(ACCESS_CONTROL_ALLOW_METHODS, self.told_methods.clone());
        told.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(MAX_AGE));
        match (&self.headers, asked) {
            // Browsers don't count Authorization among all.
            (Allowed::All, Some(asked)) => told.insert(ACCESS_CONTROL_ALLOW_HEADERS, asked.clone()),
            (Allowed::All, None) => None,
            (Allowed::These(_), _) => {
                told.insert(ACCESS_CONTROL_ALLOW_HEADERS, self.told_headers.clone())
            }
        };
        let depends = HeaderValue::from_static(
            "access-control-request-method, access-control-request-headers",
        );
        told.append(VARY, depends);
        Some(answer)
    }

    fn has_headers(&self, asked: &HeaderValue) -> bool {
        let mut names = asked.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
        names.all(|name| self.headers.has(&name.to_ascii_lowercase()))
    }

    /// Lets the page that asked read an answer, if its origin may: `origin` is what its browser
    /// told.
    pub(crate) fn tell(&self, origin: Option<&HeaderValue>, headers: &mut HeaderMap) {
        // Also of answers that nobody's page asked for: a cache may have a page's next.
        headers.append(VARY, HeaderValue::from_static("origin"));
        let Some(origin) = origin.filter(|origin| self.origins.has(origin.as_bytes())) else {
            return;
        };
        // A browser that sends credentials takes no *.
        let is_any = self.origins == Allowed::All && !self.allows_credentials;
        let told = if is_any { HeaderValue::from_static("*") } else { origin.clone() };
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, told);
        if self.allows_credentials {
            headers.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
        }
    }
}

fn names(allowed: &Allowed) -> impl Iterator<Item = &str> {
    let names = match allowed {
        Allowed::All => &[][..],
        Allowed::These(names) => names,
    };
    names.iter().map(String::as_str)
}

/// Whether browsers name an origin like that
/// (<https://html.spec.whatwg.org/#ascii-serialisation-of-an-origin>).
fn is_origin(text: &str) -> bool {
    let Some((scheme, host)) = text.split_once("://") else { return text == "null" };
    let is_own_port = match scheme {
        "http" => host.ends_with(":80"),
        "https" => host.ends_with(":443"),
        _ => false,
    };
    let in_scheme =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"+-.".contains(&byte);
    let in_host =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-._:[]".contains(&byte);
    !scheme.is_empty()
        && !host.is_empty()
        && !is_own_port
        && scheme.bytes().all(in_scheme)
        && host.bytes().all(in_host)
}

#[cfg(test)]
mod tests;
