//! Conversion of an engine's capabilities to and from messages.

use std::net::IpAddr;

use chiasm_backend::{
    Capabilities, HandOff, InputForm, KeyScheme, KvSource, Locality, MediaForm, PlaceholderForm,
    PlanClass, PreloadedAdapter, TensorFormat, VllmItems, adapter_engine_name,
};
use chiasm_types::{BlockSize, Dtype, Role};

use crate::job::SUPPORTS;
use crate::proto;

/// The name of raw values among the types of tensors.
const RAW_TENSORS: &str = "raw";

/// The maximum length of an adapter's name and folder, in bytes.
const MAX_NAME_BYTES: usize = 4096;

/// The facts about an engine that an agent reports beside the engine's capabilities.
pub(crate) struct AgentFacts {
    /// The id of this start of the engine.
    pub(crate) life: u64,
    /// The maximum size of an item's tensors in bytes; `None` if the agent takes none.
    pub(crate) tensor_bytes: Option<u64>,
    /// The slots in which the agent decodes the engine's videos; `None` if it takes no cuts.
    pub(crate) video_slots: Option<u32>,
    /// `true` if the agent fetches media items.
    pub(crate) fetches_media: bool,
    pub(crate) adapters: Vec<PreloadedAdapter>,
}

pub(crate) fn to_message(capabilities: &Capabilities, facts: AgentFacts) -> proto::Ready {
    let AgentFacts { life, tensor_bytes, video_slots, fetches_media, adapters } = facts;
    let Capabilities {
        engine,
        class:
            PlanClass {
                processor,
                block_size,
                // Follows from the engine, and from whether the agent takes tensors.
                vllm_items: _,
                // The same for every EngineCore.
                placeholders: _,
                keys: _,
            },
        role,
        embedding_store_bytes,
        max_model_len,
        max_batched_tokens,
        max_running,
        total_blocks,
        encoder_cache_tokens,
        receiver_cache_bytes,
        // Frontends load no adapters at agents: the agent's `adapters` are all there are.
        max_loras: _,
        adapters: _,
        // The same for every engine of an agent: `job::SUPPORTS`.
        supports: _,
        input: _,
        media,
        // These describe the agent's machine and do not apply to a frontend elsewhere.
        hand_off: _,
        locality: _,
        private_network,
        kv,
    } = capabilities;
    proto::Ready {
        life,
        engine: engine.clone(),
        processor: processor.to_vec().into(),
        block_size: block_size.get() as u32,
        max_model_len: *max_model_len as u64,
        max_batched_tokens: *max_batched_tokens as u64,
        max_running: *max_running as u64,
        total_blocks: *total_blocks,
        encoder_cache_tokens: *encoder_cache_tokens,
        receiver_cache_bytes: *receiver_cache_bytes,
        takes_media: *media != MediaForm::None,
        kv_unknown: match kv {
            KvSource::Unknown { why } => why.clone(),
            KvSource::Events(_) | KvSource::Backend => String::new(),
        },
        takes_tensors: tensor_bytes.is_some(),
        role: role.name().to_owned(),
        embedding_store_bytes: *embedding_store_bytes,
        private_network: private_network.map(|network| network.to_string()).unwrap_or_default(),
        adapters: adapters.into_iter().map(adapter_to_message).collect(),
        fetches_media,
        image_tensors: match (media, tensor_bytes) {
            (MediaForm::Tensors(TensorFormat::Raw), Some(_)) => RAW_TENSORS.to_owned(),
            (MediaForm::Tensors(TensorFormat::Normalized(dtype)), Some(_)) => {
                dtype.torch_name().to_owned()
            }
            _ => String::new(),
        },
        most_tensor_bytes: tensor_bytes.unwrap_or(0),
        video_slots: video_slots.unwrap_or(0),
    }
}

/// Returns the format of an engine's image tensors, if the agent takes them and this version can
/// make them.
pub(crate) fn image_tensors(ready: &proto::Ready) -> Option<TensorFormat> {
    match ready.image_tensors.as_str() {
        RAW_TENSORS => Some(TensorFormat::Raw),
        name => {
            let dtype = Dtype::from_torch_name(name)?;
            matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
                .then_some(TensorFormat::Normalized(dtype))
        }
    }
}

fn adapter_to_message(
    PreloadedAdapter { name, root, stamp, refused }: PreloadedAdapter,
) -> proto::Adapter {
    proto::Adapter {
        name,
        root,
        stamp: u64::from_be_bytes(stamp),
        refused: refused.unwrap_or_default(),
    }
}

/// Parses an adapter and the name by which engines know it; `None` if it is malformed.
fn adapter_from_message(message: proto::Adapter) -> Option<(String, PreloadedAdapter)> {
    let proto::Adapter { name, root, stamp, refused } = message;
    if !(1..=MAX_NAME_BYTES).contains(&name.len()) || root.len() > MAX_NAME_BYTES {
        return None;
    }
    let stamp = stamp.to_be_bytes();
    let refused = Some(refused).filter(|reason| !reason.is_empty());
    Some((adapter_engine_name(&name, stamp), PreloadedAdapter { name, root, stamp, refused }))
}

/// Parses the capabilities of an engine on the machine at `address`; `None` if they are malformed.
pub(crate) fn from_message(ready: proto::Ready, address: Option<IpAddr>) -> Option<Capabilities> {
    let proto::Ready {
        engine,
        processor,
        block_size,
        max_model_len,
        max_batched_tokens,
        max_running,
        total_blocks,
        encoder_cache_tokens,
        receiver_cache_bytes,
        takes_media,
        kv_unknown,
        takes_tensors,
        role,
        embedding_store_bytes,
        private_network,
        adapters,
        // The connector reads these.
        life: _,
        fetches_media: _,
        image_tensors: _,
        most_tensor_bytes: _,
        video_slots: _,
    } = ready;
    Some(Capabilities {
        class: PlanClass {
            processor: processor.as_ref().into(),
            vllm_items: if takes_tensors {
                VllmItems::for_engine(&engine)
            } else {
                VllmItems::None
            },
            placeholders: PlaceholderForm::Expanded,
            keys: KeyScheme::Chiasm,
            block_size: BlockSize::new(block_size)?,
        },
        role: match role.as_str() {
            "" => Role::Aggregated,
            name => Role::parse(name)?,
        },
        embedding_store_bytes,
        engine,
        max_model_len: max_model_len.try_into().ok()?,
        max_batched_tokens: max_batched_tokens.try_into().ok()?,
        max_running: max_running.try_into().ok()?,
        total_blocks,
        encoder_cache_tokens,
        receiver_cache_bytes,
        // Frontends load none: the agent's operator decides which adapters there are.
        max_loras: 0,
        adapters: adapters.into_iter().map(adapter_from_message).collect::<Option<_>>()?,
        supports: SUPPORTS,
        input: InputForm::Tokens,
        media: if takes_media { MediaForm::Encoded } else { MediaForm::None },
        private_network: match private_network.as_str() {
            "" => None,
            network => Some(network.parse().ok()?),
        },
        hand_off: HandOff::None,
        locality: address.map_or(Locality::Unknown, Locality::Host),
        kv: if kv_unknown.is_empty() {
            KvSource::Backend
        } else {
            KvSource::Unknown { why: kv_unknown }
        },
    })
}
