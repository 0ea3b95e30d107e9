//! The parameters of the engine's connectors: those of a request, derived from the job's stage, and
//! those of an output, for the next stage.

use std::net::IpAddr;

use bytes::Bytes;
use chiasm_backend::{JobError, JobItem, KvTransferParams, Network, Stage, StoredEmbeddings};
use rmpv::Value;

use super::embedding_store::EmbeddingStore;
use crate::wire::ExtraArgs;

/// The maximum nesting of parameters: blocks of groups of layers.
const MAX_DEPTH: usize = 16;

/// The parameters that a decode request must have, besides at least one block: an engine dies of a
/// request without them (`add_new_req_to_recv` and `update_state_after_alloc` of
/// `vllm/distributed/kv_transfer/kv_connector/v1/nixl`).
const REQUIRED_PARAMS: [&str; 5] =
    ["remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port"];

/// Returns the connectors' parameters for a job. `private_network` is the network of other
/// machines' engines.
///
/// # Errors
/// [`JobError::Failed`]: the parameters of a decode job are not valid.
pub(super) fn extra_args(
    stage: &Stage,
    private_network: Option<Network>,
) -> Result<Option<ExtraArgs>, JobError> {
    let kv_transfer_params = match stage {
        Stage::Whole | Stage::Encode => return Ok(None),
        Stage::Prefill => prefill_params(),
        Stage::Decode(params) => decode(params, private_network).ok_or(JobError::Failed)?,
    };
    Ok(Some(ExtraArgs { kv_transfer_params: Some(kv_transfer_params), ..ExtraArgs::default() }))
}

/// Returns the parameters for the decode stage that a prefill output has; `None` if another engine
/// could not use them.
pub(super) fn kv_transfer_params(
    output: &Value,
    private_network: Option<Network>,
) -> Option<KvTransferParams> {
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, output).ok()?;
    KvTransferParams::new(Bytes::from(bytes))
        .filter(|params| decode(params, private_network).is_some())
}

/// Returns the items whose embeddings an encode output reports as stored, with their sizes.
pub(super) fn stored_embeddings(
    output: &Value,
    items: &[JobItem],
    store: Option<&EmbeddingStore>,
) -> Vec<StoredEmbeddings> {
    let stored = |item: &JobItem| {
        let name = item.name();
        let params = &output[name.as_str()];
        if params.is_nil() {
            return None;
        }
        // Only the plugin's connector reports the size.
        let bytes = params["bytes"].as_u64().or_else(|| store?.item_bytes(&name)).unwrap_or(0);
        Some(StoredEmbeddings { item: item.hash, bytes })
    };
    items.iter().filter_map(stored).collect()
}

/// Returns the parameters of a prefill request, whose keys and values another engine gets.
fn prefill_params() -> Value {
    let empty = ["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"]
        .map(|name| (name, Value::Nil));
    let flags = [("do_remote_decode", true), ("do_remote_prefill", false)]
        .map(|(name, flag)| (name, Value::from(flag)));
    Value::Map(flags.into_iter().chain(empty).map(|(name, value)| (name.into(), value)).collect())
}

/// Decodes the parameters of a decode request. Returns `None` if they are not complete or name a
/// host that is not trusted.
fn decode(params: &KvTransferParams, private_network: Option<Network>) -> Option<Value> {
    let mut bytes = params.bytes().as_ref();
    let params = rmpv::decode::read_value_with_max_depth(&mut bytes, MAX_DEPTH)
        .ok()
        .filter(|_| bytes.is_empty())?;
    let has = |name: &str| params[name] != Value::Nil;
    let has_blocks = params["remote_block_ids"].as_array().is_some_and(|groups| !groups.is_empty());
    let is_trusted =
        params["remote_host"].as_str().is_some_and(|host| is_trusted(host, private_network));
    let is_usable = params["do_remote_prefill"] == Value::from(true)
        && has_blocks
        && is_trusted
        && REQUIRED_PARAMS.into_iter().all(has);
    is_usable.then_some(params)
}

/// Returns `true` if an engine may connect to this host. Engines connect to any host they are
/// given, and nothing protects keys and values on the way.
///
/// Without a private network only this machine is trusted. With one only its addresses are, which
/// this machine's engines announce too. A loopback address then comes from another machine, and
/// would mean a different process here. Names are not resolved because their meaning may change.
fn is_trusted(host: &str, private_network: Option<Network>) -> bool {
    let address = host.parse::<IpAddr>().ok();
    match private_network {
        Some(network) => address.is_some_and(|address| network.contains(address)),
        None => host == "localhost" || address.is_some_and(|address| address.is_loopback()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates the parameters of a prefill output. `change` replaces the values of some.
    fn output(change: impl Fn(&str) -> Option<Value>) -> Value {
        let names = REQUIRED_PARAMS.into_iter().chain(["do_remote_prefill"]);
        let blocks = || Value::Array(vec![Value::Array(vec![7.into()])]);
        let default = |name: &str| match name {
            "remote_block_ids" => blocks(),
            "remote_host" => "127.0.0.1".into(),
            _ => Value::from(true),
        };
        let value = |name: &str| change(name).unwrap_or_else(|| default(name));
        Value::Map(names.map(|name| (name.into(), value(name))).collect())
    }

    #[test]
    fn decode_params_equal_prefill_output() {
        let output = output(|_| None);
        let params = kv_transfer_params(&output, None).unwrap();
        let decode = extra_args(&Stage::Decode(params), None).unwrap().unwrap();
        assert_eq!(decode.kv_transfer_params, Some(output));
        let prefill =
            extra_args(&Stage::Prefill, None).unwrap().unwrap().kv_transfer_params.unwrap();
        assert_eq!(
            (&prefill["do_remote_decode"], &prefill["do_remote_prefill"]),
            (&Value::from(true), &Value::from(false))
        );
        assert!(matches!(extra_args(&Stage::Whole, None), Ok(None)));
    }

    #[test]
    fn unusable_prefill_output_is_ignored() {
        for missing in REQUIRED_PARAMS.into_iter().chain(["do_remote_prefill"]) {
            let incomplete = output(|name| (name == missing).then_some(Value::Nil));
            assert_eq!(kv_transfer_params(&incomplete, None), None, "{missing}");
        }
        let without_blocks =
            output(|name| (name == "remote_block_ids").then(|| Value::Array(Vec::new())));
        for host in ["10.0.0.7", "example.org", "0.0.0.0", ""] {
            let elsewhere = output(|name| (name == "remote_host").then(|| host.into()));
            assert_eq!(kv_transfer_params(&elsewhere, None), None, "{host}");
        }
        for invalid in [
            without_blocks,
            Value::Nil,
            Value::from(1),
            Value::Map(Vec::new()),
            Value::from("remote_host"),
        ] {
            assert_eq!(kv_transfer_params(&invalid, None), None, "{invalid}");
        }
        let trailing = KvTransferParams::new(Bytes::from_static(b"\x80\x80")).unwrap();
        assert!(matches!(extra_args(&Stage::Decode(trailing), None), Err(JobError::Failed)));
    }

    #[test]
    fn only_loopback_or_private_network_is_trusted() {
        let passes = |host: &str, network: Option<&str>| {
            let network = network.map(|network| network.parse::<Network>().unwrap());
            let output = output(|name| (name == "remote_host").then(|| host.into()));
            let is_sent = kv_transfer_params(&output, network).is_some();
            // The receiving side applies the same check.
            let mut bytes = Vec::new();
            rmpv::encode::write_value(&mut bytes, &output).unwrap();
            let unchecked = KvTransferParams::new(Bytes::from(bytes)).unwrap();
            let is_received = extra_args(&Stage::Decode(unchecked), network).is_ok();
            assert_eq!(is_received, is_sent, "{host}");
            is_sent
        };
        for host in ["127.0.0.1", "127.0.0.2", "::1", "localhost"] {
            assert!(passes(host, None), "{host}");
            assert!(
                !passes(host, Some("10.0.0.0/24")),
                "{host} is another machine's, or another host there"
            );
        }
        assert!(passes("10.0.0.8", Some("10.0.0.0/24")) && passes("fd00::8", Some("fd00::/64")));
        assert!(
            passes("127.0.0.3", Some("127.0.0.0/24")) && !passes("127.0.1.3", Some("127.0.0.0/24"))
        );
        for host in [
            "10.0.1.8",
            "0.0.0.0",
            "::ffff:10.0.0.8",
            "fd00::8",
            "gpu2",
            "10.0.0.8:5600",
            "010.0.0.8",
            "",
        ] {
            assert!(!passes(host, Some("10.0.0.0/24")), "{host}");
            assert!(!passes(host, None), "{host}");
        }
    }
}
