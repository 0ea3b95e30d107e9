//! Requests that are passed on as they came, to servers that take messages.
//!
//! `chiasm_pipeline` finds the server. Only the model's name and the names of media items are
//! changed; nothing is refused. A fleet may also have engines that are given tokens. A
//! request then goes to the better of both kinds, and may move from one kind to the other as long
//! as its client has been sent nothing.
//!
//! | module | is |
//! |---|---|
//! | `begun` | the wait for an answer's first content |
//! | `client_names` | clients' names of media items, which are not passed on |
//! | `engines` | answers of engines, in a fleet of both kinds |
//! | `passage` | the answer as it comes |

mod begun;
mod client_names;
mod engines;
mod passage;

use std::ops::Range;
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use chiasm_api::anthropic::MessagesRequest;
use chiasm_api::forward::{ForwardBody, pieces, place_of_model, with_names};
use chiasm_api::openai::chat::ChatRequest;
use chiasm_api::openai::completions::CompletionRequest;
use chiasm_api::responses::ResponsesRequest;
use chiasm_backend::{Forward, Forwarded, InputForm, JobError, JobItem};
use chiasm_fleet::{PresentClass, Worker};
use chiasm_pipeline::{
    Attempts, Caller, Cause, Deadlines, ForwardedRequest, Place, RequestError, Understood,
    find_place, within,
};
use chiasm_types::TokenId;
use futures_util::future::{BoxFuture, FutureExt};
use serde_json::{Map, Value};

use self::begun::begun;
use self::passage::response;
use crate::admission::{Admission, Admitted};
use crate::arrival::Arrived;
use crate::body::{JsonBody, parse};
use crate::endpoint_state::EndpointState;
use crate::endpoints::find_model;
use crate::endpoints::messages::in_order;
use crate::error::HttpError;
use crate::paths::ModelEndpoint;

/// Text up to this many bytes is cut into pieces at once.
const SMALL: usize = 64 << 10;

/// The request of a client, as its protocol has it.
struct ClientRequest {
    endpoint: ModelEndpoint,
    fields: Arc<Map<String, Value>>,
}

impl ForwardedRequest for ClientRequest {
    fn pieces(&self, items: &[usize]) -> Vec<TokenId> {
        pieces(&self.fields, items)
    }

    fn with_names(&self, items: &[JobItem]) -> Option<(Bytes, Option<Range<usize>>)> {
        let body = Bytes::from(with_names(&self.fields, items)?);
        let model = place_of_model(&body).ok()?;
        Some((body, model))
    }

    fn begun<'a>(
        &'a self,
        answer: Forwarded,
        server: &'a Worker,
    ) -> BoxFuture<'a, Result<Forwarded, JobError>> {
        begun(self.endpoint, answer, server).boxed()
    }
}

/// Passes on a request to `endpoint`, unless an engine that is given tokens is the better place for
/// it.
pub(crate) async fn forward(
    endpoint: ModelEndpoint,
    State(state): State<Arc<EndpointState>>,
    request: Admitted<ForwardBody>,
) -> Result<Response, HttpError> {
    let Admitted { mut caller, admission, body: JsonBody { request, charge } } = request;
    let is_for_adapter = find_model(&state.pipeline, request.name.as_deref())?.is_some();
    let classes = state.pipeline.fleet.classes();
    let has_engines = classes.iter().any(|class| class.input == InputForm::Tokens);
    if is_for_adapter && !has_engines {
        return Err(HttpError::invalid(
            "model",
            "is an adapter, and none are used at servers that somebody else has started",
        ));
    }
    admission.ends_with_client();
    let arrived = arrived(&request);
    // Counting needs no engine.
    if has_engines && (is_for_adapter || endpoint == ModelEndpoint::CountTokens) {
        return engines::answer(endpoint, state, caller, admission, arrived).await;
    }
    let taken = place(&state, endpoint, &caller, request, &classes).await;
    drop(charge);
    match taken.map_err(|error| state.http_error(error))? {
        Place::Server(answer) => {
            state.pipeline.retries.earn();
            Ok(response(endpoint, state, admission, *answer, caller.arrived))
        }
        Place::Engine(tried) => {
            if let Some(observer) = &state.pipeline.observer {
                caller.entries.begin_anew(&**observer);
            }
            caller.tried = Attempts { may_be_passed_on: true, ..tried };
            by_engine(endpoint, state, caller, admission, arrived).await
        }
    }
}

/// Has an engine answer. Where none can, and the client has been sent nothing, a server is tried
/// after all: for that the body is kept until the answer begins.
async fn by_engine(
    endpoint: ModelEndpoint,
    state: Arc<EndpointState>,
    mut caller: Caller,
    admission: Admission,
    body: Arrived,
) -> Result<Response, HttpError> {
    let answer =
        engines::answer(endpoint, state.clone(), caller.clone(), admission.clone(), body.clone())
            .await;
    let mut error = match answer {
        Ok(answer) => return Ok(answer),
        Err(error) => error,
    };
    let Some(tried) = error.left_to_servers.take() else { return Err(error) };
    caller.tried = *tried;
    let JsonBody { request, charge } = parse::<ForwardBody>(&state, &caller.cpu, body).await?;
    let classes = state.pipeline.fleet.classes();
    let servers: Vec<_> =
        classes.iter().filter(|class| class.input == InputForm::Messages).cloned().collect();
    let taken = place(&state, endpoint, &caller, request, &servers).await;
    drop(charge);
    match taken {
        Ok(Place::Server(answer)) => {
            Ok(response(endpoint, state, admission, *answer, caller.arrived))
        }
        // A request that no server takes is still valid if an engine takes it: the engine's error
        // is told.
        Ok(Place::Engine(_)) | Err(RequestError { cause: Cause::Invalid(_), .. }) => Err(error),
        Err(error) => Err(state.http_error(error)),
    }
}

/// Finds the best place for a request to `endpoint`, among the workers of `classes`.
async fn place(
    state: &Arc<EndpointState>,
    endpoint: ModelEndpoint,
    caller: &Caller,
    request: ForwardBody,
    classes: &[PresentClass],
) -> Result<Place, RequestError> {
    let deadlines = Deadlines::of(caller.arrived, &state.pipeline.limits);
    if let Some(observer) = &state.pipeline.observer {
        caller.entries.begin_anew(&**observer);
    }
    let placing = async {
        let (request, _charge) = client_names::resolve(state, caller, request).await?;
        let understood = understood(state, endpoint, arrived(&request), caller);
        let ForwardBody { body, model, fields, .. } = request;
        let below = endpoint.path().trim_start_matches('/');
        let forward = Forward {
            id: caller.id.clone(),
            path: below,
            body,
            model,
            trace: caller.trace.clone(),
            prompt: None,
        };
        let request = Arc::new(ClientRequest { endpoint, fields });
        find_place(&state.pipeline, caller, request, forward, classes, understood).await
    };
    within(deadlines.first_token, placing).await.and_then(|taken| taken)
}

/// Returns what a request asks for. `None` if it has parts that are not understood here, or more
/// than one prompt, or is wrong, which the server says then.
async fn understood(
    state: &EndpointState,
    endpoint: ModelEndpoint,
    body: Arrived,
    caller: &Caller,
) -> Option<Understood> {
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
            in_order(state, request).await.ok()?
        }
        ModelEndpoint::CountTokens => return None,
    };
    let takes_names = endpoint == ModelEndpoint::Chat;
    let is_counted = matches!(endpoint, ModelEndpoint::Chat | ModelEndpoint::Completions);
    Some(Understood { request, takes_names, is_counted })
}

/// The body of a request, to be parsed as another type.
fn arrived(request: &ForwardBody) -> Arrived {
    Arrived { bytes: request.body.clone(), values: request.values() }
}
