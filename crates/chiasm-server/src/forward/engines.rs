//! Requests that are better answered by an engine that takes tokens than by a server that takes
//! whole requests.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use chiasm_api::openai::RequestBody;
use chiasm_pipeline::RequestContext;

use crate::admission::{Admission, Admitted};
use crate::arrival::ReceivedBody;
use crate::body::parse;
use crate::endpoint_state::EndpointState;
use crate::endpoints::{completions, messages, responses};
use crate::error::HttpError;
use crate::paths::ModelEndpoint;

/// Has an engine answer a request to `endpoint`.
///
/// The body is parsed again, in that endpoint's format, and refused if that fails.
pub(super) async fn answer(
    endpoint: ModelEndpoint,
    state: Arc<EndpointState>,
    caller: RequestContext,
    admission: Admission,
    body: ReceivedBody,
) -> Result<Response, HttpError> {
    let shared = State(state.clone());
    match endpoint {
        ModelEndpoint::Chat => {
            completions::chat(shared, read(&state, caller, admission, body).await?).await
        }
        ModelEndpoint::Completions => {
            completions::completions(shared, read(&state, caller, admission, body).await?).await
        }
        ModelEndpoint::Responses => {
            responses::create(shared, read(&state, caller, admission, body).await?).await
        }
        ModelEndpoint::Messages => {
            messages::messages(shared, read(&state, caller, admission, body).await?).await
        }
        ModelEndpoint::CountTokens => {
            Ok(messages::count_tokens(shared, read(&state, caller, admission, body).await?)
                .await?
                .into_response())
        }
    }
}

async fn read<T: RequestBody>(
    state: &EndpointState,
    caller: RequestContext,
    admission: Admission,
    body: ReceivedBody,
) -> Result<Admitted<T>, HttpError> {
    let body = parse(state, &caller.cpu, body).await?;
    Ok(Admitted { caller, admission, body })
}
