//! The routes: paths and their methods. The layers around all answers are in `layers`.

use std::sync::Arc;

use axum::Router;
use axum::http::{Method, Uri};
use axum::routing::{MethodRouter, get, post};

use crate::endpoint_state::EndpointState;
use crate::endpoints::{completions, lora, messages, responses, tokenize};
use crate::error::HttpError;
use crate::forward;
use crate::paths::{DETOKENIZE, LOAD_LORA, ModelEndpoint, TOKENIZE, UNLOAD_LORA};

/// The optional endpoints.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EndpointOptions {
    /// Lets clients load and unload LoRA adapters.
    pub(crate) adapters_may_change: bool,
    /// Forwards requests unchanged.
    pub(crate) forwards: bool,
}

/// Returns the router of the whole HTTP interface. `others` are the routes with a state of their
/// own.
pub(crate) fn router(
    state: Arc<EndpointState>,
    options: EndpointOptions,
    others: Vec<Router>,
) -> Router {
    let adapters = if options.adapters_may_change {
        Router::new().route(LOAD_LORA, post(lora::load)).route(UNLOAD_LORA, post(lora::unload))
    } else {
        Router::new()
    };
    let endpoints = adapters
        .merge(if options.forwards { forwarding() } else { answering() })
        .route("/v1/responses/{id}", get(responses::not_kept).delete(responses::not_kept))
        .route("/v1/responses/{id}/input_items", get(responses::not_kept))
        .route("/v1/responses/{id}/cancel", post(responses::not_kept))
        .route(TOKENIZE, post(tokenize::tokenize))
        .route(DETOKENIZE, post(tokenize::detokenize))
        .with_state(state);
    others
        .into_iter()
        .fold(endpoints, Router::merge)
        .fallback(async |uri: Uri| HttpError::no_such_path(uri.path()))
        // `layers` knows the methods.
        .method_not_allowed_fallback(async |method: Method| {
            HttpError::method_not_allowed(&method, "other methods")
        })
}

/// Returns the model endpoints, answered by engines that take tokens.
fn answering() -> Router<Arc<EndpointState>> {
    model_routes(|endpoint| match endpoint {
        ModelEndpoint::Chat => post(completions::chat),
        ModelEndpoint::Completions => post(completions::completions),
        ModelEndpoint::Responses => post(responses::create),
        ModelEndpoint::Messages => post(messages::messages),
        ModelEndpoint::CountTokens => post(messages::count_tokens),
    })
}

/// Returns the same endpoints, answered by servers that take whole requests.
fn forwarding() -> Router<Arc<EndpointState>> {
    model_routes(|endpoint| {
        post(async move |state, request| forward::forward(endpoint, state, request).await)
    })
}

fn model_routes(
    route: impl Fn(ModelEndpoint) -> MethodRouter<Arc<EndpointState>>,
) -> Router<Arc<EndpointState>> {
    let endpoints = ModelEndpoint::ALL.into_iter();
    endpoints.fold(Router::new(), |router, endpoint| router.route(endpoint.path(), route(endpoint)))
}
