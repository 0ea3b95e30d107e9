use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use url::Url;

/// Where a server is, what it speaks, and how it is to be addressed: `vllm+https://host:8000,api-key-file=key,ca-file=ca.pem`.
#[derive(Clone, PartialEq, Eq)]
pub struct Upstream {
    /// `http` or `https`, with a path that ends with `/`, below which the server's own paths are.
    pub(crate) base: Url,
    /// A file with the key that the server asks for.
    pub(crate) api_key_file: Option<PathBuf>,
    /// A file with certificates of authorities, in place of the system's.
    pub(crate) ca_file: Option<PathBuf>,
}

/// A text is no upstream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UpstreamError {
    /// It is no address.
    #[error("expected an address such as vllm+http://HOST:8000")]
    NoAddress,
    /// It is of a kind that is not known.
    #[error("'{0}' is not known: vllm+http:// and vllm+https:// are, which is vllm serve with --enable-scale-out")]
    Kind(String),
    /// An address has a user, a password, a query or a fragment.
    #[error("an address has a host, a port and a path alone; a key is in a file that api-key-file names")]
    Extra,
    /// It has an option that is not known.
    #[error("'{0}' is no option: api-key-file=FILE and ca-file=FILE are")]
    Option(String),
}

impl FromStr for Upstream {
    type Err = UpstreamError;

    fn from_str(text: &str) -> Result<Self, UpstreamError> {
        let mut parts = text.split(',');
        let address = parts.next().unwrap_or_default();
        let (scheme, _) = address.split_once("://").ok_or(UpstreamError::NoAddress)?;
        let plain = address.strip_prefix("vllm+").ok_or_else(|| UpstreamError::Kind(scheme.to_owned()))?;
        let mut base = Url::parse(plain).map_err(|_| UpstreamError::NoAddress)?;
        if !matches!(base.scheme(), "http" | "https") {
            return Err(UpstreamError::Kind(scheme.to_owned()));
        }
        if !base.has_host() {
            return Err(UpstreamError::NoAddress);
        }
        let has_user = !base.username().is_empty() || base.password().is_some();
        if has_user || base.query().is_some() || base.fragment().is_some() {
            return Err(UpstreamError::Extra);
        }
        if !base.path().ends_with('/') {
            base.set_path(&format!("{}/", base.path()));
        }
        let mut upstream = Self { base, api_key_file: None, ca_file: None };
        for option in parts {
            match option.split_once('=') {
                Some(("api-key-file", path)) if !path.is_empty() => upstream.api_key_file = Some(path.into()),
                Some(("ca-file", path)) if !path.is_empty() => upstream.ca_file = Some(path.into()),
                _ => return Err(UpstreamError::Option(option.to_owned())),
            }
        }
        Ok(upstream)
    }
}

impl fmt::Display for Upstream {
    /// The address alone, as it was given.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vllm+{}", self.base.as_str().trim_end_matches('/'))
    }
}

impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Upstream({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upstream_is_an_address_with_options() {
        let parsed: Upstream = "vllm+https://gpu1:8000/models/m,api-key-file=/k,ca-file=ca.pem".parse().unwrap();
        assert_eq!(parsed.base.as_str(), "https://gpu1:8000/models/m/");
        assert_eq!((parsed.api_key_file, parsed.ca_file), (Some("/k".into()), Some("ca.pem".into())));
        assert_eq!("vllm+http://[::1]:8000".parse::<Upstream>().unwrap().to_string(), "vllm+http://[::1]:8000");
    }

    #[test]
    fn what_is_none_is_said_to_be_so() {
        for (text, error) in [
            ("gpu1:8000", UpstreamError::NoAddress),
            ("vllm+http://", UpstreamError::NoAddress),
            ("http://gpu1:8000", UpstreamError::Kind("http".to_owned())),
            ("vllm+ftp://gpu1", UpstreamError::Kind("vllm+ftp".to_owned())),
            ("vllm+http://user:pass@gpu1", UpstreamError::Extra),
            ("vllm+http://gpu1?key=1", UpstreamError::Extra),
            ("vllm+http://gpu1,api-key-file=", UpstreamError::Option("api-key-file=".to_owned())),
            ("vllm+http://gpu1,key=secret", UpstreamError::Option("key=secret".to_owned())),
        ] {
            assert_eq!(text.parse::<Upstream>(), Err(error), "{text}");
        }
    }
}
