//! `trtllm-serve`, which is given requests as they come and asked for its KV events: what it says of itself, and following them.
//!
//! It can't run without a GPU, so all of this is by its sources (`serve/openai_server.py`, `serve/kv_event_fanout.py`, `_utils.py` of
//! TensorRT-LLM 1.3) and unverified on hardware.

mod events;

use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{Capabilities, KeyScheme, KvSink, KvSource, Locality, PlaceholderForm, PlanClass};
use chiasm_types::BlockSize;
use reqwest::StatusCode;
use serde::Deserialize;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use self::events::{Told, Translation};
use crate::backend::Shared;
use crate::plain::FoundPlain;
use crate::server::{AskError, Server};

const EVENTS: &str = "kv_cache_events";
const VERSION: &str = "version";
/// Between two questions for events. A server keeps 1,024 of them by default until it is asked, so a busy one must not be left waiting.
const PAUSE: Duration = Duration::from_millis(50);
/// Tokens of a block, unless somebody has set another number (`kv_cache_config.tokens_per_block`); it does not tell.
pub(crate) const BLOCK_SIZE: BlockSize = match BlockSize::new(32) {
    Some(size) => size,
    None => panic!("32 is not 0"),
};

/// What a server says of itself.
pub(crate) struct FoundTrtllm {
    version: String,
    pub(crate) plain: FoundPlain,
}

#[derive(Deserialize)]
struct Version {
    version: String,
}

impl FoundTrtllm {
    /// Asks a server.
    ///
    /// # Errors
    /// Words that say why it can't be used.
    pub(crate) async fn ask(server: &Server) -> Result<Self, String> {
        let plain = FoundPlain::ask(server).await?;
        let version = server.get(VERSION).await.map_err(|error| error.to_string())?;
        let Version { version } = serde_json::from_slice(&version)
            .map_err(|error| format!("its answer to /{VERSION} can't be read: {error}"))?;
        Ok(Self { version, plain })
    }

    pub(crate) fn capabilities(&self, processor: Arc<[u8]>, block_size: BlockSize, locality: Locality) -> Capabilities {
        let plain = self.plain.capabilities(locality);
        let class = PlanClass {
            processor,
            placeholders: PlaceholderForm::Untold,
            keys: KeyScheme::Chiasm,
            block_size,
            ..plain.class
        };
        let engine = format!("TensorRT-LLM {}, chat mode, unverified on hardware", self.version);
        Capabilities { engine, class, kv: KvSource::Backend, ..plain }
    }
}

/// Tells what a server says of its KV cache, until it says that it does not.
pub(crate) async fn follow(shared: Arc<Shared>, block_size: BlockSize, mut sink: Box<dyn KvSink>) {
    let mut translation = Translation::new(block_size);
    loop {
        let told = match shared.server.post_empty(EVENTS).await {
            Ok(body) => translation.take(&body),
            Err(AskError::Refused { status: StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED, .. }) => {
                Err("it tells no KV events (kv_cache_config.event_buffer_max_size)".to_owned())
            }
            // What was lost with an answer is seen as a gap. Whether the server lives is asked elsewhere.
            Err(_) => Ok(Told::default()),
        };
        // Taking it in may take long.
        let taken = spawn_blocking(move || {
            let went = told.and_then(|told| apply(told, &mut *sink));
            if went.is_err() {
                let _ = apply(Told { is_void: true, ..Told::default() }, &mut *sink);
            }
            sink.set_caught_up(true);
            (sink, went)
        });
        let Ok((back, went)) = taken.await else { return };
        sink = back;
        if let Err(why) = went {
            return shared.distrust(why);
        }
        sleep(PAUSE).await;
    }
}

fn apply(told: Told, sink: &mut dyn KvSink) -> Result<(), String> {
    let Told { is_void, batch, history_known } = told;
    if is_void {
        sink.reset();
    }
    match batch {
        Some(batch) => sink.batch(&batch.encode(), history_known),
        None => Ok(()),
    }
}
