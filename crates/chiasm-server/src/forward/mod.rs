//! Forwarding of requests, unchanged, to servers that take whole requests.
//!
//! `chiasm_pipeline` picks the server. Only the model's name and the names of media items are
//! changed; nothing is refused. A fleet may also have engines that take tokens. A request then goes
//! to the better of both kinds, and may move from one kind to the other as long as nothing has been
//! sent to its client.
//!
//! | module | is |
//! |---|---|
//! | `client_names` | clients' names of media items, which are not forwarded |
//! | `engines` | answers of engines, in a fleet of both kinds |
//! | `first_content` | the wait for an answer's first content |
//! | `proxied_response` | the relayed answer |

mod client_names;
mod engines;
mod first_content;
mod proxied_response;

use std::ops::Range;
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use chiasm_api::anthropic::MessagesRequest;
use chiasm_api::forward::{ForwardBody, body_with_named_images, model_name_range, prompt_pieces};
use chiasm_api::openai::chat::ChatRequest;
use chiasm_api::openai::completions::CompletionRequest;
use chiasm_api::responses::ResponsesRequest;
use chiasm_backend::{ForwardRequest, ForwardResponse, InputForm, JobError, JobItem};
use chiasm_fleet::{PresentClass, Worker};
use chiasm_pipeline::{
    Attempts, Cause, Deadlines, ForwardOutcome, ForwardedRequest, ParsedRequest, RequestContext,
    RequestError, forward_request, within,
};
use chiasm_types::TokenId;
use futures_util::future::{BoxFuture, FutureExt};
use serde_json::{Map, Value};

use self::first_content::wait_for_content;
use self::proxied_response::response;
use crate::admission::{Admission, Admitted};
use crate::arrival::ReceivedBody;
use crate::body::{JsonBody, parse};
use crate::endpoint_state::EndpointState;
use crate::endpoints::find_model;
use crate::endpoints::messages::order_messages;
use crate::error::HttpError;
use crate::paths::ModelEndpoint;

/// The largest text, in bytes, that is cut into pieces on an async thread.
const MAX_INLINE_BYTES: usize = 64 << 10;

/// A client's request in the format of its API.
struct ClientRequest {
    endpoint: ModelEndpoint,
    fields: Arc<Map<String, Value>>,
}

impl ForwardedRequest for ClientRequest {
    fn approximate_prompt(&self, items: &[usize]) -> Vec<TokenId> {
        prompt_pieces(&self.fields, items)
    }

    fn with_item_names(&self, items: &[JobItem]) -> Option<(Bytes, Option<Range<usize>>)> {
        let body = Bytes::from(body_with_named_images(&self.fields, items)?);
        let model_range = model_name_range(&body).ok()?;
        Some((body, model_range))
    }

    fn wait_for_content<'a>(
        &'a self,
        answer: ForwardResponse,
        server: &'a Worker,
    ) -> BoxFuture<'a, Result<ForwardResponse, JobError>> {
        wait_for_content(self.endpoint, answer, server).boxed()
    }
}

/// Forwards a request to `endpoint`, unless an engine that takes tokens is the better place for it.
pub(crate) async fn forward(
    endpoint: ModelEndpoint,
    State(state): State<Arc<EndpointState>>,
    request: Admitted<ForwardBody>,
) -> Result<Response, HttpError> {
    let Admitted { mut caller, admission, body: JsonBody { request, charge } } = request;
    let is_for_adapter = find_model(&state.pipeline, request.model_name.as_deref())?.is_some();
    let classes = state.pipeline.fleet.classes();
    let has_engines = classes.iter().any(|class| class.input == InputForm::Tokens);
    if is_for_adapter && !has_engines {
        return Err(HttpError::invalid(
            "model",
            "is a LoRA adapter, which upstream servers do not support",
        ));
    }
    admission.cancel_on_disconnect();
    let body = body_of(&request);
    let has_servers = classes.iter().any(|class| class.input == InputForm::Messages);
    // Tokens are counted here, without an engine's help.
    let needs_engine = is_for_adapter || endpoint == ModelEndpoint::CountTokens || !has_servers;
    if has_engines && needs_engine {
        return engines::answer(endpoint, state, caller, admission, body).await;
    }
    let outcome = place(&state, endpoint, &caller, request, &classes).await;
    drop(charge);
    match outcome.map_err(|error| state.http_error(error))? {
        ForwardOutcome::Server(answer) => {
            state.pipeline.retries.on_request();
            Ok(response(endpoint, state, admission, *answer, caller.arrived))
        }
        ForwardOutcome::Engine(attempts) => {
            if let Some(observer) = &state.pipeline.observer {
                caller.entries.restart(&**observer);
            }
            caller.attempts = Attempts { can_forward: true, ..attempts };
            answer_by_engine(endpoint, state, caller, admission, body).await
        }
    }
}

/// Has an engine answer. If none can and nothing has been sent to the client, tries a server; for
/// that the body is kept until the answer begins.
async fn answer_by_engine(
    endpoint: ModelEndpoint,
    state: Arc<EndpointState>,
    mut caller: RequestContext,
    admission: Admission,
    body: ReceivedBody,
) -> Result<Response, HttpError> {
    let answer =
        engines::answer(endpoint, state.clone(), caller.clone(), admission.clone(), body.clone())
            .await;
    let mut error = match answer {
        Ok(answer) => return Ok(answer),
        Err(error) => error,
    };
    let Some(attempts) = error.left_to_servers.take() else { return Err(error) };
    caller.attempts = *attempts;
    let JsonBody { request, charge } = parse::<ForwardBody>(&state, &caller.cpu, body).await?;
    let classes = state.pipeline.fleet.classes();
    let servers: Vec<_> =
        classes.iter().filter(|class| class.input == InputForm::Messages).cloned().collect();
    let outcome = place(&state, endpoint, &caller, request, &servers).await;
    drop(charge);
    match outcome {
        Ok(ForwardOutcome::Server(answer)) => {
            Ok(response(endpoint, state, admission, *answer, caller.arrived))
        }
        // A request that no server takes may still be valid for engines, so the engine's error is
        // returned.
        Ok(ForwardOutcome::Engine(_)) | Err(RequestError { cause: Cause::Invalid(_), .. }) => {
            Err(error)
        }
        Err(error) => Err(state.http_error(error)),
    }
}

/// Finds the best place for a request to `endpoint`, among the workers of `classes`.
async fn place(
    state: &Arc<EndpointState>,
    endpoint: ModelEndpoint,
    caller: &RequestContext,
    request: ForwardBody,
    classes: &[PresentClass],
) -> Result<ForwardOutcome, RequestError> {
    let deadlines = Deadlines::new(caller.arrived, &state.pipeline.limits);
    if let Some(observer) = &state.pipeline.observer {
        caller.entries.restart(&**observer);
    }
    let placing = async {
        let (request, _charge) = client_names::resolve(state, caller, request).await?;
        let parsed = parse_for_engines(state, endpoint, body_of(&request), caller);
        let ForwardBody { body, model_range, fields, .. } = request;
        let path = endpoint.path().trim_start_matches('/');
        let forward = ForwardRequest {
            id: caller.id.clone(),
            path,
            body,
            model: model_range,
            trace: caller.trace.clone(),
            prompt: None,
        };
        let request = Arc::new(ClientRequest { endpoint, fields });
        forward_request(&state.pipeline, caller, request, forward, classes, parsed).await
    };
    within(deadlines.first_token, placing).await.and_then(|outcome| outcome)
}

/// Parses a request as one that engines understand. `None` if it has unsupported parts or several
/// prompts, or if it is invalid; the server reports the error then.
async fn parse_for_engines(
    state: &EndpointState,
    endpoint: ModelEndpoint,
    body: ReceivedBody,
    caller: &RequestContext,
) -> Option<ParsedRequest> {
    let cpu = &caller.cpu;
    let request = match endpoint {
        ModelEndpoint::Chat => parse::<ChatRequest>(state, cpu, body).await.ok()?.request.generate,
        ModelEndpoint::Completions => {
            let mut prompts =
                parse::<CompletionRequest>(state, cpu, body).await.ok()?.request.generate;
            prompts.pop().filter(|_| prompts.is_empty())?
        }
        ModelEndpoint::Responses => {
            parse::<ResponsesRequest>(state, cpu, body).await.ok()?.request.generate
        }
        ModelEndpoint::Messages => {
            let request = parse::<MessagesRequest>(state, cpu, body).await.ok()?.request.generate;
            order_messages(state, request).await.ok()?
        }
        ModelEndpoint::CountTokens => return None,
    };
    let accepts_item_names = endpoint == ModelEndpoint::Chat;
    let has_same_token_count = matches!(endpoint, ModelEndpoint::Chat | ModelEndpoint::Completions);
    Some(ParsedRequest { request, accepts_item_names, has_same_token_count })
}

/// Returns a request's body, to be parsed as another type.
fn body_of(request: &ForwardBody) -> ReceivedBody {
    ReceivedBody { bytes: request.body.clone(), values: request.count_values() }
}

#[cfg(test)]
mod tests;
