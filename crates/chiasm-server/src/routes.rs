//! Paths and their methods. What surrounds the answers of all is in `layers`.

use std::sync::Arc;

use axum::Router;
use axum::routing::{MethodRouter, get, post};

use crate::endpoint_state::EndpointState;
use crate::endpoints::{completions, lora, messages, responses, tokenize};
use crate::error::HttpError;
use crate::forward;
use crate::paths::{DETOKENIZE, LOAD_LORA, ModelEndpoint, TOKENIZE, UNLOAD_LORA};

/// The endpoints that exist.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offered {
    /// Clients may load and unload LoRA adapters.
    pub(crate) adapters_may_change: bool,
    /// Requests are passed on as they come.
    pub(crate) forwards: bool,
}

/// Returns the whole HTTP interface. `others` are the routes that have a state of their own.
pub(crate) fn router(state: Arc<EndpointState>, offered: Offered, others: Vec<Router>) -> Router {
    let changing = if offered.adapters_may_change {
        Router::new().route(LOAD_LORA, post(lora::load)).route(UNLOAD_LORA, post(lora::unload))
    } else {
        Router::new()
    };
    let endpoints = changing
        .merge(if offered.forwards { forwarding() } else { answering() })
        .route("/v1/responses/{id}", get(responses::not_kept).delete(responses::not_kept))
        .route("/v1/responses/{id}/input_items", get(responses::not_kept))
        .route("/v1/responses/{id}/cancel", post(responses::not_kept))
        .route(TOKENIZE, post(tokenize::tokenize))
        .route(DETOKENIZE, post(tokenize::detokenize))
        .with_state(state);
    others
        .into_iter()
        .fold(endpoints, Router::merge)
        .fallback(async || HttpError::no_such_path())
        .method_not_allowed_fallback(async || HttpError::method_not_allowed())
}

/// Returns the endpoints of models, answered by engines that are given tokens.
fn answering() -> Router<Arc<EndpointState>> {
    model_routes(|endpoint| match endpoint {
        ModelEndpoint::Chat => post(completions::chat),
        ModelEndpoint::Completions => post(completions::completions),
        ModelEndpoint::Responses => post(responses::create),
        ModelEndpoint::Messages => post(messages::messages),
        ModelEndpoint::CountTokens => post(messages::count_tokens),
    })
}

/// Returns the same endpoints, answered by servers that are given requests as they come.
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
