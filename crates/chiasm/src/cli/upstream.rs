//! The value of `--upstream`: one server, or Dynamo's workers.

use std::str::FromStr;

use chiasm_dynamo::{AddressError, DynamoAddress};
use chiasm_upstream::{Upstream, UpstreamError};

/// A server or workers that are not run by Chiasm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UpstreamArg {
    /// A server.
    Server(Upstream),
    /// The workers of Dynamo in one namespace.
    Dynamo(DynamoAddress),
}

impl UpstreamArg {
    /// Returns `true` if the server gets requests as clients sent them.
    pub(crate) fn takes_messages(&self) -> bool {
        matches!(self, Self::Server(upstream) if upstream.takes_messages())
    }
}

/// The error of an invalid value of `--upstream`.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UpstreamArgError {
    #[error(transparent)]
    Server(#[from] UpstreamError),
    #[error(transparent)]
    Dynamo(#[from] AddressError),
}

impl FromStr for UpstreamArg {
    type Err = UpstreamArgError;

    fn from_str(text: &str) -> Result<Self, UpstreamArgError> {
        if text.starts_with("dynamo+") {
            Ok(Self::Dynamo(text.parse()?))
        } else {
            Ok(Self::Server(text.parse()?))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upstream_is_server_or_dynamo_workers() {
        let parsed = |text: &str| text.parse::<UpstreamArg>().map_err(|error| error.to_string());
        assert!(matches!(parsed("dynamo+etcd://a:1/ns"), Ok(UpstreamArg::Dynamo(_))));
        assert!(parsed("http://a:1").is_ok_and(|upstream| upstream.takes_messages()));
        assert!(parsed("vllm+http://a:1").is_ok_and(|upstream| !upstream.takes_messages()));
        assert!(parsed("dynamo+nats://a:1").is_err_and(|error| error.contains("etcd")));
        assert!(parsed("sglang+http://a:1").is_ok_and(|upstream| !upstream.takes_messages()));
        assert!(parsed("tgi+http://a:1").is_err_and(|error| error.contains("tgi+http")));
    }
}
