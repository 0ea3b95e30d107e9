//! A server that is given requests as they come: what it says of itself, and passing requests on.

use std::collections::BTreeMap;

use bytes::{BufMut, Bytes, BytesMut};
use chiasm_backend::{
    Capabilities, Death, Forward, Forwarded, HandOff, InputForm, JobError, KeyScheme, KvSource,
    Locality, MediaForm, PlaceholderForm, PlanClass, Supports, VllmItems,
};
use chiasm_types::{BlockSize, Role};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use reqwest::StatusCode;
use reqwest::header::CONTENT_TYPE;

use crate::found::MODELS;
use crate::models::{self, Models, Names};
use crate::pieces::Pieces;
use crate::request;
use crate::server::{AskError, Server};
use crate::unusable::Unusable;

/// Pieces of four bytes in a block: text of 256 bytes. What a server holds is guessed, and to
/// remember it costs by the block.
const BLOCK_SIZE: BlockSize = match BlockSize::new(64) {
    Some(size) => size,
    None => panic!("64 is not 0"),
};
/// Blocks that a server is taken to hold at most, as it does not tell: of a million tokens or so,
/// as a GPU has room for.
const TAKEN_TO_HOLD: u64 = 1 << 14;
/// A context that is not told is no bound.
const ANY_LENGTH: usize = u32::MAX as usize;

/// The facts about such a server that are needed before it is used.
pub(crate) struct FoundPlain {
    /// The model that is meant; `None` where the server lists none.
    pub(crate) model: Option<models::Found>,
}

impl FoundPlain {
    /// Asks a server.
    ///
    /// # Errors
    /// It can't be used.
    pub(crate) async fn ask(server: &Server, names: &Names) -> Result<Self, Unusable> {
        let told = match server.get(MODELS).await {
            Ok(body) => serde_json::from_slice::<Models>(&body).ok(),
            Err(AskError::Refused {
                status: StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN,
                ..
            }) => {
                return Err(Unusable::WantsKey);
            }
            // It serves one model without a list.
            Err(AskError::Refused { .. } | AskError::Unreadable { .. }) => None,
            Err(error) => return Err(error.into()),
        };
        let model = told.map(|models| models.find(names)).transpose()?.flatten();
        Ok(Self { model })
    }

    pub(crate) fn capabilities(&self, locality: Locality) -> Capabilities {
        Capabilities {
            engine: "a server of OpenAI's API".to_owned(),
            class: PlanClass {
                processor: (*b"").into(),
                vllm_items: VllmItems::None,
                placeholders: PlaceholderForm::Marker,
                keys: KeyScheme::Text,
                block_size: BLOCK_SIZE,
            },
            role: Role::Aggregated,
            embedding_store_bytes: 0,
            max_model_len: self
                .model
                .as_ref()
                .and_then(|model| model.max_model_len)
                .unwrap_or(ANY_LENGTH),
            max_batched_tokens: ANY_LENGTH,
            max_running: 0,
            total_blocks: TAKEN_TO_HOLD,
            encoder_cache_tokens: 0,
            receiver_cache_bytes: 0,
            max_loras: 0,
            adapters: BTreeMap::new(),
            supports: Supports::EVERYTHING,
            input: InputForm::Messages,
            media: MediaForm::Encoded,
            hand_off: HandOff::None,
            locality,
            private_network: None,
            kv: KvSource::Unknown { why: "it does not tell what it holds".to_owned() },
        }
    }
}

/// Paths that every server of OpenAI's API has: a 404 at one of them is about the model.
const OF_EVERY_SERVER: [&str; 2] = ["v1/chat/completions", "v1/completions"];

/// Passes a request on. `model` is the server's name for the model.
pub(crate) async fn forward(
    server: &Server,
    model: Option<&str>,
    request: Forward,
) -> Result<Forwarded, JobError> {
    let body = named(&request, model);
    let headers = request::headers(&request.id, request.trace.as_ref());
    let path = request.path;
    let response = server.post(path, body, headers).await.map_err(AskError::of_job)?;
    let status = response.status();
    let is_own_fault =
        status.is_client_error() && !matches!(status.as_u16(), 401 | 403 | 404 | 429);
    if !status.is_success() && !is_own_fault {
        let refusal = server.refusal(response).await;
        let is_about_model = OF_EVERY_SERVER.contains(&path) || refusal.names_model();
        if let Some(error) = refusal.error(is_about_model) {
            return Err(error);
        }
        let body = stream::iter([Ok(refusal.body)]).boxed();
        return Ok(Forwarded { status: status.as_u16(), content_type: refusal.content_type, body });
    }
    let content_type =
        response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).map(str::to_owned);
    let body = Pieces::of(response)
        .map_err(|error| JobError::Dead(Death::new(format!("the server: {error}"))));
    Ok(Forwarded { status: status.as_u16(), content_type, body: body.boxed() })
}

/// Returns the body with the server's own name of the model. All other bytes stay as they came.
fn named(request: &Forward, model: Option<&str>) -> Bytes {
    let body = &request.body;
    let Some(model) = model else { return body.clone() };
    let model = serde_json::Value::from(model).to_string();
    let mut named = BytesMut::with_capacity(body.len() + model.len() + 10);
    match &request.model {
        Some(range) => {
            named.put_slice(&body[..range.start]);
            named.put_slice(model.as_bytes());
            named.put_slice(&body[range.end..]);
        }
        None => {
            let begin = body.iter().position(|byte| *byte == b'{').map_or(0, |at| at + 1);
            let is_empty =
                body[begin..].iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'}');
            named.put_slice(&body[..begin]);
            named.put_slice(
                format!("\"model\":{model}{}", if is_empty { "" } else { "," }).as_bytes(),
            );
            named.put_slice(&body[begin..]);
        }
    }
    named.freeze()
}

#[cfg(test)]
mod tests {
    use chiasm_backend::RequestId;

    use super::*;

    fn request(body: &'static str, model: Option<&str>) -> Forward {
        let at =
            model.map(|model| body.find(model).unwrap()..body.find(model).unwrap() + model.len());
        let body = Bytes::from_static(body.as_bytes());
        Forward {
            id: RequestId::from_random(1),
            path: "v1/x",
            body,
            model: at,
            trace: None,
            prompt: None,
        }
    }

    #[test]
    fn the_models_name_alone_is_changed() {
        let renamed = |body, model, name| {
            String::from_utf8(named(&request(body, model), name).to_vec()).unwrap()
        };
        assert_eq!(
            renamed(r#"{"a": 1.0, "model" : "m" , "b":[]}"#, Some("\"m\""), Some("x\"y")),
            r#"{"a": 1.0, "model" : "x\"y" , "b":[]}"#
        );
        assert_eq!(renamed(r#" { "a": 1e2}"#, None, Some("x")), r#" {"model":"x", "a": 1e2}"#);
        assert_eq!(renamed("{}", None, Some("x")), r#"{"model":"x"}"#);
        assert_eq!(renamed(r#"{"model": "m"}"#, Some("\"m\""), None), r#"{"model": "m"}"#);
    }
}
