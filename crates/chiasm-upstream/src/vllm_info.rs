//! The description of a `vllm serve`, converted to capabilities.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use chiasm_backend::{
    Capabilities, HandOff, InputForm, KeyScheme, KvEventStream, KvSource, LargestItem, Locality,
    MediaForm, PlaceholderForm, PlanClass, Supports, VllmItems,
};
use chiasm_types::{BlockSize, Role};
use serde::Deserialize;

use crate::address::Rank;
use crate::encoder_cache::encoder_cache_tokens;
use crate::gauges;
use crate::models::{Models, Names, ServedModel};
use crate::request::SUPPORTS;
use crate::server::{RequestError, Server};
use crate::unusable::Unusable;

/// The path for generating from tokens.
pub(crate) const GENERATE: &str = "inference/v1/generate";
pub(crate) const METRICS: &str = "metrics";
/// The metric whose labels are the settings of the KV cache. Unlike the gauges of load, each engine
/// has it from its start.
pub(crate) const CACHE_CONFIG: &str = "vllm:cache_config_info";
const VERSION: &str = "version";
pub(crate) const MODELS: &str = "v1/models";
const EVENT_SOURCES: &str = "kv_event_sources";

/// The description of a `vllm serve`, fetched before it is used.
#[derive(Debug)]
pub(crate) struct VllmInfo {
    pub(crate) version: String,
    pub(crate) model: ServedModel,
    pub(crate) max_model_len: usize,
    pub(crate) block_size: BlockSize,
    /// The blocks of the engine, or of all engines together.
    pub(crate) total_blocks: u64,
    pub(crate) kv: KvSource,
    /// The engine that gets the requests; `None` if the server chooses.
    pub(crate) engine: Option<ServerEngine>,
}

/// One engine of a server with several.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerEngine {
    rank: Rank,
    /// The engine's number among those of all servers of the group, which begins at
    /// `--data-parallel-start-rank`. Metrics and KV events have it.
    pub(crate) number: u64,
}

impl ServerEngine {
    /// Finds the engine of a rank in a server's metrics.
    ///
    /// # Errors
    /// Returns [`Unusable::OtherRanks`] if the server has another number of engines.
    fn find(metrics: &str, rank: Rank) -> Result<Self, Unusable> {
        // A request names an engine by its position in the order of numbers.
        let engines = gauges::engines(metrics, CACHE_CONFIG);
        match engines.iter().nth(rank.index.into()) {
            Some(&number) if engines.len() == usize::from(rank.count) => Ok(Self { rank, number }),
            _ => Err(Unusable::OtherRanks { found: engines.len(), expected: rank.count }),
        }
    }
}

#[derive(Deserialize)]
struct Version {
    version: String,
}

/// The KV events of one rank's engine.
#[derive(Deserialize)]
struct EventSource {
    #[serde(default)]
    enable_kv_cache_events: Option<bool>,
    endpoint: String,
    replay_endpoint: Option<String>,
    #[serde(default)]
    topic: String,
}

impl VllmInfo {
    /// Queries a server.
    ///
    /// # Errors
    /// Returns [`Unusable`] if the server can't be used.
    pub(crate) async fn fetch(
        server: &Server,
        names: &Names,
        locality: &Locality,
        rank: Option<Rank>,
    ) -> Result<Self, Unusable> {
        let Version { version } = parse_json(&server.get(VERSION).await?, VERSION)?;
        let models: Models = parse_json(&server.get(MODELS).await?, MODELS)?;
        let (model, max_model_len) = models.find_with_context(names)?;
        let metrics = server.get(METRICS).await?;
        let metrics = String::from_utf8_lossy(&metrics);
        let setting = |label| gauges::label(&metrics, CACHE_CONFIG, label);
        let block_size =
            setting("block_size").and_then(|size| BlockSize::new(size.try_into().ok()?));
        let block_size = block_size.ok_or(Unusable::NoBlockSize)?;
        let engine = rank.map(|rank| ServerEngine::find(&metrics, rank)).transpose()?;
        let kv = match server.get(EVENT_SOURCES).await {
            Ok(body) => kv_source(&parse_json(&body, EVENT_SOURCES)?, engine.as_ref(), locality),
            // vLLM has this path since 0.31.
            Err(RequestError::Refused { .. }) => {
                unknown_kv("it does not report the endpoint of its KV events (/kv_event_sources)")
            }
            Err(error) => return Err(error.into()),
        };
        Ok(Self {
            version,
            model,
            max_model_len,
            block_size,
            // The server reports the sum of its engines.
            total_blocks: setting("num_gpu_blocks").unwrap_or(0)
                / rank.map_or(1, |rank| rank.count.into()),
            kv,
            engine,
        })
    }

    /// Returns the capabilities of the server in token mode. `processor` identifies the processor
    /// of the model served here.
    pub(crate) fn into_token_mode(
        self,
        processor: Arc<[u8]>,
        largest_item: &LargestItem,
        locality: Locality,
    ) -> Capabilities {
        let mode = ModeCapabilities {
            name: "token",
            placeholders: PlaceholderForm::Marker,
            supports: SUPPORTS,
            input: InputForm::Tokens,
        };
        self.into_capabilities(mode, processor, largest_item, locality)
    }

    /// Returns the capabilities of the server in chat mode, where it expands prompts itself. Its
    /// expansion is only known afterwards.
    pub(crate) fn into_chat_mode(
        self,
        processor: Arc<[u8]>,
        largest_item: &LargestItem,
        locality: Locality,
    ) -> Capabilities {
        let mode = ModeCapabilities {
            name: "chat",
            placeholders: PlaceholderForm::Expanded,
            supports: Supports::EVERYTHING,
            input: InputForm::Messages,
        };
        self.into_capabilities(mode, processor, largest_item, locality)
    }

    fn into_capabilities(
        self,
        mode: ModeCapabilities,
        processor: Arc<[u8]>,
        largest_item: &LargestItem,
        locality: Locality,
    ) -> Capabilities {
        let ModeCapabilities { name, placeholders, supports, input } = mode;
        Capabilities {
            engine: match &self.engine {
                Some(engine) => format!("vllm serve {}, {}", self.version, engine.rank),
                None => format!("vllm serve {}, {name} mode", self.version),
            },
            class: PlanClass {
                processor,
                // The server receives files, and reports what became of them only afterwards.
                vllm_items: VllmItems::None,
                placeholders,
                keys: KeyScheme::Chiasm,
                block_size: self.block_size,
            },
            role: Role::Aggregated,
            embedding_store_bytes: 0,
            max_model_len: self.max_model_len,
            // The server does not report this limit, and refuses items that are too large for a
            // step.
            max_batched_tokens: self.max_model_len,
            max_running: 0,
            total_blocks: self.total_blocks,
            encoder_cache_tokens: encoder_cache_tokens(largest_item, self.max_model_len),
            receiver_cache_bytes: 0,
            max_loras: 0,
            adapters: BTreeMap::new(),
            supports,
            input,
            media: MediaForm::Encoded,
            hand_off: HandOff::None,
            locality,
            private_network: None,
            kv: self.kv,
        }
    }
}

/// The capabilities that depend on the form of requests.
struct ModeCapabilities {
    name: &'static str,
    placeholders: PlaceholderForm,
    supports: Supports,
    input: InputForm,
}

/// vLLM's flag that enables the path for tokens. A refusal without it names the flag.
const SCALE_OUT: &str = "--enable-scale-out";

/// Checks that a server accepts tokens: it then refuses an empty request, and does not answer that
/// the path is unknown.
///
/// # Errors
/// Returns [`Unusable`] if the server does not accept tokens.
pub(crate) async fn check_accepts_tokens(server: &Server) -> Result<(), Unusable> {
    let answer =
        server.post(GENERATE, Bytes::from_static(b"{}"), reqwest::header::HeaderMap::new()).await?;
    let status = answer.status().as_u16();
    match status {
        400 | 422 => Ok(()),
        // vLLM 0.33 without --enable-scale-out. Earlier versions lack the path.
        403 if server.refusal(answer).await.message.contains(SCALE_OUT) => Err(Unusable::NoTokens),
        401 | 403 => Err(Unusable::KeyRequired),
        404 | 405 => Err(Unusable::NoTokens),
        status => Err(Unusable::EmptyRequest { status, path: GENERATE }),
    }
}

/// Parses the JSON body of an answer to `path`.
pub(crate) fn parse_json<'a, T: Deserialize<'a>>(
    body: &'a [u8],
    path: &'static str,
) -> Result<T, Unusable> {
    serde_json::from_slice(body).map_err(|source| Unusable::Answer { path, source })
}

/// Returns the source of a KV cache whose contents are unknown.
pub(crate) fn unknown_kv(why: &str) -> KvSource {
    KvSource::Unknown { why: why.to_owned() }
}

/// Returns the source of KV events: of one engine, or of the server's only one. If the server picks
/// an engine per request, the blocks of one are a poor prediction for the next request.
fn kv_source(
    sources: &BTreeMap<String, EventSource>,
    engine: Option<&ServerEngine>,
    locality: &Locality,
) -> KvSource {
    if engine.is_none() && sources.len() > 1 {
        let count = sources.len();
        return unknown_kv(&format!(
            "it has {count} engines (--data-parallel-size) and selects one by itself; in token \
             mode, ranks={count} after a vllm+ address lets Chiasm select"
        ));
    }
    let source = match engine {
        Some(engine) => sources.get(&engine.number.to_string()),
        None => sources.values().next(),
    };
    let source = source.filter(|source| source.enable_kv_cache_events != Some(false));
    let Some(source) = source else {
        return unknown_kv("it publishes no KV events (--kv-events-config)");
    };
    let stream = KvEventStream::for_locality(
        &source.endpoint,
        source.replay_endpoint.as_deref(),
        &source.topic,
        locality,
    );
    stream.map_or_else(
        || unknown_kv("the endpoint of its KV events can't be reached from here"),
        KvSource::Events,
    )
}
