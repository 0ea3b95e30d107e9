//! The address of a server on the command line: scheme, URL and options.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use chiasm_types::BlockSize;
use url::Url;

/// The default tokens per block of `trtllm-serve` (`kv_cache_config.tokens_per_block`). The server
/// does not report the number.
const TRTLLM_BLOCK_SIZE: BlockSize = match BlockSize::new(32) {
    Some(size) => size,
    None => panic!("32 is not 0"),
};

/// The maximum number of engines of one server.
const MAX_RANKS: u16 = 1024;

/// The protocol of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `vllm serve` with `--enable-scale-out`, which accepts tokens.
    VllmTokens,
    /// `vllm serve` in its default form. Requests are forwarded unchanged, with identities for
    /// their images.
    VllmMessages,
    /// SGLang's own server, which accepts tokens.
    SglangTokens,
    /// `trtllm-serve` with blocks of `block_size` tokens.
    Trtllm { block_size: BlockSize },
    /// A server of OpenAI's API, or of another API. Requests are forwarded unchanged.
    Messages,
    /// A server whose kind is detected when it answers.
    Detected,
}

impl Kind {
    /// A `trtllm-serve` in its default form.
    pub(crate) const TRTLLM: Self = Self::Trtllm { block_size: TRTLLM_BLOCK_SIZE };

    /// Returns the prefix before `http` in an address of this kind.
    fn prefix(self) -> &'static str {
        match self {
            Self::VllmTokens | Self::VllmMessages => "vllm+",
            Self::SglangTokens => "sglang+",
            Self::Trtllm { .. } => "trtllm+",
            Self::Messages => "openai+",
            Self::Detected => "",
        }
    }

    /// Returns the name of the software of this kind of server.
    pub(crate) fn software(self) -> &'static str {
        match self {
            Self::VllmTokens | Self::VllmMessages => "vLLM",
            Self::SglangTokens => "SGLang",
            Self::Trtllm { .. } => "TensorRT-LLM",
            Self::Messages | Self::Detected => "a server of OpenAI's API",
        }
    }

    /// Parses the kind of an address, without its options, and returns the rest of the address.
    fn from_address(address: &str) -> (Self, &str) {
        let prefixed =
            [Self::VllmTokens, Self::SglangTokens, Self::TRTLLM, Self::Messages].into_iter();
        let mut matches = prefixed
            .filter_map(|kind| address.strip_prefix(kind.prefix()).map(|rest| (kind, rest)));
        matches.next().unwrap_or((Self::Detected, address))
    }
}

/// The URL, protocol and options of a server: `vllm+https://host:8000,mode=chat,api-key-file=key`.
#[derive(Clone, PartialEq, Eq)]
pub struct Upstream {
    pub(crate) kind: Kind,
    /// The base URL of the server's paths: `http` or `https`, with a path that ends with `/`.
    pub(crate) base: Url,
    /// The server's name of the model, if the operator has given it.
    pub(crate) model: Option<String>,
    /// A file with the API key for the server.
    pub(crate) api_key_file: Option<PathBuf>,
    /// A file with CA certificates, in place of the system's.
    pub(crate) ca_file: Option<PathBuf>,
    /// The engine that gets the requests, of a server with several; `None` if the server chooses.
    pub(crate) rank: Option<Rank>,
}

/// One of the engines of a server (`--data-parallel-size` of vLLM).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rank {
    /// The number of the engine among those of the server, from 0.
    pub(crate) index: u16,
    /// The number of the server's engines.
    pub(crate) count: u16,
}

impl Upstream {
    /// Returns one address for each engine of the server, if the operator has given their number,
    /// or else this address.
    pub fn per_engine(&self) -> Vec<Self> {
        let Some(Rank { count, .. }) = self.rank else { return vec![self.clone()] };
        let ranks = (0..count).map(|index| Rank { index, count });
        ranks.map(|rank| Self { rank: Some(rank), ..self.clone() }).collect()
    }

    /// Returns `true` if requests are forwarded to the server unchanged, or if that is possible
    /// because the kind of server is not detected yet.
    pub fn takes_messages(&self) -> bool {
        !matches!(self.kind, Kind::VllmTokens | Kind::SglangTokens)
    }
}

/// An error of parsing an [`Upstream`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UpstreamError {
    /// The text is not an address.
    #[error(
        "expected an address such as vllm+http://HOST:8000, sglang+http://HOST:30000 or \
         http://HOST:8000"
    )]
    NoAddress,
    /// The address has an unknown scheme.
    #[error(
        "'{0}' is not a known scheme: use vllm+http:// or vllm+https:// for vllm serve with \
         --enable-scale-out, sglang+http:// or sglang+https:// for SGLang, trtllm+http:// or \
         trtllm+https:// for trtllm-serve, openai+http:// or openai+https:// for any server of \
         OpenAI's API, and http:// or https:// to detect the kind of server"
    )]
    Kind(String),
    /// The address has a user, a password, a query or a fragment.
    #[error(
        "an address may only have a host, a port and a path; put a key in a file and name the \
         file with api-key-file"
    )]
    Extra,
    /// The address has an unknown option.
    #[error(
        "'{0}' is not an option: use model=NAME, api-key-file=FILE or ca-file=FILE, after \
         vllm+http:// also mode=chat or ranks=N (from 2 to {max}), after trtllm+http:// also \
         block-size=N",
        max = MAX_RANKS
    )]
    Option(String),
}

impl FromStr for Upstream {
    type Err = UpstreamError;

    fn from_str(text: &str) -> Result<Self, UpstreamError> {
        let mut parts = text.split(',');
        let address = parts.next().unwrap_or_default();
        let (scheme, _) = address.split_once("://").ok_or(UpstreamError::NoAddress)?;
        let (kind, plain) = Kind::from_address(address);
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
        // Clients of OpenAI's API write the base URL with `/v1`.
        let accepts_v1 = matches!(kind, Kind::Messages | Kind::Detected);
        let without_v1 = base.path().strip_suffix("v1/").filter(|_| accepts_v1).map(str::to_owned);
        if let Some(path) = without_v1 {
            base.set_path(&path);
        }
        let mut upstream =
            Self { kind, base, model: None, api_key_file: None, ca_file: None, rank: None };
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
                Some(("mode", "chat")) if kind == Kind::VllmTokens && upstream.rank.is_none() => {
                    upstream.kind = Kind::VllmMessages
                }
                // vLLM's Responses API chooses an engine itself, so chat mode has no ranks.
                Some(("ranks", count)) if upstream.kind == Kind::VllmTokens => {
                    let count = count.parse().ok().filter(|count| (2..=MAX_RANKS).contains(count));
                    let count = count.ok_or_else(|| UpstreamError::Option(option.to_owned()))?;
                    upstream.rank = Some(Rank { index: 0, count });
                }
                Some(("ca-file", path)) if !path.is_empty() => upstream.ca_file = Some(path.into()),
                _ => return Err(UpstreamError::Option(option.to_owned())),
            }
        }
        Ok(upstream)
    }
}

impl fmt::Display for Upstream {
    /// Writes the address without its options, and the engine.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.kind.prefix(), self.base.as_str().trim_end_matches('/'))?;
        self.rank.map_or(Ok(()), |rank| write!(f, " ({rank})"))
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.index, self.count)
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
    fn address_with_options_is_parsed() {
        let parsed: Upstream =
            "vllm+https://gpu1:8000/models/m,api-key-file=/k,ca-file=ca.pem".parse().unwrap();
        assert_eq!(parsed.base.as_str(), "https://gpu1:8000/models/m/");
        assert_eq!(
            (parsed.api_key_file, parsed.ca_file),
            (Some("/k".into()), Some("ca.pem".into()))
        );
        let chat: Upstream = "vllm+http://gpu1:8000,mode=chat".parse().unwrap();
        assert_eq!((chat.kind, chat.takes_messages()), (Kind::VllmMessages, true));
        let ranks: Upstream = "vllm+http://gpu1:8000,ranks=2,model=m".parse().unwrap();
        let ranks: Vec<String> = ranks.per_engine().iter().map(Upstream::to_string).collect();
        let address = "vllm+http://gpu1:8000";
        assert_eq!(ranks, [0, 1].map(|rank| format!("{address} (rank {rank} of 2)")));
        assert_eq!(chat.per_engine(), std::slice::from_ref(&chat));
        let trtllm: Upstream = "trtllm+https://gpu1,block-size=64".parse().unwrap();
        assert_eq!(trtllm.kind, Kind::Trtllm { block_size: BlockSize::new(64).unwrap() });
        assert_eq!(trtllm.to_string(), "trtllm+https://gpu1");
        let plain: Upstream = "http://gpu1:8000/x/v1,model=org/m".parse().unwrap();
        assert_eq!(plain.model.as_deref(), Some("org/m"));
        assert_eq!((plain.kind, plain.base.as_str()), (Kind::Detected, "http://gpu1:8000/x/"));
        let openai: Upstream = "openai+http://gpu1:8000/v1".parse().unwrap();
        assert_eq!((openai.kind, openai.base.as_str()), (Kind::Messages, "http://gpu1:8000/"));
        assert_eq!(openai.to_string(), "openai+http://gpu1:8000");
        for text in ["vllm+http://[::1]:8000", "sglang+https://gpu1:30000/below"] {
            assert_eq!(text.parse::<Upstream>().unwrap().to_string(), text);
        }
        let sglang: Upstream = "sglang+http://gpu1:30000/v1".parse().unwrap();
        assert_eq!(
            (sglang.kind, sglang.base.as_str()),
            (Kind::SglangTokens, "http://gpu1:30000/v1/")
        );
    }

    #[test]
    fn invalid_address_is_refused_with_its_fault() {
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
            ("vllm+http://gpu1,ranks=1", UpstreamError::Option("ranks=1".to_owned())),
            ("vllm+http://gpu1,ranks=1025", UpstreamError::Option("ranks=1025".to_owned())),
            ("vllm+http://gpu1,mode=chat,ranks=2", UpstreamError::Option("ranks=2".to_owned())),
            ("vllm+http://gpu1,ranks=2,mode=chat", UpstreamError::Option("mode=chat".to_owned())),
            ("http://gpu1,ranks=2", UpstreamError::Option("ranks=2".to_owned())),
            ("trtllm+http://gpu1,block-size=0", UpstreamError::Option("block-size=0".to_owned())),
            ("http://gpu1,mode=chat", UpstreamError::Option("mode=chat".to_owned())),
            ("http://gpu1,model=", UpstreamError::Option("model=".to_owned())),
            ("vllm+http://gpu1,key=secret", UpstreamError::Option("key=secret".to_owned())),
        ] {
            assert_eq!(text.parse::<Upstream>(), Err(error), "{text}");
        }
    }
}
