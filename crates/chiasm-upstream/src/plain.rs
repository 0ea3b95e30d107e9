//! A server that receives requests unchanged: its description, and forwarding requests to it.

use std::collections::BTreeMap;

use bytes::{BufMut, Bytes, BytesMut};
use chiasm_backend::{
    Capabilities, DeathReason, ForwardRequest, ForwardResponse, HandOff, InputForm, JobError,
    KeyScheme, KvSource, Locality, MediaForm, PlaceholderForm, PlanClass, Supports, VllmItems,
};
use chiasm_types::{BlockSize, Role};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use reqwest::StatusCode;
use reqwest::header::CONTENT_TYPE;

use crate::models::{Models, Names, ServedModel};
use crate::pieces::Pieces;
use crate::request;
use crate::server::{RequestError, Server};
use crate::unusable::Unusable;
use crate::vllm_info::MODELS;

/// The block size of the approximate cache, in pieces of four bytes: 256 bytes of text. Larger
/// blocks cost less memory, and the contents of the server's cache are a guess anyway.
const BLOCK_SIZE: BlockSize = match BlockSize::new(64) {
    Some(size) => size,
    None => panic!("64 is not 0"),
};
/// The assumed size of a server's cache in blocks, since the server does not report it: about a
/// million tokens, as fit on a GPU.
const ASSUMED_TOTAL_BLOCKS: u64 = 1 << 14;

/// The description of a plain server, fetched before the server is used.
pub(crate) struct PlainInfo {
    /// The selected model; `None` if the server lists none.
    pub(crate) model: Option<ServedModel>,
}

impl PlainInfo {
    /// Queries a server.
    ///
    /// # Errors
    /// Returns [`Unusable`] if the server can't be used.
    pub(crate) async fn fetch(server: &Server, names: &Names) -> Result<Self, Unusable> {
        let models = Self::fetch_models(server).await?;
        let model = models.map(|models| models.find(names)).transpose()?.flatten();
        Ok(Self { model })
    }

    /// Queries a server's list of models; `None` if it has none.
    ///
    /// # Errors
    /// Returns [`Unusable`] if the server does not answer, or requires another key.
    pub(crate) async fn fetch_models(server: &Server) -> Result<Option<Models>, Unusable> {
        match server.get(MODELS).await {
            Ok(body) => Ok(serde_json::from_slice(&body).ok()),
            Err(RequestError::Refused {
                status: StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN,
                ..
            }) => Err(Unusable::KeyRequired),
            // The server serves one model and has no list.
            Err(RequestError::Refused { .. } | RequestError::Unreadable { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
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
                .unwrap_or(Capabilities::UNLIMITED_TOKENS),
            max_batched_tokens: Capabilities::UNLIMITED_TOKENS,
            max_running: 0,
            total_blocks: ASSUMED_TOTAL_BLOCKS,
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
            kv: KvSource::Unknown {
                why: "it does not report the contents of its cache".to_owned(),
            },
        }
    }
}

/// The paths that every server of OpenAI's API has. A 404 from one of them is about the model.
const UNIVERSAL_PATHS: [&str; 2] = ["v1/chat/completions", "v1/completions"];

/// Forwards a request. `model` is the server's name of the model.
pub(crate) async fn forward(
    server: &Server,
    model: Option<&str>,
    request: ForwardRequest,
) -> Result<ForwardResponse, JobError> {
    let body = with_model_name(&request, model);
    let headers = request::headers(&request.id, request.trace.as_ref());
    let path = request.path;
    let response = server.post(path, body, headers).await.map_err(RequestError::into_job_error)?;
    let status = response.status();
    let is_own_fault =
        status.is_client_error() && !matches!(status.as_u16(), 401 | 403 | 404 | 429);
    if !status.is_success() && !is_own_fault {
        let refusal = server.refusal(response).await;
        let is_about_model = UNIVERSAL_PATHS.contains(&path) || refusal.names_model();
        if let Some(error) = refusal.error(is_about_model) {
            return Err(error);
        }
        let body = stream::iter([Ok(refusal.body)]).boxed();
        return Ok(ForwardResponse {
            status: status.as_u16(),
            content_type: refusal.content_type,
            body,
        });
    }
    let content_type =
        response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).map(str::to_owned);
    let body = Pieces::new(response)
        .map_err(|error| JobError::Dead(DeathReason::new(format!("the server: {error}"))));
    Ok(ForwardResponse { status: status.as_u16(), content_type, body: body.boxed() })
}

/// Returns the request's body with the server's name of the model. All other bytes stay unchanged.
fn with_model_name(request: &ForwardRequest, model: Option<&str>) -> Bytes {
    let body = &request.body;
    let Some(model) = model else { return body.clone() };
    let model = serde_json::Value::from(model).to_string();
    let mut renamed = BytesMut::with_capacity(body.len() + model.len() + 10);
    match &request.model {
        Some(range) => {
            renamed.put_slice(&body[..range.start]);
            renamed.put_slice(model.as_bytes());
            renamed.put_slice(&body[range.end..]);
        }
        None => {
            let begin = body.iter().position(|byte| *byte == b'{').map_or(0, |at| at + 1);
            let is_empty =
                body[begin..].iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'}');
            renamed.put_slice(&body[..begin]);
            renamed.put_slice(
                format!("\"model\":{model}{}", if is_empty { "" } else { "," }).as_bytes(),
            );
            renamed.put_slice(&body[begin..]);
        }
    }
    renamed.freeze()
}

#[cfg(test)]
mod tests {
    use chiasm_backend::RequestId;

    use super::*;

    fn request(body: &'static str, model: Option<&str>) -> ForwardRequest {
        let range = model.map(|model| {
            let begin = body.find(model).unwrap();
            begin..begin + model.len()
        });
        let body = Bytes::from_static(body.as_bytes());
        ForwardRequest {
            id: RequestId::from_random(1),
            path: "v1/x",
            body,
            model: range,
            trace: None,
            prompt: None,
        }
    }

    #[test]
    fn only_the_model_name_is_changed() {
        let renamed = |body, model, name| {
            String::from_utf8(with_model_name(&request(body, model), name).to_vec()).unwrap()
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
