//! CORS (<https://fetch.spec.whatwg.org/#http-cors-protocol>): which web sites' pages may send
//! requests.
//!
//! Answers are those of vLLM, which uses Starlette's `CORSMiddleware`; but here error responses
//! have the headers too, including those about API keys.

use axum::extract::Request;
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, VARY,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::response::{IntoResponse, Response};

use crate::error::HttpError;

/// The seconds for which a browser may cache a preflight response, as in Starlette.
const MAX_AGE_SECONDS: &str = "600";
/// The methods announced where all are allowed: browsers accept no `*` with credentials.
const ALL_METHODS: [&str; 7] = ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"];
/// The headers that every page may send anyway.
const SAFE_HEADERS: [&str; 4] = ["accept", "accept-language", "content-language", "content-type"];

/// A list of allowed names, or all names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllowList {
    /// All names.
    All,
    /// Only these names.
    Only(Vec<String>),
}

impl AllowList {
    /// Creates a list of these names, or of all names if `*` is among them.
    pub fn new(names: Vec<String>) -> Self {
        if names.iter().any(|name| name == "*") { Self::All } else { Self::Only(names) }
    }

    fn contains(&self, name: &[u8]) -> bool {
        match self {
            Self::All => true,
            Self::Only(names) => names.iter().any(|known| known.as_bytes() == name),
        }
    }
}

/// An invalid name in an [`AllowList`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CorsError {
    /// The text is not an origin as browsers write it.
    #[error(
        "'{0}' is not an origin; expected scheme, host and any non-default port, \
         such as https://example.com:8443"
    )]
    Origin(String),
    /// A method with invalid characters.
    #[error("'{0}' is not an HTTP method")]
    Method(String),
    /// A header name with invalid characters.
    #[error("'{0}' is not a header name")]
    Header(String),
}

/// The policy: which web sites' pages may send which requests.
#[derive(Clone, Debug)]
pub struct Cors {
    origins: AllowList,
    methods: AllowList,
    headers: AllowList,
    allows_credentials: bool,
    /// The value of `Access-Control-Allow-Methods`.
    allow_methods: HeaderValue,
    /// The value of `Access-Control-Allow-Headers` where not all headers are allowed.
    allow_headers: HeaderValue,
}

impl Cors {
    /// Creates a policy: pages of these origins may send these methods and headers, and the headers
    /// that every page may send anyway.
    ///
    /// With `allows_credentials`, browsers include their credentials for this server: cookies,
    /// certificates, HTTP passwords.
    ///
    /// # Errors
    /// [`CorsError`] for an invalid name. Origins are lower case and have neither a path nor their
    /// scheme's default port: no browser would send another form. `null` is the origin of pages
    /// without one.
    pub fn new(
        origins: AllowList,
        methods: AllowList,
        headers: AllowList,
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
            AllowList::All => AllowList::All,
            AllowList::Only(names) => {
                let names = names.into_iter().map(|name| name.to_ascii_lowercase());
                AllowList::Only(names.chain(SAFE_HEADERS.map(str::to_owned)).collect())
            }
        };
        let allow_methods = match &methods {
            AllowList::All => ALL_METHODS.join(", "),
            AllowList::Only(names) => names.join(", "),
        };
        let allow_methods =
            HeaderValue::try_from(&allow_methods).map_err(|_| CorsError::Method(allow_methods))?;
        let allow_headers = names(&headers).collect::<Vec<_>>().join(", ");
        let allow_headers =
            HeaderValue::try_from(&allow_headers).map_err(|_| CorsError::Header(allow_headers))?;
        Ok(Self { origins, methods, headers, allows_credentials, allow_methods, allow_headers })
    }

    /// Returns the response to a preflight request, without the headers of [`Self::add_headers`];
    /// `None` if the request is something else. Needs no API key, as browsers send none with a
    /// preflight.
    pub(crate) fn preflight(&self, request: &Request) -> Option<Response> {
        let headers = request.headers();
        let origin = headers.get(ORIGIN)?;
        let method = headers.get(ACCESS_CONTROL_REQUEST_METHOD)?;
        if request.method() != Method::OPTIONS {
            return None;
        }
        let requested = headers.get(ACCESS_CONTROL_REQUEST_HEADERS);
        let refuse = |header: &HeaderName| {
            let message = "not allowed by the server's --allowed-origins, --allowed-methods or \
                           --allowed-headers";
            Some(HttpError::refused_preflight(header.as_str(), message).into_response())
        };
        if !self.origins.contains(origin.as_bytes()) {
            return refuse(&ORIGIN);
        }
        if !self.methods.contains(method.as_bytes()) {
            return refuse(&ACCESS_CONTROL_REQUEST_METHOD);
        }
        if !requested.is_none_or(|requested| self.allows_headers(requested)) {
            return refuse(&ACCESS_CONTROL_REQUEST_HEADERS);
        }
        let mut response = ().into_response();
        let headers = response.headers_mut();
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, self.allow_methods.clone());
        headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(MAX_AGE_SECONDS));
        match (&self.headers, requested) {
            // Echoed, as browsers don't count `Authorization` as covered by `*`.
            (AllowList::All, Some(requested)) => {
                headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, requested.clone())
            }
            (AllowList::All, None) => None,
            (AllowList::Only(_), _) => {
                headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, self.allow_headers.clone())
            }
        };
        let vary = HeaderValue::from_static(
            "access-control-request-method, access-control-request-headers",
        );
        headers.append(VARY, vary);
        Some(response)
    }

    fn allows_headers(&self, requested: &HeaderValue) -> bool {
        let mut names = requested.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
        names.all(|name| self.headers.contains(&name.to_ascii_lowercase()))
    }

    /// Adds the headers that let a page of `origin` read the response, if the policy allows the
    /// origin. `origin` is the request's `Origin` header.
    pub(crate) fn add_headers(&self, origin: Option<&HeaderValue>, headers: &mut HeaderMap) {
        // Added even without an origin: a cache may use this response for a page later.
        headers.append(VARY, HeaderValue::from_static("origin"));
        let Some(origin) = origin.filter(|origin| self.origins.contains(origin.as_bytes())) else {
            return;
        };
        // Browsers that send credentials accept no `*`.
        let is_any = self.origins == AllowList::All && !self.allows_credentials;
        let allowed = if is_any { HeaderValue::from_static("*") } else { origin.clone() };
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
        if self.allows_credentials {
            headers.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
        }
    }
}

fn names(allowed: &AllowList) -> impl Iterator<Item = &str> {
    let names = match allowed {
        AllowList::All => &[][..],
        AllowList::Only(names) => names,
    };
    names.iter().map(String::as_str)
}

/// Returns `true` if the text is an origin as browsers write it
/// (<https://html.spec.whatwg.org/#ascii-serialisation-of-an-origin>).
fn is_origin(text: &str) -> bool {
    let Some((scheme, host)) = text.split_once("://") else { return text == "null" };
    let has_default_port = match scheme {
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
        && !has_default_port
        && scheme.bytes().all(in_scheme)
        && host.bytes().all(in_host)
}

#[cfg(test)]
mod tests;
