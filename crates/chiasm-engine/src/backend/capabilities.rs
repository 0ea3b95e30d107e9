//! The capabilities of an engine, from its ready report.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use chiasm_backend::{
    Capabilities, HandOff, InputForm, KeyScheme, KvEventStream, KvSource, LargestItem, Locality,
    MediaForm, Network, PlaceholderForm, PlanClass, TensorFormat, VllmItems,
};
use chiasm_types::{BlockSize, Dtype, Role};

use super::format_policy::FormatPolicy;
use crate::wire::EngineReady;
use crate::wire::SUPPORTS;
use crate::wire::handshake::KvEventsConfig;

/// The properties of an engine that its ready report does not have.
pub(super) struct EngineContext {
    pub(super) processor: Arc<[u8]>,
    pub(super) format: TensorFormat,
    pub(super) locality: Locality,
    pub(super) has_arena: bool,
    /// The capacity of the encoder cache, if the plugin reports it.
    pub(super) encoder_cache_tokens: Option<u64>,
    /// The largest item, from which the capacity is derived otherwise.
    pub(super) largest_item: LargestItem,
    pub(super) receiver_cache_bytes: u64,
    pub(super) role: Role,
    pub(super) embedding_store_bytes: u64,
    pub(super) private_network: Option<Network>,
}

/// A property that makes an engine unsuitable.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unsuitable {
    /// The block size is 0.
    #[error("its block size is 0")]
    BlockSize,
    /// The model's element type is not a float that tensors can have.
    #[error("its element type '{0}' is not a float that tensors can have")]
    ElementType(String),
}

/// Builds the capabilities of an engine from its ready report and `context`.
pub(super) fn build(
    ready: &EngineReady,
    context: EngineContext,
) -> Result<Capabilities, Unsuitable> {
    let block_size = BlockSize::new(ready.cache_block_size()).ok_or(Unsuitable::BlockSize)?;
    let kv = kv_source(ready.kv_events_config.as_ref(), &context.locality);
    let step = ready.max_num_batched_tokens as usize;
    let encoder_cache = || {
        context
            .largest_item
            .encoder_cache(step, ready.max_model_len)
            .unwrap_or(ready.max_num_batched_tokens.into())
    };
    let encoder_cache_tokens = context.encoder_cache_tokens.unwrap_or_else(encoder_cache);
    let engine = format!("vLLM {}", ready.vllm_version);
    Ok(Capabilities {
        class: PlanClass {
            processor: context.processor,
            vllm_items: VllmItems::for_engine(&engine),
            placeholders: PlaceholderForm::Expanded,
            keys: KeyScheme::Chiasm,
            block_size,
        },
        role: context.role,
        embedding_store_bytes: context.embedding_store_bytes,
        engine,
        max_model_len: ready.max_model_len,
        max_batched_tokens: step,
        max_running: ready.max_num_seqs as usize,
        total_blocks: ready.num_gpu_blocks,
        encoder_cache_tokens,
        receiver_cache_bytes: context.receiver_cache_bytes,
        max_loras: if ready.supports_lora { ready.max_loras as usize } else { 0 },
        adapters: BTreeMap::new(),
        supports: SUPPORTS,
        input: InputForm::Tokens,
        media: MediaForm::Tensors(context.format),
        hand_off: if context.has_arena { HandOff::SharedMemory } else { HandOff::Inline },
        locality: context.locality,
        private_network: context.private_network,
        kv,
    })
}

/// Returns the format of the engine's tensors. Normalised values have the model's element type, to
/// which vLLM's frontend casts them.
pub(super) fn format(
    ready: &EngineReady,
    policy: FormatPolicy,
) -> Result<TensorFormat, Unsuitable> {
    if policy.is_raw(&ready.vllm_version) {
        return Ok(TensorFormat::Raw);
    }
    match model_dtype(ready) {
        Some(dtype) => Ok(TensorFormat::Normalized(dtype)),
        None => Err(Unsuitable::ElementType(dtype_name(ready).to_owned())),
    }
}

/// Returns the element type of the engine's model, if it is a float that tensors can have.
pub(super) fn model_dtype(ready: &EngineReady) -> Option<Dtype> {
    let dtype = Dtype::from_torch_name(dtype_name(ready))?;
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16).then_some(dtype)
}

fn dtype_name(ready: &EngineReady) -> &str {
    ready.dtype.trim_start_matches("torch.")
}

/// Returns the locality of an engine that connects from `peer`. Unix sockets only connect from this
/// machine.
pub(super) fn locality(over_unix_sockets: bool, peer: Option<IpAddr>) -> Locality {
    match peer {
        _ if over_unix_sockets => Locality::Here,
        Some(peer) if peer.is_loopback() => Locality::Here,
        Some(peer) => Locality::Host(peer),
        None => Locality::Unknown,
    }
}

/// Returns the source of the engine's KV events.
///
/// A wildcard address stands for the machine of the engine only. On another machine another engine
/// may listen there, whose blocks would be taken for this one's.
fn kv_source(config: Option<&KvEventsConfig>, locality: &Locality) -> KvSource {
    let unknown = |why: &str| KvSource::Unknown { why: why.to_owned() };
    let Some(config) = config.filter(|config| config.enable_kv_cache_events) else {
        return unknown("it publishes no KV events (--kv-events-config)");
    };
    if config.publisher != "zmq" {
        return unknown(
            "its KV events are not published over ZMQ (--kv-events-config, \"publisher\": \"zmq\")",
        );
    }
    let stream = KvEventStream::for_locality(
        &config.endpoint,
        config.replay_endpoint.as_deref(),
        &config.topic,
        locality,
    );
    stream.map_or_else(
        || {
            unknown(
                "the address of its KV events can't be reached from here, \
                 or its machine is not known",
            )
        },
        KvSource::Events,
    )
}

#[cfg(test)]
mod tests {
    use chiasm_types::VllmVersion;

    use super::*;

    fn published(endpoint: &str, replay: Option<&str>) -> KvEventsConfig {
        KvEventsConfig {
            enable_kv_cache_events: true,
            publisher: "zmq".to_owned(),
            endpoint: endpoint.to_owned(),
            replay_endpoint: replay.map(str::to_owned),
            ..KvEventsConfig::default()
        }
    }

    fn endpoints(config: &KvEventsConfig, locality: &Locality) -> Option<(String, Option<String>)> {
        match kv_source(Some(config), locality) {
            KvSource::Events(stream) => Some((stream.endpoint, stream.replay_endpoint)),
            KvSource::Unknown { .. } | KvSource::Backend => None,
        }
    }

    #[test]
    fn wildcard_stands_for_machine_of_engine() {
        let config = published("tcp://*:5557", Some("tcp://0.0.0.0:5558"));
        let at = |locality| endpoints(&config, &locality);
        let both =
            |host: &str| Some((format!("tcp://{host}:5557"), Some(format!("tcp://{host}:5558"))));
        assert_eq!(at(Locality::Here), both("127.0.0.1"));
        assert_eq!(at(Locality::Host([10, 0, 0, 7].into())), both("10.0.0.7"));
        assert_eq!(at(Locality::Host("fd00::7".parse().unwrap())), both("[fd00::7]"));
        assert_eq!(at(Locality::Unknown), None);
    }

    #[test]
    fn local_address_of_other_machine_is_unreachable() {
        let elsewhere = Locality::Host([10, 0, 0, 7].into());
        for endpoint in ["tcp://127.0.0.1:5557", "tcp://localhost:5557", "ipc:///tmp/events"] {
            let config = published(endpoint, None);
            assert_eq!(endpoints(&config, &elsewhere), None, "{endpoint}");
            assert_eq!(endpoints(&config, &Locality::Here), Some((endpoint.to_owned(), None)));
        }
        let named = published("tcp://10.0.0.9:5557", None);
        assert_eq!(
            endpoints(&named, &Locality::Unknown),
            Some(("tcp://10.0.0.9:5557".to_owned(), None))
        );
        // Without replay the first lost message ends all knowledge of the cache, so a configured
        // replay address must be reachable.
        assert_eq!(endpoints(&published("tcp://*:1", Some("tcp://127.0.0.1:2")), &elsewhere), None);
    }

    #[test]
    fn encoder_cache_is_reported_or_derived() {
        let ready = EngineReady {
            max_model_len: 131_072,
            max_num_batched_tokens: 8192,
            block_size: 16,
            ..EngineReady::default()
        };
        let tokens = |reported, largest_item| {
            let context = EngineContext {
                processor: b"p"[..].into(),
                format: TensorFormat::Raw,
                locality: Locality::Here,
                has_arena: false,
                encoder_cache_tokens: reported,
                largest_item,
                receiver_cache_bytes: 0,
                role: Role::Aggregated,
                embedding_store_bytes: 0,
                private_network: None,
            };
            build(&ready, context).unwrap().encoder_cache_tokens
        };
        let almost_context = || LargestItem::known(|context| context - 1);
        assert_eq!(tokens(Some(7), almost_context()), 7);
        assert_eq!(tokens(None, almost_context()), 131_071);
        assert_eq!(tokens(None, LargestItem::known(|_| 576)), 8192);
        assert_eq!(tokens(None, LargestItem::unknown()), 8192);
    }

    #[test]
    fn engine_without_events_has_unknown_source() {
        let off = KvEventsConfig { enable_kv_cache_events: false, ..published("tcp://*:1", None) };
        let null = KvEventsConfig { publisher: "null".to_owned(), ..published("tcp://*:1", None) };
        for config in [None, Some(&off), Some(&null)] {
            assert!(matches!(kv_source(config, &Locality::Here), KvSource::Unknown { .. }));
        }
    }

    #[test]
    fn raw_since_depends_on_version() {
        let since = FormatPolicy::RawSince(VllmVersion::minor(0, 32));
        let format_of = |version: &str, policy| {
            let ready = EngineReady {
                vllm_version: version.to_owned(),
                dtype: "torch.bfloat16".to_owned(),
                ..EngineReady::default()
            };
            format(&ready, policy)
        };
        let floats = Ok(TensorFormat::Normalized(Dtype::BF16));
        assert_eq!(format_of("0.31.9", since), floats);
        for version in ["0.32.0", "0.33.1rc1", "0.32.0.dev7", "main"] {
            assert_eq!(format_of(version, since), Ok(TensorFormat::Raw), "{version}");
        }
        assert_eq!(format_of("0.31.0", FormatPolicy::Raw), Ok(TensorFormat::Raw));
        assert_eq!(format_of("0.33.0", FormatPolicy::Float), floats);
    }

    #[test]
    fn locality_follows_peer_address() {
        assert_eq!(locality(true, None), Locality::Here);
        assert_eq!(locality(false, Some([127, 0, 0, 1].into())), Locality::Here);
        assert_eq!(
            locality(false, Some([10, 0, 0, 7].into())),
            Locality::Host([10, 0, 0, 7].into())
        );
        assert_eq!(locality(false, None), Locality::Unknown);
    }
}
