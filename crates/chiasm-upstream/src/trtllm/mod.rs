//! `trtllm-serve`, which is given requests as they come and asked for its KV events: what it says
//! of itself, and following them.
//!
//! It can't run without a GPU, so all of this is by its sources (`serve/openai_server.py`,
//! `serve/kv_event_fanout.py`, `_utils.py`, `batch_manager/blockKey.cpp`,
//! `kv_cache_manager_v2/eventData.cpp` of TensorRT-LLM 1.3) and unverified on hardware.
//!
//! | module | is |
//! |---|---|
//! | `events` | its KV events, translated into vLLM's |
//! | `block` | a block as it tells of it |
//! | `asked` | the prompts with images that it was given lately |
//! | `chains` | which blocks it holds, by our own identities of the images in them |
//! | `names` | what it calls images |
//! | `untold` | why nothing can be known of its cache |

mod asked;
mod block;
mod chains;
mod events;
#[cfg(test)]
mod images_tests;
mod names;
mod untold;

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

pub(crate) use self::asked::Asked;
use self::events::{Told, Translation};
use self::untold::Untold;
use crate::found::read;
use crate::models::Names;
use crate::plain::FoundPlain;
use crate::server::{AskError, Server};
use crate::shared::Shared;
use crate::unusable::Unusable;

const EVENTS: &str = "kv_cache_events";
const VERSION: &str = "version";
/// Between two questions for events. A server keeps 1,024 of them by default until it is asked, so
/// a busy one must not be left waiting.
const PAUSE: Duration = Duration::from_millis(50);

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
    /// It can't be used.
    pub(crate) async fn ask(server: &Server, names: &Names) -> Result<Self, Unusable> {
        let plain = FoundPlain::ask(server, names).await?;
        let Version { version } = read(&server.get(VERSION).await?, VERSION)?;
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

/// Tells what a server says of its KV cache, until it says that it does not.
pub(crate) async fn follow(shared: Arc<Shared>, asked: Arc<Asked>, mut sink: Box<dyn KvSink>) {
    let mut translation = Translation::new(asked);
    let mut has_warned = false;
    loop {
        let answer = match shared.server.post_empty(EVENTS).await {
            Ok(body) => Ok(Some(body)),
            Err(AskError::Refused {
                status: StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED,
                ..
            }) => Err(Untold::NoEvents),
            // What was lost with an answer is seen as a gap. Whether the server lives is asked
            // elsewhere.
            Err(_) => Ok(None),
        };
        // Taking it in may take long.
        let taken = spawn_blocking(move || {
            let told = answer.and_then(|answer| {
                answer.map_or_else(
                    || Ok(Told::default()),
                    |body| translation.take(&body, Instant::now()),
                )
            });
            let went = told.and_then(|told| Ok(apply(told, &mut *sink)?));
            if went.is_err() {
                let _ = apply(Told { is_void: true, ..Told::default() }, &mut *sink);
            }
            sink.set_caught_up(true);
            (translation, sink, went)
        });
        let Ok((translation_back, sink_back, went)) = taken.await else { return };
        (translation, sink) = (translation_back, sink_back);
        if translation.is_at_a_loss() && !std::mem::replace(&mut has_warned, true) {
            tracing::warn!(
                server = shared.name,
                "its prompts with images are not those expected: predicted up to the first image"
            );
        }
        if let Err(error) = went {
            return shared.distrust(error.to_string());
        }
        sleep(PAUSE).await;
    }
}

fn apply(told: Told, sink: &mut dyn KvSink) -> Result<(), KvSinkError> {
    let Told { is_void, batch, history_known } = told;
    if is_void {
        sink.reset();
    }
    match batch {
        Some(batch) => sink.batch(&batch.encode(), history_known),
        None => Ok(()),
    }
}
