//! The collector's address, and the headers of each message.

use std::fmt;
use std::str::FromStr;

use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

/// The path for traces if an address has none.
const DEFAULT_PATH: &str = "/v1/traces";

/// A collector's address for traces, such as `http://127.0.0.1:4318/v1/traces`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint(pub(crate) Url);

/// The error for a text that is not the address of a collector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// The address is for gRPC, which is not supported.
    #[error(
        "gRPC is not supported: traces are sent over HTTP with protobuf bodies, \
         to an address such as http://HOST:4318/v1/traces"
    )]
    Grpc,
    /// The text is not an address. The field is the text without user, password and query.
    #[error("expected an address such as http://HOST:4318/v1/traces, got '{0}'")]
    NoAddress(String),
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let no_address = || EndpointError::NoAddress(without_secrets(text).to_owned());
        let mut url = Url::parse(text).map_err(|_| no_address())?;
        match url.scheme() {
            "http" | "https" if url.has_host() => {}
            "grpc" | "grpcs" => return Err(EndpointError::Grpc),
            _ => return Err(no_address()),
        }
        if url.path() == "/" {
            url.set_path(DEFAULT_PATH);
        }
        Ok(Self(url))
    }
}

/// Returns the part of a malformed address that is neither user and password nor a query.
fn without_secrets(text: &str) -> &str {
    match (text.rsplit_once('@'), text.split_once('?')) {
        (None, None) => text,
        (Some((_, host)), None) => host,
        (None, Some((address, _))) => address,
        // Either sign may be part of a password or of a query.
        (Some(_), Some(_)) => "…",
    }
}

impl fmt::Display for Endpoint {
    /// Writes the address without user, password and query, which may contain secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let port = self.0.port().map_or_else(String::new, |port| format!(":{port}"));
        write!(
            f,
            "{}://{}{port}{}",
            self.0.scheme(),
            self.0.host_str().unwrap_or_default(),
            self.0.path()
        )
    }
}

/// The headers of each message to the collector, such as an API key. `Debug` omits their values.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Headers(pub(crate) HeaderMap);

/// The error for a text that is not a list of headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected NAME=VALUE pairs, separated by commas, with special characters as %XX")]
pub struct HeadersError;

impl FromStr for Headers {
    type Err = HeadersError;

    /// Parses the format of `OTEL_EXPORTER_OTLP_HEADERS`: pairs, separated by commas.
    fn from_str(text: &str) -> Result<Self, HeadersError> {
        let mut headers = HeaderMap::new();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').ok_or(HeadersError)?;
            let name: HeaderName = name.trim().parse().map_err(|_| HeadersError)?;
            let value = percent_encoding::percent_decode_str(value.trim())
                .decode_utf8()
                .map_err(|_| HeadersError)?;
            let mut value = HeaderValue::from_str(&value).map_err(|_| HeadersError)?;
            value.set_sensitive(true);
            headers.append(name, value);
        }
        Ok(Self(headers))
    }
}

impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_without_path_gets_the_default_path() {
        for (text, shown) in [
            ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
            ("https://user:pass@otel.example/", "https://otel.example/v1/traces"),
            ("http://[::1]:4318/custom?key=1", "http://[::1]:4318/custom"),
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), shown);
        }
        assert_eq!("grpc://127.0.0.1:4317".parse::<Endpoint>(), Err(EndpointError::Grpc));
        for (text, shown) in [
            ("127.0.0.1:4318", "127.0.0.1:4318"),
            ("", ""),
            ("http:", "http:"),
            ("ftp://user:p@ss@a/b", "a/b"),
            ("ftp://a/b?key=secret", "ftp://a/b"),
            ("user:pa?ss@a", "…"),
        ] {
            let error = EndpointError::NoAddress(shown.to_owned());
            assert_eq!(text.parse::<Endpoint>(), Err(error), "{text}");
        }
    }

    #[test]
    fn opentelemetry_headers_are_parsed_without_display() {
        let headers: Headers = "api-key=se%20cret, x-tenant = a=b ,".parse().unwrap();
        assert_eq!(headers.0["api-key"], "se cret");
        assert_eq!(headers.0["x-tenant"], "a=b");
        assert_eq!(format!("{headers:?}"), "{\"api-key\", \"x-tenant\"}");
        for text in ["a", "a b=c", "a=%0A", "=x"] {
            assert_eq!(text.parse::<Headers>(), Err(HeadersError), "{text}");
        }
    }
}
