//! What an engine can do as a message, and back.

use std::net::IpAddr;

use chiasm_backend::{
    Capabilities, HandOff, InputForm, KeyScheme, KvSource, Locality, MediaForm, OwnAdapter,
    PlaceholderForm, PlanClass, TensorFormat, VllmItems, adapter_engine_name,
};
use chiasm_types::{BlockSize, Dtype, Role};

use crate::job::SUPPORTS;
use crate::proto;

/// The name of raw values among the types of tensors.
const RAW: &str = "raw";

/// The longest name and folder of an adapter, in bytes.
const MOST_NAME_BYTES: usize = 4096;

/// What an agent tells of an engine beside what that can do.
pub(crate) struct OfAgent {
    /// Tells this start of the engine from others.
    pub(crate) life: u64,
    /// The most bytes of an item's tensors; `None` if the agent takes none.
    pub(crate) tensor_bytes: Option<u64>,
    /// Whether the agent fetches media items.
    pub(crate) fetches_media: bool,
    pub(crate) adapters: Vec<OwnAdapter>,
}

pub(crate) fn to_message(can: &Capabilities, of_agent: OfAgent) -> proto::Ready {
    let OfAgent { life, tensor_bytes, fetches_media, adapters } = of_agent;
    let Capabilities {
        engine,
        class:
            PlanClass {
                processor,
                block_size,
                // Follows from the engine and from whether tensors are taken.
                vllm_items: _,
                // As of every EngineCore.
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
        // Frontends load no adapters at agents: `adapters` of the agent are those that there are.
        max_loras: _,
        adapters: _,
        // As of every engine of an agent: `job::SUPPORTS`.
        supports: _,
        input: _,
        media,
        // These are of the agent's machine, and others than what a frontend has to do with it.
        hand_off: _,
        locality: _,
        private_network,
        kv,
    } = can;
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
            (MediaForm::Tensors(TensorFormat::Raw), Some(_)) => RAW.to_owned(),
            (MediaForm::Tensors(TensorFormat::Normalized(dtype)), Some(_)) => {
                dtype.torch_name().to_owned()
            }
            _ => String::new(),
        },
        most_tensor_bytes: tensor_bytes.unwrap_or(0),
    }
}

/// What an engine's tensors of images are to be, if the agent takes them and this version knows how
/// to make them.
pub(crate) fn image_tensors(ready: &proto::Ready) -> Option<TensorFormat> {
    match ready.image_tensors.as_str() {
        RAW => Some(TensorFormat::Raw),
        name => {
            let dtype = Dtype::from_torch_name(name)?;
            matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
                .then_some(TensorFormat::Normalized(dtype))
        }
    }
}

fn adapter_to_message(OwnAdapter { name, root, stamp, refused }: OwnAdapter) -> proto::Adapter {
    proto::Adapter {
        name,
        root,
        stamp: u64::from_be_bytes(stamp),
        refused: refused.unwrap_or_default(),
    }
}

/// The adapter, with the name that engines know it by. `None` if it is malformed.
fn adapter_from_message(message: proto::Adapter) -> Option<(String, OwnAdapter)> {
    let proto::Adapter { name, root, stamp, refused } = message;
    if !(1..=MOST_NAME_BYTES).contains(&name.len()) || root.len() > MOST_NAME_BYTES {
        return None;
    }
    let (stamp, refused) = (stamp.to_be_bytes(), Some(refused).filter(|why| !why.is_empty()));
    Some((adapter_engine_name(&name, stamp), OwnAdapter { name, root, stamp, refused }))
}

/// The capabilities of an engine on the machine of this address. `None` if they are malformed.
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
        // The connector looks at these.
        life: _,
        fetches_media: _,
        image_tensors: _,
        most_tensor_bytes: _,
    } = ready;
    Some(Capabilities {
        class: PlanClass {
            processor: processor.as_ref().into(),
            vllm_items: if takes_tensors { VllmItems::of_engine(&engine) } else { VllmItems::None },
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
        // Frontends load none: which it has is for the agent's operator to say.
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
