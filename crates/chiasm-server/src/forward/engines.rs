//! Requests for which an engine that is given tokens is the better place than a server that is given messages.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use chiasm_api::openai::RequestBody;
use chiasm_pipeline::Caller;

use crate::admission::{Admission, Admitted};
use crate::arrival::Arrived;
use crate::body::parse;
use crate::endpoint_state::EndpointState;
use crate::endpoints::{completions, messages, responses};
use crate::error::HttpError;
use crate::paths::{CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES};

/// Has an engine answer a request that was sent to this path. It is read once more, as what it is, and refused if it can't be.
pub(super) async fn answer(
    path: &str,
    state: Arc<EndpointState>,
    caller: Caller,
    admission: Admission,
    body: Arrived,
) -> Result<Response, HttpError> {
    let shared = State(state.clone());
    match path {
        CHAT => completions::chat(shared, read(&state, caller, admission, body).await?).await,
        COMPLETIONS => completions::completions(shared, read(&state, caller, admission, body).await?).await,
        RESPONSES => responses::create(shared, read(&state, caller, admission, body).await?).await,
        MESSAGES => messages::messages(shared, read(&state, caller, admission, body).await?).await,
        COUNT_TOKENS => {
            Ok(messages::count_tokens(shared, read(&state, caller, admission, body).await?).await?.into_response())
        }
        _ => Err(HttpError::no_such_path()),
    }
}

async fn read<T: RequestBody>(
    state: &EndpointState,
    caller: Caller,
    admission: Admission,
    body: Arrived,
) -> Result<Admitted<T>, HttpError> {
    let body = parse(state, &caller.cpu, body).await?;
    Ok(Admitted { caller, admission, body })
}
