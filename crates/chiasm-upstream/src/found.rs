//! A server's description of itself, as capabilities.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use chiasm_backend::{
    Capabilities, HandOff, InputForm, KeyScheme, KvEventStream, KvSource, LargestItem, Locality,
    MediaForm, PlaceholderForm, PlanClass, Supports, VllmItems,
};
use chiasm_types::{BlockSize, Role};
use serde::Deserialize;

use crate::encoder_cache::encoder_cache;
use crate::gauges;
use crate::models::{self, Models, Names};
use crate::request::SUPPORTS;
use crate::server::{AskError, Server};
use crate::unusable::Unusable;

/// The path at which a server generates from tokens.
pub(crate) const GENERATE: &str = "inference/v1/generate";
pub(crate) const METRICS: &str = "metrics";
const VERSION: &str = "version";
pub(crate) const MODELS: &str = "v1/models";
const EVENT_SOURCES: &str = "kv_event_sources";

/// The facts about a server that are needed before it can be used.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) version: String,
    pub(crate) model: models::Found,
    pub(crate) max_model_len: usize,
    pub(crate) block_size: BlockSize,
    pub(crate) total_blocks: u64,
    pub(crate) kv: KvSource,
}

#[derive(Deserialize)]
struct Version {
    version: String,
}

/// The KV events of the engine of one rank.
#[derive(Deserialize)]
struct EventSource {
    #[serde(default)]
    enable_kv_cache_events: Option<bool>,
    endpoint: String,
    replay_endpoint: Option<String>,
    #[serde(default)]
    topic: String,
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
        let Version { version } = read(&server.get(VERSION).await?, VERSION)?;
        let models: Models = read(&server.get(MODELS).await?, MODELS)?;
        let (model, max_model_len) = models.find_with_context(names)?;
        let metrics = server.get(METRICS).await?;
        let metrics = String::from_utf8_lossy(&metrics);
        let setting = |label| gauges::label(&metrics, "vllm:cache_config_info", label);
        let block_size =
            setting("block_size").and_then(|size| BlockSize::new(size.try_into().ok()?));
        let block_size = block_size.ok_or(Unusable::NoBlockSize)?;
        let kv = match server.get(EVENT_SOURCES).await {
            Ok(body) => kv_source(&read(&body, EVENT_SOURCES)?, locality),
            // It has no such path before 0.31.
            Err(AskError::Refused { .. }) => {
                unknown("it does not tell where its KV events are (/kv_event_sources)")
            }
            Err(error) => return Err(error.into()),
        };
        Ok(Self {
            version,
            model,
            max_model_len,
            block_size,
            total_blocks: setting("num_gpu_blocks").unwrap_or(0),
            kv,
        })
    }

    /// Returns the capabilities of a worker that is this server, if it is given tokens. `processor`
    /// is that of the model that is served here.
    pub(crate) fn given_tokens(
        self,
        processor: Arc<[u8]>,
        largest_item: &LargestItem,
        locality: Locality,
    ) -> Capabilities {
        let given = Given {
            mode: "token",
            placeholders: PlaceholderForm::Marker,
            supports: SUPPORTS,
            input: InputForm::Tokens,
        };
        self.capabilities(given, processor, largest_item, locality)
    }

    /// Returns the same if it is given requests as they come: it expands a prompt as it likes,
    /// which shows afterwards.
    pub(crate) fn given_messages(
        self,
        processor: Arc<[u8]>,
        largest_item: &LargestItem,
        locality: Locality,
    ) -> Capabilities {
        let given = Given {
            mode: "chat",
            placeholders: PlaceholderForm::Expanded,
            supports: Supports::EVERYTHING,
            input: InputForm::Messages,
        };
        self.capabilities(given, processor, largest_item, locality)
    }

    fn capabilities(
        self,
        given: Given,
        processor: Arc<[u8]>,
        largest_item: &LargestItem,
        locality: Locality,
    ) -> Capabilities {
        let Given { mode, placeholders, supports, input } = given;
        Capabilities {
            engine: format!("vllm serve {}, {mode} mode", self.version),
            class: PlanClass {
                processor,
                // It is given files, and says what becomes of them only afterwards.
                vllm_items: VllmItems::None,
                placeholders,
                keys: KeyScheme::Chiasm,
                block_size: self.block_size,
            },
            role: Role::Aggregated,
            embedding_store_bytes: 0,
            max_model_len: self.max_model_len,
            // It does not tell, and refuses by itself what is too large for a step.
            max_batched_tokens: self.max_model_len,
            max_running: 0,
            total_blocks: self.total_blocks,
            encoder_cache_tokens: encoder_cache(largest_item, self.max_model_len),
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

/// The form in which a server is given requests, and what follows from it.
struct Given {
    mode: &'static str,
    placeholders: PlaceholderForm,
    supports: Supports,
    input: InputForm,
}

/// Checks that a server takes tokens: then it refuses an empty request, and does not answer that
/// the path is unknown.
///
/// # Errors
/// It does not.
pub(crate) async fn can_generate(server: &Server) -> Result<(), Unusable> {
    let answer =
        server.post(GENERATE, Bytes::from_static(b"{}"), reqwest::header::HeaderMap::new()).await;
    let status = answer?.status().as_u16();
    match status {
        400 | 422 => Ok(()),
        401 | 403 => Err(Unusable::WantsKey),
        404 | 405 => Err(Unusable::NoTokens),
        status => Err(Unusable::EmptyRequest { status, path: GENERATE }),
    }
}

pub(crate) fn read<'a, T: Deserialize<'a>>(
    body: &'a [u8],
    path: &'static str,
) -> Result<T, Unusable> {
    serde_json::from_slice(body).map_err(|source| Unusable::Answer { path, source })
}

pub(crate) fn unknown(why: &str) -> KvSource {
    KvSource::Unknown { why: why.to_owned() }
}

/// Returns the source of a server's KV events. A server with several engines chooses among them
/// itself, so the blocks of one engine say little about the next request.
fn kv_source(sources: &BTreeMap<String, EventSource>, locality: &Locality) -> KvSource {
    let source = match sources.values().collect::<Vec<_>>()[..] {
        [] => return unknown("it publishes no KV events (--kv-events-config)"),
        [source] => source,
        _ => {
            return unknown(
                "it has several engines (--data-parallel-size) and chooses among them by itself",
            );
        }
    };
    if source.enable_kv_cache_events == Some(false) {
        return unknown("it publishes no KV events (--kv-events-config)");
    }
    let stream = KvEventStream::at(
        &source.endpoint,
        source.replay_endpoint.as_deref(),
        &source.topic,
        locality,
    );
    stream.map_or_else(
        || unknown("where its KV events are published can't be reached from here"),
        KvSource::Events,
    )
}
