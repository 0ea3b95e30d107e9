use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use chiasm_types::BlockSize;
use url::Url;

/// The tokens of a block of `trtllm-serve` by default (`kv_cache_config.tokens_per_block`). The
/// server does not report the number.
const TRTLLM_BLOCK_SIZE: BlockSize = match BlockSize::new(32) {
    Some(size) => size,
    None => panic!("32 is not 0"),
};

/// What a server speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `vllm serve` with `--enable-scale-out`, which takes tokens.
    VllmTokens,
    /// `vllm serve` as it is, which is given requests as they come, with names for their images.
    VllmMessages,
    /// SGLang's own server, which takes tokens.
    SglangTokens,
    /// `trtllm-serve`, whose blocks have so many tokens.
    Trtllm { block_size: BlockSize },
    /// OpenAI's API, or others that clients know it to have.
    Messages,
}

impl Kind {
    /// What stands before `http` in its addresses.
    fn prefix(self) -> &'static str {
        match self {
            Self::VllmTokens | Self::VllmMessages => "vllm+",
            Self::SglangTokens => "sglang+",
            Self::Trtllm { .. } => "trtllm+",
            Self::Messages => "",
        }
    }

    /// What an address is of before its options are known, and the rest of it.
    fn of(address: &str) -> (Self, &str) {
        let of_trtllm = Self::Trtllm { block_size: TRTLLM_BLOCK_SIZE };
        let with_prefix = [Self::VllmTokens, Self::SglangTokens, of_trtllm].into_iter();
        let mut found = with_prefix
            .filter_map(|kind| address.strip_prefix(kind.prefix()).map(|rest| (kind, rest)));
        found.next().unwrap_or((Self::Messages, address))
    }
}

/// Where a server is, what it speaks, and how it is to be addressed:
/// `vllm+https://host:8000,mode=chat,api-key-file=key`.
#[derive(Clone, PartialEq, Eq)]
pub struct Upstream {
    pub(crate) kind: Kind,
    /// `http` or `https`, with a path that ends with `/`, below which the server's own paths are.
    pub(crate) base: Url,
    /// What the server calls the model, if that is told.
    pub(crate) model: Option<String>,
    /// A file with the key that the server asks for.
    pub(crate) api_key_file: Option<PathBuf>,
    /// A file with certificates of authorities, in place of the system's.
    pub(crate) ca_file: Option<PathBuf>,
}

impl Upstream {
    /// Whether it is given requests as they come.
    pub fn takes_messages(&self) -> bool {
        !matches!(self.kind, Kind::VllmTokens | Kind::SglangTokens)
    }
}

/// A text is no upstream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UpstreamError {
    /// It is no address.
    #[error(
        "expected an address such as vllm+http://HOST:8000, sglang+http://HOST:30000 or http://HOST:8000"
    )]
    NoAddress,
    /// It is of a kind that is not known.
    #[error(
        "'{0}' is not known: vllm+http:// and vllm+https:// are, which is vllm serve with --enable-scale-out, sglang+http:// and \
         sglang+https://, which is SGLang, trtllm+http:// and trtllm+https://, which is trtllm-serve, and http:// and https://, which is \
         any server of OpenAI's API"
    )]
    Kind(String),
    /// An address has a user, a password, a query or a fragment.
    #[error(
        "an address has a host, a port and a path alone; a key is in a file that api-key-file names"
    )]
    Extra,
    /// It has an option that is not known.
    #[error(
        "'{0}' is no option: model=NAME, api-key-file=FILE, ca-file=FILE, behind vllm+http:// mode=chat and behind trtllm+http:// block-size=N are"
    )]
    Option(String),
}

impl FromStr for Upstream {
    type Err = UpstreamError;

    fn from_str(text: &str) -> Result<Self, UpstreamError> {
        let mut parts = text.split(',');
        let address = parts.next().unwrap_or_default();
        let (scheme, _) = address.split_once("://").ok_or(UpstreamError::NoAddress)?;
        let (kind, plain) = Kind::of(address);
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
        // Clients of OpenAI's write their base with it.
        let without =
            base.path().strip_suffix("v1/").filter(|_| kind == Kind::Messages).map(str::to_owned);
        if let Some(path) = without {
            base.set_path(&path);
        }
        let mut upstream = Self { kind, base, model: None, api_key_file: None, ca_file: None };
        for option in parts {
            match option.split_once('=') {
                Some(("model", name)) if !name.is_empty() => upstream.model = Some(name.to_owned()),
                Some(("api-key-file", path)) if !path.is_empty() => {
                    upstream.api_key_file = Some(path.into())
                }
                Some(("block-size", size)) if matches!(kind, Kind::Trtllm { .. }) => {
                    let size = size.parse().ok().and_then(BlockSize::new);
                    let block_size =
                        size.ok_or_else(|| UpstreamError::Option(option.to_owned()))?;
                    upstream.kind = Kind::Trtllm { block_size };
                }
                Some(("mode", "chat")) if kind == Kind::VllmTokens => {
                    upstream.kind = Kind::VllmMessages
                }
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
        write!(f, "{}{}", self.kind.prefix(), self.base.as_str().trim_end_matches('/'))
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
        let parsed: Upstream =
            "vllm+https://gpu1:8000/models/m,api-key-file=/k,ca-file=ca.pem".parse().unwrap();
        assert_eq!(parsed.base.as_str(), "https://gpu1:8000/models/m/");
        assert_eq!(
            (parsed.api_key_file, parsed.ca_file),
            (Some("/k".into()), Some("ca.pem".into()))
        );
        let chat: Upstream = "vllm+http://gpu1:8000,mode=chat".parse().unwrap();
        assert_eq!((chat.kind, chat.takes_messages()), (Kind::VllmMessages, true));
        let trtllm: Upstream = "trtllm+https://gpu1,block-size=64".parse().unwrap();
        assert_eq!(trtllm.kind, Kind::Trtllm { block_size: BlockSize::new(64).unwrap() });
        assert_eq!(trtllm.to_string(), "trtllm+https://gpu1");
        let plain: Upstream = "http://gpu1:8000/x/v1,model=org/m".parse().unwrap();
        assert_eq!(plain.model.as_deref(), Some("org/m"));
        assert_eq!((plain.kind, plain.base.as_str()), (Kind::Messages, "http://gpu1:8000/x/"));
        for text in ["vllm+http://[::1]:8000", "sglang+https://gpu1:30000/below"] {
            assert_eq!(text.parse::<Upstream>().unwrap().to_string(), text);
        }
        let of_sglang: Upstream = "sglang+http://gpu1:30000/v1".parse().unwrap();
        assert_eq!(
            (of_sglang.kind, of_sglang.base.as_str()),
            (Kind::SglangTokens, "http://gpu1:30000/v1/")
        );
    }

    #[test]
    fn what_is_none_is_said_to_be_so() {
        for (text, error) in [
            ("gpu1:8000", UpstreamError::NoAddress),
            ("vllm+http://", UpstreamError::NoAddress),
            ("tgi+http://gpu1:8000", UpstreamError::Kind("tgi+http".to_owned())),
            ("sglang+ftp://gpu1", UpstreamError::Kind("sglang+ftp".to_owned())),
            ("vllm+ftp://gpu1", UpstreamError::Kind("vllm+ftp".to_owned())),
            ("vllm+http://user:pass@gpu1", UpstreamError::Extra),
            ("vllm+http://gpu1?key=1", UpstreamError::Extra),
            ("vllm+http://gpu1,api-key-file=", UpstreamError::Option("api-key-file=".to_owned())),
            (
                "vllm+http://gpu1,mode=completion",
                UpstreamError::Option("mode=completion".to_owned()),
            ),
            ("trtllm+http://gpu1,block-size=0", UpstreamError::Option("block-size=0".to_owned())),
            ("http://gpu1,mode=chat", UpstreamError::Option("mode=chat".to_owned())),
            ("http://gpu1,model=", UpstreamError::Option("model=".to_owned())),
            ("vllm+http://gpu1,key=secret", UpstreamError::Option("key=secret".to_owned())),
        ] {
            assert_eq!(text.parse::<Upstream>(), Err(error), "{text}");
        }
    }
}
