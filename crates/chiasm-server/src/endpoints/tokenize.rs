//! `POST /tokenize` and `POST /detokenize`: prompts as tokens, and back.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use chiasm_api::openai::tokenize::{DetokenizeRequest, TokenizeAnswer, TokenizeRequest};
use chiasm_pipeline::{self, RequestError};
use serde_json::{Value, json};

use crate::admission::Admitted;
use crate::body::JsonBody;
use crate::endpoint_state::EndpointState;
use crate::endpoints::completions::{TOKENS_PER_CANDIDATE, json_response};
use crate::endpoints::find_model;
use crate::error::HttpError;

/// The number of tokens whose names in the vocabulary take as long to write as one log probability.
const NAMES_PER_CANDIDATE: usize = 4;

/// `POST /tokenize`
pub(crate) async fn tokenize(
    State(state): State<Arc<EndpointState>>,
    request: Admitted<TokenizeRequest>,
) -> Result<Response, HttpError> {
    let to_http = |error| state.http_error(error);
    let Admitted { caller, admission, body: JsonBody { request, charge: _charge } } = request;
    let TokenizeRequest { model, prompt, return_token_strs } = request;
    find_model(&state.pipeline, model.as_deref())?;
    admission.cancel_on_disconnect();
    let max_model_len =
        state.pipeline.fleet.max_model_len().ok_or_else(|| to_http(RequestError::not_ready()))?;
    let tokens =
        chiasm_pipeline::tokenize(&state.pipeline, prompt, &caller).await.map_err(to_http)?;
    let tokenizer = return_token_strs.then(|| state.pipeline.model.tokenizer.clone());
    let names = if return_token_strs { tokens.len() / NAMES_PER_CANDIDATE } else { 0 };
    json_response(&state, &caller, names + tokens.len() / TOKENS_PER_CANDIDATE, move || {
        serde_json::to_vec(&TokenizeAnswer::new(&tokens, max_model_len, tokenizer.as_ref()))
    })
    .await
}

/// `POST /detokenize`
pub(crate) async fn detokenize(
    State(state): State<Arc<EndpointState>>,
    request: Admitted<DetokenizeRequest>,
) -> Result<Json<Value>, HttpError> {
    let Admitted { caller, admission, body: JsonBody { request, charge: _charge } } = request;
    let DetokenizeRequest { model, tokens } = request;
    find_model(&state.pipeline, model.as_deref())?;
    admission.cancel_on_disconnect();
    let prompt =
        chiasm_pipeline::detokenize(&state.pipeline, "tokens", Arc::new(tokens), &caller).await;
    Ok(Json(json!({"prompt": prompt.map_err(|error| state.http_error(error))?})))
}
