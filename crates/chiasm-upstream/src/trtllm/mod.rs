//! `trtllm-serve`, which receives requests unchanged and is polled for its KV events: its
//! description, and following its events.
//!
//! It does not run without a GPU, so all of this follows its sources (`serve/openai_server.py`,
//! `serve/kv_event_fanout.py`, `_utils.py`, `batch_manager/blockKey.cpp`,
//! `kv_cache_manager_v2/eventData.cpp` of TensorRT-LLM 1.3) and is unverified on hardware.
//!
//! | module | contents |
//! |---|---|
//! | `events` | translation of its KV events into vLLM's |
//! | `block` | a block as the server reports it |
//! | `recent_prompts` | the recent prompts with images |
//! | `chains` | the blocks of the server, under our own identities of the images in them |
//! | `names` | the server's names of images |
//! | `error` | errors of following the events |

mod block;
mod chains;
mod error;
mod events;
#[cfg(test)]
mod images_tests;
mod names;
mod recent_prompts;

use std::sync::Arc;
use std::time::{Duration, Instant};

use chiasm_backend::{
    Capabilities, KeyScheme, KvSink, KvSinkError, KvSource, Locality, PlaceholderForm, PlanClass,
};
use chiasm_types::BlockSize;
use reqwest::StatusCode;
use serde::Deserialize;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use self::error::FollowError;
use self::events::{TranslatedEvents, Translation};
pub(crate) use self::recent_prompts::RecentPrompts;
use crate::models::Names;
use crate::plain::PlainInfo;
use crate::server::{RequestError, Server};
use crate::shared::Shared;
use crate::unusable::Unusable;
use crate::vllm_info::parse_json;

const EVENTS: &str = "kv_cache_events";
const VERSION: &str = "version";
/// The pause between two requests for events. By default a server keeps 1,024 events until the next
/// request, so a busy one has to be polled often.
const POLL_PAUSE: Duration = Duration::from_millis(50);

/// The description of a `trtllm-serve`, fetched before it is used.
pub(crate) struct TrtllmInfo {
    version: String,
    pub(crate) plain: PlainInfo,
}

#[derive(Deserialize)]
struct Version {
    version: String,
}

impl TrtllmInfo {
    /// Queries a server.
    ///
    /// # Errors
    /// Returns [`Unusable`] if the server can't be used.
    pub(crate) async fn fetch(server: &Server, names: &Names) -> Result<Self, Unusable> {
        let plain = PlainInfo::fetch(server, names).await?;
        let Version { version } = parse_json(&server.get(VERSION).await?, VERSION)?;
        Ok(Self { version, plain })
    }

    pub(crate) fn capabilities(
        &self,
        processor: Arc<[u8]>,
        block_size: BlockSize,
        locality: Locality,
    ) -> Capabilities {
        let plain = self.plain.capabilities(locality);
        let class = PlanClass {
            processor,
            placeholders: PlaceholderForm::Learned,
            keys: KeyScheme::Chiasm,
            block_size,
            ..plain.class
        };
        let engine = format!("TensorRT-LLM {}, chat mode, unverified on hardware", self.version);
        Capabilities { engine, class, kv: KvSource::Backend, ..plain }
    }
}

/// Passes a server's KV events to `sink` until following them fails.
pub(crate) async fn follow(
    shared: Arc<Shared>,
    recent: Arc<RecentPrompts>,
    mut sink: Box<dyn KvSink>,
) {
    let mut translation = Translation::new(recent);
    let mut has_warned = false;
    loop {
        let answer = match shared.server.post_empty(EVENTS).await {
            Ok(body) => Ok(Some(body)),
            Err(RequestError::Refused {
                status: StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED,
                ..
            }) => Err(FollowError::NoEvents),
            // Events of a lost answer show as a gap. Another task watches whether the server is
            // alive.
            Err(_) => Ok(None),
        };
        // Translating may take long.
        let task = spawn_blocking(move || {
            let translated = answer.and_then(|answer| {
                answer.map_or_else(
                    || Ok(TranslatedEvents::default()),
                    |body| translation.translate(&body, Instant::now()),
                )
            });
            let result = translated.and_then(|translated| Ok(apply(translated, &mut *sink)?));
            if result.is_err() {
                let void = TranslatedEvents { is_void: true, ..TranslatedEvents::default() };
                let _ = apply(void, &mut *sink);
            }
            sink.set_caught_up(true);
            (translation, sink, result)
        });
        let Ok((translation_back, sink_back, result)) = task.await else { return };
        translation = translation_back;
        sink = sink_back;
        if translation.has_unlearned_names() && !std::mem::replace(&mut has_warned, true) {
            tracing::warn!(
                server = shared.name,
                "prompts with images do not match the expected ones; \
                 predictions end at the first image"
            );
        }
        if let Err(error) = result {
            return shared.distrust(error.to_string());
        }
        sleep(POLL_PAUSE).await;
    }
}

fn apply(translated: TranslatedEvents, sink: &mut dyn KvSink) -> Result<(), KvSinkError> {
    let TranslatedEvents { is_void, batch, history_known } = translated;
    if is_void {
        sink.reset();
    }
    match batch {
        Some(batch) => sink.batch(&batch.encode(), history_known),
        None => Ok(()),
    }
}
