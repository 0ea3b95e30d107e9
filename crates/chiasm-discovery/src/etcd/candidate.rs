//! The value of a key: an agent that is named.

use serde::{Deserialize, Serialize};

use crate::{DiscoveryError, address};

/// An agent that a key names: the JSON `{"address": "host:port", "model": "…"}`. Unknown fields are
/// ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Candidate {
    address: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
}

/// The fault of a value that names no agent.
#[derive(Debug, thiserror::Error)]
pub(super) enum ValueError {
    /// It is not JSON of the fields of a candidate.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// No agent can have its address.
    #[error(transparent)]
    Address(#[from] DiscoveryError),
}

impl Candidate {
    /// The agent that frontends reach at `address`, `host:port`, and the model that it serves, for
    /// people who look into etcd.
    ///
    /// # Errors
    /// [`DiscoveryError::Address`].
    pub fn new(address: &str, model: Option<String>) -> Result<Self, DiscoveryError> {
        Ok(Self { address: address::parse(address)?, model })
    }

    /// `host:port`, lower-case, IPv6 in brackets.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The model that the agent serves, if it is said.
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// Parses the value of a key.
    pub(super) fn parse(value: &[u8]) -> Result<Self, ValueError> {
        #[derive(Deserialize)]
        struct Said {
            address: String,
            model: Option<String>,
        }
        let said: Said = serde_json::from_slice(value)?;
        Ok(Self::new(&said.address, said.model)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_needs_an_address_and_may_have_more() {
        for (value, expected) in [
            (r#"{"address":"Host:1"}"#, Some(("host:1", None))),
            (r#"{"address":"[::1]:1","model":"m","zone":["x"]}"#, Some(("[::1]:1", Some("m")))),
            (r#"{"address":"host:1","model":null}"#, Some(("host:1", None))),
            (r#"{"address":"host"}"#, None),
            (r#"{"address":1}"#, None),
            (r#"{"address":"host:1","model":1}"#, None),
            (r#"{"model":"m"}"#, None),
            (r#""host:1""#, None),
            ("host:1", None),
            ("", None),
        ] {
            let parsed = Candidate::parse(value.as_bytes()).ok();
            let parsed = parsed.as_ref().map(|candidate| (candidate.address(), candidate.model()));
            assert_eq!(parsed, expected, "{value}");
        }
        assert!(Candidate::parse(b"\xff\xfe").is_err());
    }
}
