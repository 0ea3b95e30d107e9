//! The connector through which engines of one fleet exchange the keys and values of prompts.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use chiasm_types::Role;
use serde_json::{Map, Value, json};

/// The environment variable for the network devices that UCX uses. An operator may set it.
pub(super) const NET_DEVICES_VARIABLE: &str = "UCX_NET_DEVICES";

/// vLLM's connector for engines with roles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvConnector {
    /// `NixlConnector`: the decoding engine reads the memory of the prefilling one. Needs the
    /// packages `nixl` and, with CUDA, `nixl-cu12` or `nixl-cu13` in vLLM's environment.
    Nixl,
    /// `ExampleConnector`, for trials: keys and values are files in this folder, which are never
    /// removed.
    Files(PathBuf),
    /// Another connector, as the value of vLLM's `--kv-transfer-config`. `kv_role` is added unless
    /// present.
    Other(Map<String, Value>),
}

impl KvConnector {
    /// Returns the `--kv-transfer-config` of an engine with a role; `None` if the engine neither
    /// sends nor gets keys and values.
    pub(super) fn config(&self, role: Role) -> Option<Value> {
        let kv_role = match role {
            Role::Aggregated | Role::Encode => return None,
            Role::Prefill => "kv_producer",
            Role::Decode => "kv_consumer",
        };
        // An engine that can't get the keys and values computes them: the answer is late, not lost.
        let policy = "recompute";
        Some(match self {
            Self::Nixl => json!({
                "kv_connector": "NixlConnector",
                "kv_role": kv_role,
                "kv_load_failure_policy": policy,
            }),
            Self::Files(folder) => json!({
                "kv_connector": "ExampleConnector",
                "kv_role": kv_role,
                "kv_connector_extra_config": {"shared_storage_path": folder},
            }),
            Self::Other(config) => {
                let mut config = config.clone();
                config.entry("kv_role").or_insert_with(|| kv_role.into());
                Value::Object(config)
            }
        })
    }

    /// Returns the environment variables of an engine. `address` and `port` are those of its side
    /// channel on a private network.
    ///
    /// Without an address the side channel is on loopback. UCX, which moves the data, is then
    /// limited to the loopback interface: by default it listens on all interfaces and serves any
    /// client. With `devices_are_set`, the operator's choice of interfaces is kept.
    pub(super) fn env(
        &self,
        address: Option<IpAddr>,
        port: u16,
        devices_are_set: bool,
    ) -> Vec<(String, String)> {
        match self {
            Self::Nixl => {
                let host = address.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)).to_string();
                let devices = (address.is_none() && !devices_are_set)
                    .then(|| (NET_DEVICES_VARIABLE, "lo".to_owned()));
                let side_channel = [
                    ("VLLM_NIXL_SIDE_CHANNEL_HOST", host),
                    ("VLLM_NIXL_SIDE_CHANNEL_PORT", port.to_string()),
                ];
                side_channel
                    .into_iter()
                    .chain(devices)
                    .map(|(name, value)| (name.to_owned(), value))
                    .collect()
            }
            Self::Files(_) | Self::Other(_) => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_has_role_unless_given() {
        assert_eq!(KvConnector::Nixl.config(Role::Aggregated), None);
        let nixl = KvConnector::Nixl.config(Role::Decode).unwrap();
        assert_eq!(
            (&nixl["kv_role"], &nixl["kv_load_failure_policy"]),
            (&json!("kv_consumer"), &json!("recompute"))
        );
        let files = KvConnector::Files("/kv".into()).config(Role::Prefill).unwrap();
        assert_eq!(files["kv_connector_extra_config"], json!({"shared_storage_path": "/kv"}));
        let config_of_other = |config: Value| match config {
            Value::Object(config) => KvConnector::Other(config).config(Role::Prefill).unwrap(),
            _ => panic!("an object"),
        };
        assert_eq!(
            config_of_other(json!({"kv_connector": "X"})),
            json!({"kv_connector": "X", "kv_role": "kv_producer"})
        );
        let both = json!({"kv_connector": "X", "kv_role": "kv_both"});
        assert_eq!(config_of_other(both.clone()), both);
    }

    #[test]
    fn side_channel_is_private_or_loopback() {
        let env = |address: Option<[u8; 4]>, devices_are_set| {
            KvConnector::Nixl.env(address.map(IpAddr::from), 7, devices_are_set)
        };
        let side_channel = |host: &str| {
            [("VLLM_NIXL_SIDE_CHANNEL_HOST", host), ("VLLM_NIXL_SIDE_CHANNEL_PORT", "7")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
        };
        let lo = [("UCX_NET_DEVICES".to_owned(), "lo".to_owned())];
        assert_eq!(env(None, false), [&side_channel("127.0.0.1")[..], &lo].concat());
        assert_eq!(env(None, true), side_channel("127.0.0.1"), "the operator's devices");
        assert_eq!(env(Some([10, 0, 0, 7]), false), side_channel("10.0.0.7"));
        assert_eq!(KvConnector::Files("/kv".into()).env(None, 7, false), []);
    }
}
