//! A job's stage as the engine's connectors are told it, and what they say of keys and values, or
//! embeddings, that it leaves.

use std::net::IpAddr;

use bytes::Bytes;
use chiasm_backend::{Embeddings, JobError, JobItem, Left, Network, Stage};
use rmpv::Value;

use super::embedding_store::EmbeddingStore;
use crate::wire::ExtraArgs;

/// Nesting of what an engine says: blocks of groups of its layers.
const MAX_DEPTH: usize = 16;

/// Who is told where keys and values are has to know all of this, and of some blocks: an engine
/// dies of a request that lacks some (`add_new_req_to_recv` and `update_state_after_alloc` of
/// `vllm/distributed/kv_transfer/kv_connector/v1/nixl`).
const NEEDED: [&str; 5] =
    ["remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port"];

/// What the engine's connectors are told of a job. `private_network` is where other machines'
/// engines may be.
///
/// # Errors
/// [`JobError::Failed`]: what another engine has left is not what one says.
pub(super) fn extra_args(
    stage: &Stage,
    private_network: Option<Network>,
) -> Result<Option<ExtraArgs>, JobError> {
    let kv_transfer_params = match stage {
        Stage::Whole | Stage::Encode => return Ok(None),
        Stage::Prefill => asked(),
        Stage::Decode(left) => read(left, private_network).ok_or(JobError::Failed)?,
    };
    Ok(Some(ExtraArgs { kv_transfer_params: Some(kv_transfer_params), ..ExtraArgs::default() }))
}

/// What an engine says that it has left. `None` if it left nothing that another one could use.
pub(super) fn left(said: &Value, private_network: Option<Network>) -> Option<Left> {
    let mut words = Vec::new();
    rmpv::encode::write_value(&mut words, said).ok()?;
    Left::new(Bytes::from(words)).filter(|left| read(left, private_network).is_some())
}

/// Returns those of these items whose embeddings an engine says that it has left, and the room that
/// they take.
pub(super) fn embeddings(
    said: &Value,
    items: &[JobItem],
    store: Option<&EmbeddingStore>,
) -> Vec<Embeddings> {
    let of = |item: &JobItem| {
        let (name, said) = (item.name(), &said[item.name().as_str()]);
        // Connectors other than the plugin's don't tell the size.
        let bytes = || said["bytes"].as_u64().or_else(|| store?.bytes_of(&name)).unwrap_or(0);
        (!said.is_nil()).then(|| Embeddings { item: item.hash, bytes: bytes() })
    };
    items.iter().filter_map(of).collect()
}

/// Keys and values are to be left for another engine.
fn asked() -> Value {
    let nothing = ["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"]
        .map(|name| (name, Value::Nil));
    let flags = [("do_remote_decode", true), ("do_remote_prefill", false)]
        .map(|(name, flag)| (name, Value::from(flag)));
    Value::Map(flags.into_iter().chain(nothing).map(|(name, value)| (name.into(), value)).collect())
}

/// What the other engine has said, if an engine can be told that.
fn read(left: &Left, private_network: Option<Network>) -> Option<Value> {
    let mut words = left.words().as_ref();
    let said = rmpv::decode::read_value_with_max_depth(&mut words, MAX_DEPTH)
        .ok()
        .filter(|_| words.is_empty())?;
    let has = |name: &str| said[name] != Value::Nil;
    let has_blocks = said["remote_block_ids"].as_array().is_some_and(|groups| !groups.is_empty());
    let is_trusted =
        said["remote_host"].as_str().is_some_and(|host| is_trusted(host, private_network));
    let can_be_had = said["do_remote_prefill"] == Value::from(true)
        && has_blocks
        && is_trusted
        && NEEDED.into_iter().all(has);
    can_be_had.then_some(said)
}

/// Whether an engine may connect to this host, as it does to whatever it is told: nothing protects
/// keys and values on the way. It is this machine, or with a private network an address of that and
/// no other. There the engines of this machine say theirs too, so who says "127.0.0.1" speaks of
/// another machine, whose loopback addresses mean somebody else here. Names are not looked up, as
/// what they mean may change.
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

    fn said(change: impl Fn(&str) -> Option<Value>) -> Value {
        let all = NEEDED.into_iter().chain(["do_remote_prefill"]);
        let blocks = || Value::Array(vec![Value::Array(vec![7.into()])]);
        let all_but = |name: &str| match name {
            "remote_block_ids" => blocks(),
            "remote_host" => "127.0.0.1".into(),
            _ => Value::from(true),
        };
        let value = |name: &str| change(name).unwrap_or_else(|| all_but(name));
        Value::Map(all.map(|name| (name.into(), value(name))).collect())
    }

    #[test]
    fn what_an_engine_leaves_comes_to_the_other_as_it_was_said() {
        let words = said(|_| None);
        let told = extra_args(&Stage::Decode(left(&words, None).unwrap()), None).unwrap().unwrap();
        assert_eq!(told.kv_transfer_params, Some(words));
        let asked = extra_args(&Stage::Prefill, None).unwrap().unwrap().kv_transfer_params.unwrap();
        assert_eq!(
            (&asked["do_remote_decode"], &asked["do_remote_prefill"]),
            (&Value::from(true), &Value::from(false))
        );
        assert!(matches!(extra_args(&Stage::Whole, None), Ok(None)));
    }

    #[test]
    fn what_would_kill_the_other_engine_is_nothing() {
        for lacks in NEEDED.into_iter().chain(["do_remote_prefill"]) {
            let without = said(|name| (name == lacks).then_some(Value::Nil));
            assert_eq!(left(&without, None), None, "{lacks}");
        }
        let of_nothing =
            said(|name| (name == "remote_block_ids").then(|| Value::Array(Vec::new())));
        for host in ["10.0.0.7", "example.org", "0.0.0.0", ""] {
            let elsewhere = said(|name| (name == "remote_host").then(|| host.into()));
            assert_eq!(left(&elsewhere, None), None, "{host}");
        }
        for words in [
            of_nothing,
            Value::Nil,
            Value::from(1),
            Value::Map(Vec::new()),
            Value::from("remote_host"),
        ] {
            assert_eq!(left(&words, None), None, "{words}");
        }
        let trailing = Left::new(Bytes::from_static(b"\x80\x80")).unwrap();
        assert!(matches!(extra_args(&Stage::Decode(trailing), None), Err(JobError::Failed)));
    }

    #[test]
    fn an_engine_is_told_of_its_own_machine_or_of_the_private_network_and_of_nobody_else() {
        let passes = |host: &str, network: Option<&str>| {
            let network = network.map(|network| network.parse::<Network>().unwrap());
            let words = said(|name| (name == "remote_host").then(|| host.into()));
            let passed_on = left(&words, network);
            // Whoever says it and whoever is told judge alike, and the latter believes nobody.
            let unchecked = left(&said(|_| None), None).map(|_| {
                let mut bytes = Vec::new();
                rmpv::encode::write_value(&mut bytes, &words).unwrap();
                Left::new(Bytes::from(bytes)).unwrap()
            });
            assert_eq!(
                extra_args(&Stage::Decode(unchecked.unwrap()), network).is_ok(),
                passed_on.is_some(),
                "{host}"
            );
            passed_on.is_some()
        };
        for host in ["127.0.0.1", "127.0.0.2", "::1", "localhost"] {
            assert!(passes(host, None), "{host}");
            assert!(
                !passes(host, Some("10.0.0.0/24")),
                "{host} is another machine's, or means somebody else there"
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
