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
use crate::endpoints::completions::{answer_usage, model_name, prepare_for_engines};
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
    let to_http = |error| state.http_error(error);
    let Admitted { caller, admission, body: JsonBody { request, charge } } = request;
    let MessagesRequest { model, is_streamed, generate } = request;
    let adapter = find_model(&state.pipeline, model.as_deref())?;
    admission.record.set_adapter(adapter.as_ref());
    admission.cancel_on_disconnect();
    let generate = order_messages(state, generate).await.map_err(to_http)?;
    let mut prepared =
        prepare_for_engines(state, generate, adapter.clone(), &caller).await.map_err(to_http)?;
    drop(charge);
    let head = Head::new(&caller.id, model_name(state, adapter.as_ref()));

    if !is_streamed {
        let (choices, route) = collect(&state.pipeline, &mut prepared).await.map_err(to_http)?;
        let usage = answer_usage(&route, &choices, prepared.reads_reasoning());
        state.metrics.count_tokens(usage);
        admission.record.set_route(route);
        admission.record.set_usage(usage);
        let choice = choices.first().ok_or_else(|| HttpError::internal("there is no answer"))?;
        let mut response = Json(response::whole_message(&head, choice, usage)).into_response();
        routing_headers(response.headers_mut(), &route);
        return Ok(response);
    }

    let generation = Generation::start(&state.pipeline, &mut prepared).await.map_err(to_http)?;
    let route = generation.route();
    let start = events::message_start(&head, answer_usage(&route, &[], prepared.reads_reasoning()));
    let options = StreamOptions::ALL_USAGE;
    let meter = Meter::new(state, options, vec![route], admission, prepared.reads_reasoning());
    let mut writer = events::Events::default();
    let events = meter::events(
        start.into(),
        generation.into_deltas(),
        meter,
        move |delta: Result<ChoiceDelta, _>, meter, events| match delta {
            Ok(delta) => {
                let usage = meter.count(0, &delta).unwrap_or_default();
                if let Some(written) = writer.push(&delta, usage) {
                    events.extend_from_slice(&written);
                }
            }
            Err(error) => StreamApi::Messages.write_failure(events, &error, 0),
        },
        // The last delta has already written the usage.
        |_, events| events.extend_from_slice(&events::message_stop()),
    );
    let mut response = sse::response(events);
    routing_headers(response.headers_mut(), &route);
    Ok(response)
}

/// Returns the request with its messages in an order that the model's template accepts.
pub(crate) async fn order_messages(
    state: &EndpointState,
    mut request: GenerateRequest,
) -> Result<GenerateRequest, RequestError> {
    if let Prompt::Chat(chat) = &mut request.prompt
        && chat.messages.iter().skip(1).any(|message| message.role == "system")
        && state.pipeline.requires_system_first().await?
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

/// `POST /v1/messages/count_tokens`: prepares the prompt as for an answer, but generates none. If
/// workers expand the prompt differently, the longest one counts.
pub(crate) async fn count_tokens(
    State(state): State<Arc<EndpointState>>,
    request: Admitted<CountRequest>,
) -> Result<Json<Value>, HttpError> {
    let Admitted { caller, admission, body: JsonBody { request, charge: _charge } } = request;
    let CountRequest { model, generate } = request;
    let adapter = find_model(&state.pipeline, model.as_deref())?;
    admission.cancel_on_disconnect();
    let generate =
        order_messages(&state, generate).await.map_err(|error| state.http_error(error))?;
    let prepared = prepare_for_engines(&state, generate, adapter, &caller)
        .await
        .map_err(|error| state.http_error(error))?;
    Ok(Json(json!({"input_tokens": prepared.prompt_tokens()})))
}
