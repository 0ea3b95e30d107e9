//! The value of an agent's key.

use serde::{Deserialize, Serialize};

use crate::{DiscoveryError, address};

/// An agent that a frontend may connect to. As the value of a key it is the JSON
/// `{"address": "host:port", "model": "…"}`, in which unknown fields are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Candidate {
    address: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
}

/// An error in the value of an agent's key.
#[derive(Debug, thiserror::Error)]
pub(super) enum ValueError {
    /// The value is not the JSON of a candidate.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// The address is invalid.
    #[error(transparent)]
    Address(#[from] DiscoveryError),
}

impl Candidate {
    /// Creates a candidate that frontends reach at `address`, `host:port`. The model only informs
    /// people who look into etcd.
    ///
    /// # Errors
    /// [`DiscoveryError::Address`] if the address is invalid.
    pub fn new(address: &str, model: Option<String>) -> Result<Self, DiscoveryError> {
        Ok(Self { address: address::parse(address)?, model })
    }

    /// Returns `host:port`, lower-case, IPv6 in brackets.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the model that the agent serves, if it is known.
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// Parses the value of a key.
    pub(super) fn parse(value: &[u8]) -> Result<Self, ValueError> {
        #[derive(Deserialize)]
        struct Fields {
            address: String,
            model: Option<String>,
        }
        let Fields { address, model } = serde_json::from_slice(value)?;
        Ok(Self::new(&address, model)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_without_valid_address_is_refused() {
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
