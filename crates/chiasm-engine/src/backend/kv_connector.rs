//! How engines of one fleet hand keys and values of prompts to each other.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use chiasm_types::Role;
use serde_json::{Map, Value, json};

/// The network devices that UCX uses, of which the operator may know better.
pub(super) const NET_DEVICES: &str = "UCX_NET_DEVICES";

/// The connector of vLLM that engines with roles have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvConnector {
    /// The engine that decodes reads the memory of the one that has prefilled: `NixlConnector`.
    /// Needs the packages `nixl` and, beside CUDA, `nixl-cu12` or `nixl-cu13` in vLLM's
    /// environment.
    Nixl,
    /// Keys and values go through files of this folder, which nobody removes: `ExampleConnector`,
    /// for trials.
    Files(PathBuf),
    /// Another one, as vLLM's `--kv-transfer-config` has it, to which `kv_role` is added unless it
    /// is there.
    Other(Map<String, Value>),
}

impl KvConnector {
    /// What an engine of a role is told with `--kv-transfer-config`; `None` if it neither leaves
    /// keys and values nor gets any.
    pub(super) fn config(&self, role: Role) -> Option<Value> {
        let kv_role = match role {
            Role::Aggregated | Role::Encode => return None,
            Role::Prefill => "kv_producer",
            Role::Decode => "kv_consumer",
        };
        // An engine that can't get what another one has left computes it: its answer is late and
        // not lost.
        let policy = "recompute";
        Some(match self {
            Self::Nixl => {
                json!({"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_load_failure_policy": policy})
            }
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

    /// The environment of an engine that others find at this port of a private network's address;
    /// without one at a loopback address, and its data through no interface that other machines
    /// reach, unless `devices_are_said`: UCX, which moves the data, would listen at all, and gives
    /// it to whoever asks.
    pub(super) fn env(
        &self,
        address: Option<IpAddr>,
        port: u16,
        devices_are_said: bool,
    ) -> Vec<(String, String)> {
        match self {
            Self::Nixl => {
                let host = address.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)).to_string();
                let devices = (address.is_none() && !devices_are_said)
                    .then(|| (NET_DEVICES, "lo".to_owned()));
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
    fn engines_are_told_their_role_unless_somebody_else_has_said_it() {
        assert_eq!(KvConnector::Nixl.config(Role::Aggregated), None);
        let nixl = KvConnector::Nixl.config(Role::Decode).unwrap();
        assert_eq!(
            (&nixl["kv_role"], &nixl["kv_load_failure_policy"]),
            (&json!("kv_consumer"), &json!("recompute"))
        );
        let files = KvConnector::Files("/kv".into()).config(Role::Prefill).unwrap();
        assert_eq!(files["kv_connector_extra_config"], json!({"shared_storage_path": "/kv"}));
        let other = |config: Value| match config {
            Value::Object(config) => KvConnector::Other(config).config(Role::Prefill).unwrap(),
            _ => panic!("an object"),
        };
        assert_eq!(
            other(json!({"kv_connector": "X"})),
            json!({"kv_connector": "X", "kv_role": "kv_producer"})
        );
        let both = json!({"kv_connector": "X", "kv_role": "kv_both"});
        assert_eq!(other(both.clone()), both);
    }

    #[test]
    fn engines_are_found_on_a_private_network_or_by_nobody_elsewhere() {
        let env = |address: Option<[u8; 4]>, said| {
            KvConnector::Nixl.env(address.map(IpAddr::from), 7, said)
        };
        let told = |host: &str| {
            [("VLLM_NIXL_SIDE_CHANNEL_HOST", host), ("VLLM_NIXL_SIDE_CHANNEL_PORT", "7")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
        };
        let lo = [("UCX_NET_DEVICES".to_owned(), "lo".to_owned())];
        assert_eq!(env(None, false), [&told("127.0.0.1")[..], &lo].concat());
        assert_eq!(env(None, true), told("127.0.0.1"), "as the operator says");
        assert_eq!(env(Some([10, 0, 0, 7]), false), told("10.0.0.7"));
        assert_eq!(KvConnector::Files("/kv".into()).env(None, 7, false), []);
    }
}
