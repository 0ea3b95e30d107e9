//! A server's description of itself, as capabilities.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;
use chiasm_backend::{
    Capabilities, HandOff, InputForm, KeyScheme, KvEventStream, KvSource, LargestItem, Locality,
    MediaForm, PlaceholderForm, PlanClass, Supports, VllmItems,
};
use chiasm_types::{BlockSize, Role};
use serde::Deserialize;

use super::GENERATE;
use super::request::SUPPORTS;
use crate::encoder_cache::encoder_cache;
use crate::found::{METRICS, MODELS, read, unknown};
use crate::models::{self, Models, Names};
use crate::server::{AskError, Server};
use crate::unusable::Unusable;

const SERVER_INFO: &str = "server_info";
const MODEL_INFO: &str = "model_info";

/// The key schemes of the SGLang versions that the tests were run with. Other versions may hash
/// images otherwise.
const KNOWN: [(&str, KeyScheme); 2] =
    [("0.5.23", KeyScheme::Sglang), ("0.5.22", KeyScheme::SglangNarrow)];

/// Models of which SGLang, up to 0.5.23, takes images beside text alone: beside tokens it refuses
/// them, or fails.
const IMAGES_WITH_TEXT: [&str; 3] = ["internvl", "internvl_chat", "llava_next"];

/// Tokens of a block that is known by what was sent, where the server has blocks of single tokens.
const PRESUMED: u32 = 16;

/// The facts about a server that are needed before it can be used.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) model: models::Found,
    info: ServerInfo,
    max_model_len: usize,
    block_size: BlockSize,
    without_images: Option<String>,
    kv: KvSource,
}

/// The form in which this server takes requests.
#[derive(Debug)]
pub(crate) struct Manner {
    /// Why it is given no images. A server of a model without images ignores those that it is
    /// given, silently.
    pub(super) without_images: Option<String>,
    /// `None` if it has no priorities, otherwise whether the lower ones are handled earlier.
    pub(super) lower_is_earlier: Option<bool>,
    /// Prompts with images that it was given.
    prompts: AtomicU64,
}

impl Manner {
    /// Returns `true` if the next prompt with images is to be compared token by token. The server
    /// then sends the prompt with each event, so only the first prompts and some later ones are
    /// compared so. Of all others the number of tokens is compared.
    pub(super) fn compares_next(&self) -> bool {
        /// So many of the first, and one of so many later on.
        const EACH: u64 = 16;
        let before = self.prompts.fetch_add(1, Relaxed);
        before < EACH || before.is_multiple_of(EACH)
    }
}

/// Some of its settings, as far as they matter here. There are keys among the others, which nobody
/// gets to see.
#[derive(Debug, Default, Deserialize)]
struct ServerInfo {
    version: String,
    page_size: u32,
    #[serde(default)]
    max_total_num_tokens: u64,
    #[serde(default)]
    disable_radix_cache: bool,
    speculative_algorithm: Option<String>,
    #[serde(default)]
    uses_mamba_radix_cache: bool,
    #[serde(default)]
    enable_priority_scheduling: bool,
    #[serde(default)]
    schedule_low_priority_values_first: bool,
    disaggregation_mode: Option<String>,
    kv_events: Option<KvEvents>,
    /// JSON in a string.
    kv_events_config: Option<String>,
    #[serde(default)]
    internal_states: Vec<InternalState>,
}

#[derive(Debug, Deserialize)]
struct InternalState {
    effective_max_running_requests_per_dp: Option<usize>,
}

/// The endpoint at which it publishes.
#[derive(Debug, Deserialize)]
struct KvEvents {
    publisher: String,
    endpoint_host: String,
    endpoint_port_base: u16,
    #[serde(default)]
    topic: String,
    block_size: u32,
    dp_size: usize,
    replay_endpoint_port_base: Option<u16>,
}

#[derive(Deserialize)]
struct KvEventsConfig {
    format: Option<String>,
}

#[derive(Deserialize)]
struct ModelInfo {
    is_generation: Option<bool>,
    has_image_understanding: Option<bool>,
    #[serde(default)]
    model_type: String,
}

impl ModelInfo {
    /// Why it can't be given images; `None` if it can.
    fn without_images(&self) -> Option<String> {
        let Self { model_type, .. } = self;
        if self.has_image_understanding == Some(false) {
            return Some(
                "takes no images: its model has none, or --enable-multimodal is missing".to_owned(),
            );
        }
        let takes_none = IMAGES_WITH_TEXT.contains(&model_type.as_str());
        takes_none
            .then(|| format!("takes no images of models like this ({model_type}) beside tokens"))
    }
}

impl Found {
    /// Asks a server that is at this address.
    ///
    /// # Errors
    /// It can't be used.
    pub(crate) async fn ask(
        server: &Server,
        names: &Names,
        locality: &Locality,
    ) -> Result<Self, Unusable> {
        let info: ServerInfo = read(&server.get(SERVER_INFO).await.map_err(refusal)?, SERVER_INFO)?;
        let model_info: ModelInfo =
            read(&server.get(MODEL_INFO).await.map_err(refusal)?, MODEL_INFO)?;
        if model_info.is_generation == Some(false) {
            return Err(Unusable::GeneratesNothing);
        }
        if info.disaggregation_mode.as_deref().is_some_and(|mode| mode != "null") {
            return Err(Unusable::Disaggregated);
        }
        let models: Models = read(&server.get(MODELS).await.map_err(refusal)?, MODELS)?;
        let (model, max_model_len) = models.find_with_context(names)?;
        can_generate(server).await?;
        server.get(METRICS).await.map_err(|error| match error {
            AskError::Refused { .. } => Unusable::NoMetrics,
            error => error.into(),
        })?;
        let kv = kv_source(&info, locality);
        let block_size = match kv {
            KvSource::Unknown { .. } => BlockSize::new(info.page_size.max(PRESUMED)),
            _ => BlockSize::new(info.page_size),
        };
        let block_size = block_size.ok_or(Unusable::NoPageSize)?;
        Ok(Self {
            model,
            info,
            max_model_len,
            block_size,
            without_images: model_info.without_images(),
            kv,
        })
    }

    /// Returns the form in which the server takes requests.
    pub(crate) fn manner(&self) -> Manner {
        let ServerInfo { enable_priority_scheduling, schedule_low_priority_values_first, .. } =
            self.info;
        Manner {
            without_images: self.without_images.clone(),
            lower_is_earlier: enable_priority_scheduling
                .then_some(schedule_low_priority_values_first),
            prompts: AtomicU64::new(0),
        }
    }

    /// The capabilities of a worker that is this server. `processor` is that of the model that is
    /// served here.
    pub(crate) fn capabilities(
        self,
        processor: Arc<[u8]>,
        largest_item: &LargestItem,
        locality: Locality,
    ) -> Capabilities {
        let Self { info, max_model_len, block_size, without_images, kv, .. } = self;
        let is_known = !matches!(kv, KvSource::Unknown { .. });
        let running = info
            .internal_states
            .iter()
            .filter_map(|state| state.effective_max_running_requests_per_dp);
        Capabilities {
            engine: format!("SGLang {}, token mode", info.version),
            class: PlanClass {
                processor,
                // It is given files, and says what becomes of them only afterwards.
                vllm_items: VllmItems::None,
                placeholders: PlaceholderForm::Marker,
                keys: hashing(&info.version).filter(|_| is_known).unwrap_or(KeyScheme::Chiasm),
                block_size,
            },
            role: Role::Aggregated,
            embedding_store_bytes: 0,
            max_model_len,
            // It computes long prompts in pieces, whatever is in them.
            max_batched_tokens: max_model_len,
            max_running: running.sum(),
            total_blocks: info.max_total_num_tokens / block_size.get() as u64,
            // It has room for so many bytes, which are of another number of embeddings with each
            // model: taken to be as many as vLLM's.
            encoder_cache_tokens: encoder_cache(largest_item, max_model_len),
            receiver_cache_bytes: 0,
            max_loras: 0,
            adapters: BTreeMap::new(),
            supports: Supports { media: without_images.is_none(), ..SUPPORTS },
            input: InputForm::Tokens,
            media: if without_images.is_none() { MediaForm::Encoded } else { MediaForm::None },
            hand_off: HandOff::None,
            locality,
            private_network: None,
            kv,
        }
    }
}

fn refusal(error: AskError) -> Unusable {
    match error {
        AskError::Refused { status, .. } if matches!(status.as_u16(), 401 | 403) => {
            Unusable::WantsKey
        }
        error => error.into(),
    }
}

/// Checks that a server generates: then it refuses an empty request, and does not answer that the
/// path is unknown.
async fn can_generate(server: &Server) -> Result<(), Unusable> {
    let answer =
        server.post(GENERATE, Bytes::from_static(b"{}"), reqwest::header::HeaderMap::new()).await;
    match answer?.status().as_u16() {
        400 | 422 => Ok(()),
        401 | 403 => Err(Unusable::WantsKey),
        404 | 405 => Err(Unusable::NotSglang),
        status => Err(Unusable::EmptyRequest { status, path: GENERATE }),
    }
}

/// Returns the source of a server's KV events if they are complete and have the expected meaning.
fn kv_source(info: &ServerInfo, locality: &Locality) -> KvSource {
    let Some(events) = info.kv_events.as_ref().filter(|events| events.publisher == "zmq") else {
        return unknown("it publishes no KV events (--kv-events-config)");
    };
    if let Some(why) = unusable(info, events) {
        return KvSource::Unknown { why };
    }
    let at = |port: u16| format!("tcp://{}:{port}", events.endpoint_host);
    let replay = events.replay_endpoint_port_base.map(at);
    let stream = KvEventStream::at(
        &at(events.endpoint_port_base),
        replay.as_deref(),
        &events.topic,
        locality,
    );
    stream.map_or_else(
        || unknown("where its KV events are published can't be reached from here"),
        KvSource::Events,
    )
}

/// Returns how this version hashes blocks, if that is known.
fn hashing(version: &str) -> Option<KeyScheme> {
    KNOWN.into_iter().find_map(|(known, keys)| (known == version).then_some(keys))
}

/// Why its events would be misunderstood.
fn unusable(info: &ServerInfo, events: &KvEvents) -> Option<String> {
    let config = info.kv_events_config.as_deref().map(serde_json::from_str::<KvEventsConfig>);
    let has_format =
        config.is_some_and(|config| config.is_ok_and(|config| config.format.is_some()));
    Some(match info {
        ServerInfo { version, .. } if hashing(version).is_none() => {
            let known = KNOWN.map(|(version, _)| version).join(", ");
            format!("how SGLang {version} hashes blocks is not known, only how {known} do")
        }
        _ if events.dp_size != 1 => {
            "it has several engines (--dp-size) and chooses among them by itself".to_owned()
        }
        ServerInfo { page_size: 0 | 1, .. } => {
            "its blocks are single tokens (--page-size)".to_owned()
        }
        ServerInfo { page_size, .. } if *page_size != events.block_size => {
            "its events are of other blocks than its cache".to_owned()
        }
        ServerInfo { disable_radix_cache: true, .. } => {
            "it keeps nothing between requests (--disable-radix-cache)".to_owned()
        }
        ServerInfo { speculative_algorithm: Some(name), .. } => {
            format!("with a drafter ({name}) it hashes blocks in another way")
        }
        ServerInfo { uses_mamba_radix_cache: true, .. } => {
            "its model keeps states beside its blocks".to_owned()
        }
        _ if has_format => {
            "its events are of another format (format of --kv-events-config)".to_owned()
        }
        _ => return None,
    })
}
