//! What an engine can do as a message, and back.

use std::net::IpAddr;

use chiasm_backend::{
    Capabilities, HandOff, InputForm, KeyScheme, KvSource, Lacks, Locality, MediaForm, OwnAdapter, PlaceholderForm,
    PlanClass, TensorFormat, VllmItems, adapter_engine_name,
};
use chiasm_types::{BlockSize, Dtype, Role};

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
    proto::Ready {
        life,
        engine: can.engine.clone(),
        processor: can.class.processor.to_vec().into(),
        block_size: can.class.block_size.get() as u32,
        max_model_len: can.max_model_len as u64,
        max_batched_tokens: can.max_batched_tokens as u64,
        max_running: can.max_running as u64,
        total_blocks: can.total_blocks,
        encoder_cache_tokens: can.encoder_cache_tokens,
        receiver_cache_bytes: can.receiver_cache_bytes,
        takes_media: can.media != MediaForm::None,
        kv_unknown: match &can.kv {
            KvSource::Unknown { why } => why.clone(),
            KvSource::Events(_) | KvSource::Backend => String::new(),
        },
        takes_tensors: tensor_bytes.is_some(),
        role: can.role.name().to_owned(),
        embedding_store_bytes: can.embedding_store_bytes,
        private_network: can.private_network.map(|network| network.to_string()).unwrap_or_default(),
        adapters: adapters.into_iter().map(adapter_to_message).collect(),
        fetches_media,
        image_tensors: match (can.media, tensor_bytes) {
            (MediaForm::Tensors(TensorFormat::Raw), Some(_)) => RAW.to_owned(),
            (MediaForm::Tensors(TensorFormat::Normalized(dtype)), Some(_)) => dtype.torch_name().to_owned(),
            _ => String::new(),
        },
        most_tensor_bytes: tensor_bytes.unwrap_or(0),
    }
}

/// What an engine's tensors of images are to be, if the agent takes them and this version knows how to make them.
pub(crate) fn image_tensors(ready: &proto::Ready) -> Option<TensorFormat> {
    match ready.image_tensors.as_str() {
        RAW => Some(TensorFormat::Raw),
        name => {
            let dtype = Dtype::from_torch_name(name)?;
            matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16).then_some(TensorFormat::Normalized(dtype))
        }
    }
}

fn adapter_to_message(OwnAdapter { name, root, stamp, refused }: OwnAdapter) -> proto::Adapter {
    proto::Adapter { name, root, stamp: u64::from_be_bytes(stamp), refused: refused.unwrap_or_default() }
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
    Some(Capabilities {
        class: PlanClass {
            processor: ready.processor.as_ref().into(),
            vllm_items: match ready.takes_tensors {
                true => VllmItems::of_engine(&ready.engine),
                false => VllmItems::None,
            },
            placeholders: PlaceholderForm::Expanded,
            keys: KeyScheme::Chiasm,
            block_size: BlockSize::new(ready.block_size)?,
        },
        role: match ready.role.as_str() {
            "" => Role::Aggregated,
            name => Role::parse(name)?,
        },
        embedding_store_bytes: ready.embedding_store_bytes,
        engine: ready.engine,
        max_model_len: ready.max_model_len.try_into().ok()?,
        max_batched_tokens: ready.max_batched_tokens.try_into().ok()?,
        max_running: ready.max_running.try_into().ok()?,
        total_blocks: ready.total_blocks,
        encoder_cache_tokens: ready.encoder_cache_tokens,
        receiver_cache_bytes: ready.receiver_cache_bytes,
        // Frontends load none: which it has is for the agent's operator to say.
        max_loras: 0,
        adapters: ready.adapters.into_iter().map(adapter_from_message).collect::<Option<_>>()?,
        lacks: Lacks::default(),
        input: InputForm::Tokens,
        media: if ready.takes_media { MediaForm::Encoded } else { MediaForm::None },
        private_network: match ready.private_network.as_str() {
            "" => None,
            network => Some(network.parse().ok()?),
        },
        hand_off: HandOff::None,
        locality: address.map_or(Locality::Unknown, Locality::Host),
        kv: match ready.kv_unknown {
            why if why.is_empty() => KvSource::Backend,
            why => KvSource::Unknown { why },
        },
    })
}
