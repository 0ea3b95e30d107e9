//! The description of an SGLang server, converted to capabilities.

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
use crate::encoder_cache::encoder_cache_tokens;
use crate::models::{Models, Names, ServedModel};
use crate::server::{RequestError, Server};
use crate::unusable::Unusable;
use crate::vllm_info::{METRICS, MODELS, parse_json, unknown_kv};

const SERVER_INFO: &str = "server_info";
const MODEL_INFO: &str = "model_info";

/// The key schemes of the SGLang versions that the tests were run with. Other versions may hash
/// images in another way.
const KNOWN_VERSIONS: [(&str, KeyScheme); 2] =
    [("0.5.23", KeyScheme::Sglang), ("0.5.22", KeyScheme::SglangNarrow)];

/// The model types whose images SGLang, up to 0.5.23, accepts only beside text. Beside tokens it
/// refuses the images, or fails.
const TEXT_ONLY_IMAGE_MODELS: [&str; 3] = ["internvl", "internvl_chat", "llava_next"];

/// The minimum block size of an approximate cache, in tokens. A server may have one-token blocks.
const MIN_APPROXIMATE_BLOCK: u32 = 16;

/// The description of a server, fetched before it is used.
#[derive(Debug)]
pub(crate) struct SglangInfo {
    pub(crate) model: ServedModel,
    info: ServerInfo,
    max_model_len: usize,
    block_size: BlockSize,
    /// The reason that the server does not accept images; `None` if it does.
    without_images: Option<String>,
    /// `true` if the server accepts images, but not beside tokens.
    pub(crate) images_need_text: bool,
    kv: KvSource,
}

/// The rules for requests to one server.
#[derive(Debug)]
pub(crate) struct RequestRules {
    /// The reason that the server gets no images. A server whose model has no images silently
    /// ignores the images of a request.
    pub(super) without_images: Option<String>,
    /// `None` if the server has no priorities, otherwise `true` if lower values come first.
    pub(super) lower_is_earlier: Option<bool>,
    /// The number of prompts with images that were sent to the server.
    prompts: AtomicU64,
}

impl RequestRules {
    /// Returns `true` if the next prompt with images is to be compared token by token.
    ///
    /// The server then sends the prompt with each event. So only the first prompts and some later
    /// ones are compared token by token, all others by their number of tokens.
    pub(super) fn compares_next(&self) -> bool {
        /// The number of first prompts that are compared, and the interval between later ones.
        const EACH: u64 = 16;
        let before = self.prompts.fetch_add(1, Relaxed);
        before < EACH || before.is_multiple_of(EACH)
    }
}

/// The used part of the server's settings. The other settings include keys, which must not be
/// shown.
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

/// The endpoint of the server's KV events.
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
    /// Returns the reason that the server does not accept images; `None` if it does.
    fn without_images(&self) -> Option<String> {
        let Self { model_type, .. } = self;
        if self.has_image_understanding == Some(false) {
            return Some(
                "does not accept images: its model is text-only, or --enable-multimodal is missing"
                    .to_owned(),
            );
        }
        self.images_need_text()
            .then(|| format!("does not accept images with tokens for models of type {model_type}"))
    }

    /// Returns `true` if the server accepts images, but only beside text.
    fn images_need_text(&self) -> bool {
        self.has_image_understanding != Some(false)
            && TEXT_ONLY_IMAGE_MODELS.contains(&self.model_type.as_str())
    }
}

impl SglangInfo {
    /// Queries a server.
    ///
    /// # Errors
    /// Returns [`Unusable`] if the server can't be used.
    pub(crate) async fn fetch(
        server: &Server,
        names: &Names,
        locality: &Locality,
    ) -> Result<Self, Unusable> {
        let info: ServerInfo =
            parse_json(&server.get(SERVER_INFO).await.map_err(refusal)?, SERVER_INFO)?;
        let model_info: ModelInfo =
            parse_json(&server.get(MODEL_INFO).await.map_err(refusal)?, MODEL_INFO)?;
        if model_info.is_generation == Some(false) {
            return Err(Unusable::GeneratesNothing);
        }
        if info.disaggregation_mode.as_deref().is_some_and(|mode| mode != "null") {
            return Err(Unusable::Disaggregated);
        }
        let models: Models = parse_json(&server.get(MODELS).await.map_err(refusal)?, MODELS)?;
        let (model, max_model_len) = models.find_with_context(names)?;
        check_generates(server).await?;
        server.get(METRICS).await.map_err(|error| match error {
            RequestError::Refused { .. } => Unusable::NoMetrics,
            error => error.into(),
        })?;
        let kv = kv_source(&info, locality);
        let block_size = match kv {
            KvSource::Unknown { .. } => BlockSize::new(info.page_size.max(MIN_APPROXIMATE_BLOCK)),
            _ => BlockSize::new(info.page_size),
        };
        let block_size = block_size.ok_or(Unusable::NoPageSize)?;
        Ok(Self {
            model,
            info,
            max_model_len,
            block_size,
            without_images: model_info.without_images(),
            images_need_text: model_info.images_need_text(),
            kv,
        })
    }

    /// Returns the rules for requests to the server.
    pub(crate) fn request_rules(&self) -> RequestRules {
        let ServerInfo { enable_priority_scheduling, schedule_low_priority_values_first, .. } =
            self.info;
        RequestRules {
            without_images: self.without_images.clone(),
            lower_is_earlier: enable_priority_scheduling
                .then_some(schedule_low_priority_values_first),
            prompts: AtomicU64::new(0),
        }
    }

    /// Returns the capabilities of the server. `processor` identifies the processor of the model
    /// served here.
    pub(crate) fn into_capabilities(
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
                // The server receives files, and reports what became of them only afterwards.
                vllm_items: VllmItems::None,
                placeholders: PlaceholderForm::Marker,
                keys: key_scheme(&info.version).filter(|_| is_known).unwrap_or(KeyScheme::Chiasm),
                block_size,
            },
            role: Role::Aggregated,
            embedding_store_bytes: 0,
            max_model_len,
            // The server computes long prompts in chunks, whatever their contents.
            max_batched_tokens: max_model_len,
            max_running: running.sum(),
            total_blocks: info.max_total_num_tokens / block_size.get() as u64,
            // SGLang limits its encoder cache in bytes, which hold another number of embeddings
            // for each model. The assumed size is that of vLLM.
            encoder_cache_tokens: encoder_cache_tokens(largest_item, max_model_len),
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

fn refusal(error: RequestError) -> Unusable {
    match error {
        RequestError::Refused { status, .. } if matches!(status.as_u16(), 401 | 403) => {
            Unusable::KeyRequired
        }
        error => error.into(),
    }
}

/// Checks that a server generates: it then refuses an empty request, and does not answer that the
/// path is unknown.
async fn check_generates(server: &Server) -> Result<(), Unusable> {
    let answer =
        server.post(GENERATE, Bytes::from_static(b"{}"), reqwest::header::HeaderMap::new()).await;
    match answer?.status().as_u16() {
        400 | 422 => Ok(()),
        401 | 403 => Err(Unusable::KeyRequired),
        404 | 405 => Err(Unusable::NotSglang),
        status => Err(Unusable::EmptyRequest { status, path: GENERATE }),
    }
}

/// Returns the source of a server's KV events, if they are complete and have the expected meaning.
fn kv_source(info: &ServerInfo, locality: &Locality) -> KvSource {
    let Some(events) = info.kv_events.as_ref().filter(|events| events.publisher == "zmq") else {
        return unknown_kv("it publishes no KV events (--kv-events-config)");
    };
    if let Some(why) = unusable_events(info, events) {
        return KvSource::Unknown { why };
    }
    let at = |port: u16| format!("tcp://{}:{port}", events.endpoint_host);
    let replay = events.replay_endpoint_port_base.map(at);
    let stream = KvEventStream::for_locality(
        &at(events.endpoint_port_base),
        replay.as_deref(),
        &events.topic,
        locality,
    );
    stream.map_or_else(
        || unknown_kv("the endpoint of its KV events can't be reached from here"),
        KvSource::Events,
    )
}

/// Returns the scheme by which this version hashes blocks, if it is known.
fn key_scheme(version: &str) -> Option<KeyScheme> {
    KNOWN_VERSIONS.into_iter().find_map(|(known, keys)| (known == version).then_some(keys))
}

/// Returns the reason that the server's events would be misunderstood, if there is one.
fn unusable_events(info: &ServerInfo, events: &KvEvents) -> Option<String> {
    let config = info.kv_events_config.as_deref().map(serde_json::from_str::<KvEventsConfig>);
    let has_format =
        config.is_some_and(|config| config.is_ok_and(|config| config.format.is_some()));
    Some(match info {
        ServerInfo { version, .. } if key_scheme(version).is_none() => {
            let known = KNOWN_VERSIONS.map(|(version, _)| version).join(", ");
            format!("the block hashes of SGLang {version} are unknown; known versions: {known}")
        }
        _ if events.dp_size != 1 => {
            "it has several engines (--dp-size) and selects one by itself".to_owned()
        }
        ServerInfo { page_size: 0 | 1, .. } => {
            "its blocks have one token each (--page-size)".to_owned()
        }
        ServerInfo { page_size, .. } if *page_size != events.block_size => {
            "the block size of its events differs from that of its cache".to_owned()
        }
        ServerInfo { disable_radix_cache: true, .. } => {
            "it has no prefix cache (--disable-radix-cache)".to_owned()
        }
        ServerInfo { speculative_algorithm: Some(name), .. } => {
            format!("its block hashes are unknown with speculative decoding ({name})")
        }
        ServerInfo { uses_mamba_radix_cache: true, .. } => {
            "its model caches states in addition to blocks".to_owned()
        }
        _ if has_format => {
            "its events have an unknown format (format of --kv-events-config)".to_owned()
        }
        _ => return None,
    })
}
