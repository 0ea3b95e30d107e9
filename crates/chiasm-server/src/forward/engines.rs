//! Requests for which an engine that is given tokens is the better place than a server that is given messages.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};

use crate::admission::{Admission, Admitted};
use crate::answer as openai;
use crate::anthropic::{self, answer as messages};
use crate::arrival::Arrived;
use crate::body::parse;
use crate::error::ApiError;
use crate::frontend::Frontend;
use crate::openai::RequestBody;
use crate::pipeline::Caller;
use crate::responses;
use crate::routes::{CHAT, COMPLETIONS, RESPONSES};

/// Has an engine answer a request that was sent to this path. It is read once more, as what it is, and refused if it can't be.
pub(super) async fn answer(
    path: &str,
    frontend: Arc<Frontend>,
    caller: Caller,
    admission: Admission,
    body: Arrived,
) -> Result<Response, ApiError> {
    let state = State(frontend.clone());
    match path {
        CHAT => openai::chat(state, read(&frontend, caller, admission, body).await?).await,
        COMPLETIONS => openai::completions(state, read(&frontend, caller, admission, body).await?).await,
        RESPONSES => responses::create(state, read(&frontend, caller, admission, body).await?).await,
        anthropic::MESSAGES => messages::messages(state, read(&frontend, caller, admission, body).await?).await,
        anthropic::COUNT_TOKENS => {
            Ok(messages::count_tokens(state, read(&frontend, caller, admission, body).await?).await?.into_response())
        }
        _ => Err(ApiError::no_such_path()),
    }
}

async fn read<T: RequestBody>(
    frontend: &Frontend,
    caller: Caller,
    admission: Admission,
    body: Arrived,
) -> Result<Admitted<T>, ApiError> {
    let body = parse(frontend, &caller.cpu, body).await?;
    Ok(Admitted { caller, admission, body })
}
