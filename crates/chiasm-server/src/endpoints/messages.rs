//! The two endpoints of the Messages API.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use chiasm_api::StreamApi;
use chiasm_api::anthropic::{
    CountRequest, Head, MessagesRequest, append_user_to_results, events, put_system_first, response,
};
use chiasm_api::openai::StreamOptions;
use chiasm_pipeline::{Generation, RequestError, collect};
use chiasm_request::{ChoiceDelta, GenerateRequest, Prompt};
use serde_json::{Value, json};

use crate::admission::Admitted;
use crate::body::JsonBody;
use crate::endpoint_state::EndpointState;
use crate::endpoints::completions::{model_name, planned, usage};
use crate::endpoints::find_model;
use crate::error::HttpError;
use crate::meter::{self, Meter};
use crate::routing_headers::routing_headers;
use crate::sse;

/// `POST /v1/messages`
pub(crate) async fn messages(
    State(state): State<Arc<EndpointState>>,
    request: Admitted<MessagesRequest>,
) -> Result<Response, HttpError> {
    let state = &state;
    let told = |error| state.http_error(error);
    let Admitted { caller, admission, body: JsonBody { request, charge } } = request;
    let MessagesRequest { model, is_streamed, generate } = request;
    let adapter = find_model(&state.pipeline, model.as_deref())?;
    admission.record.adapter(adapter.as_ref());
    admission.ends_with_client();
    let generate = in_order(state, generate).await.map_err(told)?;
    let prepared = planned(state, generate, adapter.clone(), &caller).await.map_err(told)?;
    drop(charge);
    let head = Head::new(&caller.id, model_name(state, adapter.as_ref()));

    if !is_streamed {
        let (choices, attempted) = collect(&state.pipeline, &prepared).await.map_err(told)?;
        let usage = usage(&attempted, &choices, prepared.reads_reasoning());
        state.metrics.used(usage);
        admission.record.attempted(attempted);
        admission.record.used(usage);
        let choice = choices.first().ok_or_else(|| HttpError::internal("there is no answer"))?;
        let mut response = Json(response::whole(&head, choice, usage)).into_response();
        routing_headers(response.headers_mut(), &attempted);
        return Ok(response);
    }

    let generation = Generation::start(&state.pipeline, &prepared).await.map_err(told)?;
    let attempted = generation.attempted();
    let start = events::start(&head, usage(&attempted, &[], prepared.reads_reasoning()));
    let options = StreamOptions::ALL_USAGE;
    let meter = Meter::new(state, options, vec![attempted], admission, prepared.reads_reasoning());
    let mut told = events::Events::default();
    let events = meter::events(
        start.into(),
        generation.into_deltas(),
        meter,
        move |delta: Result<ChoiceDelta, _>, meter, events| match delta {
            Ok(delta) => {
                let usage = meter.count(0, &delta).unwrap_or_default();
                told.of(&delta, usage).into_iter().for_each(|told| events.extend_from_slice(&told));
            }
            Err(error) => StreamApi::Messages.write_failure(events, &error, 0),
        },
        // The last delta has already sent the usage.
        |_, events| events.extend_from_slice(&events::stop()),
    );
    let mut response = sse::response(events);
    routing_headers(response.headers_mut(), &attempted);
    Ok(response)
}

/// Returns the request with its messages in an order that the model's template accepts.
pub(crate) async fn in_order(
    state: &EndpointState,
    mut request: GenerateRequest,
) -> Result<GenerateRequest, RequestError> {
    if let Prompt::Chat(chat) = &mut request.prompt
        && chat.messages.iter().skip(1).any(|message| message.role == "system")
        && state.pipeline.takes_system_first_alone().await?
    {
        put_system_first(&mut chat.messages);
    }
    let template = state.pipeline.model.template.as_ref();
    if let Prompt::Chat(chat) = &mut request.prompt
        && template.is_some_and(|template| !template.allows_user_after_result())
    {
        append_user_to_results(&mut chat.messages);
    }
    Ok(request)
}

/// `POST /v1/messages/count_tokens`: the prompt is made as for an answer, which is then not asked
/// for. Where it differs from worker to worker, the longest one tells.
pub(crate) async fn count_tokens(
    State(state): State<Arc<EndpointState>>,
    request: Admitted<CountRequest>,
) -> Result<Json<Value>, HttpError> {
    let Admitted { caller, admission, body: JsonBody { request, charge: _charge } } = request;
    let CountRequest { model, generate } = request;
    let adapter = find_model(&state.pipeline, model.as_deref())?;
    admission.ends_with_client();
    let generate = in_order(&state, generate).await.map_err(|error| state.http_error(error))?;
    let prepared = planned(&state, generate, adapter, &caller)
        .await
        .map_err(|error| state.http_error(error))?;
    Ok(Json(json!({"input_tokens": prepared.prompt_tokens()})))
}
