//! What `--upstream` names: one server, or workers that an etcd names.

use std::str::FromStr;

use chiasm_dynamo::{AddressError, DynamoAddress};
use chiasm_upstream::{Upstream, UpstreamError};

/// Something that somebody else runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UpstreamArg {
    /// A server.
    Server(Upstream),
    /// Workers of Dynamo.
    Dynamo(DynamoAddress),
}

impl UpstreamArg {
    /// Whether it is given requests as they come.
    pub(crate) fn takes_messages(&self) -> bool {
        matches!(self, Self::Server(upstream) if upstream.takes_messages())
    }
}

/// Why a text names neither.
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
        match text.starts_with("dynamo+") {
            true => Ok(Self::Dynamo(text.parse()?)),
            false => Ok(Self::Server(text.parse()?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upstream_is_a_server_or_workers_of_dynamo() {
        let parsed = |text: &str| text.parse::<UpstreamArg>().map_err(|error| error.to_string());
        assert!(matches!(parsed("dynamo+etcd://a:1/ns"), Ok(UpstreamArg::Dynamo(_))));
        assert!(parsed("http://a:1").is_ok_and(|upstream| upstream.takes_messages()));
        assert!(parsed("vllm+http://a:1").is_ok_and(|upstream| !upstream.takes_messages()));
        assert!(parsed("dynamo+nats://a:1").is_err_and(|error| error.contains("etcd")));
        assert!(parsed("sglang+http://a:1").is_ok_and(|upstream| !upstream.takes_messages()));
        assert!(parsed("tgi+http://a:1").is_err_and(|error| error.contains("tgi+http")));
    }
}
