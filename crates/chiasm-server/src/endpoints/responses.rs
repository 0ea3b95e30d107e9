//! `POST /v1/responses`, and the paths of responses that are not kept.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::Uri;
use axum::response::Response;
pub(crate) use chiasm_api::ApiError;
use chiasm_api::responses::{Answer, Head, LogprobWriter, ResponsesRequest};
use chiasm_pipeline::{Generation, collect};
use chiasm_request::ChoiceDelta;

use crate::admission::Admitted;
use crate::body::JsonBody;
use crate::endpoint_state::EndpointState;
use crate::endpoints::completions::{answer_usage, json_response, model_name, prepare_for_engines};
use crate::endpoints::find_model;
use crate::error::HttpError;
use crate::meter::{self, Meter};
use crate::routing_headers::routing_headers;
use crate::sse;

/// `POST /v1/responses`
pub(crate) async fn create(
    State(state): State<Arc<EndpointState>>,
    request: Admitted<ResponsesRequest>,
) -> Result<Response, HttpError> {
    let state = &state;
    let to_http = |error| with_input_param(state.http_error(error));
    let Admitted { caller, admission, body: JsonBody { request, charge } } = request;
    let ResponsesRequest { common, generate, echo, names } = request;
    let adapter = find_model(&state.pipeline, common.model.as_deref())?;
    admission.record.set_adapter(adapter.as_ref());
    admission.cancel_on_disconnect();
    let mut prepared =
        prepare_for_engines(state, generate, adapter.clone(), &caller).await.map_err(to_http)?;
    let name = model_name(state, adapter.as_ref());
    let head = Head::new(
        &caller.id,
        name,
        &state.pipeline.model.generation,
        prepared.sampling(),
        echo,
        charge,
    )?;
    let wants_logprobs = prepared.sampling().logprobs.is_some();

    let Some(options) = common.stream else {
        let (mut choices, route) =
            collect(&state.pipeline, &mut prepared).await.map_err(to_http)?;
        let usage = answer_usage(&route, &choices, prepared.reads_reasoning());
        state.metrics.count_tokens(usage);
        admission.record.set_route(route);
        admission.record.set_usage(usage);
        let choice = choices.pop().ok_or_else(|| HttpError::internal("there is no answer"))?;
        let candidates = choice.text_logprobs.iter().map(|token| 1 + token.logprob.top.len()).sum();
        let logprobs =
            wants_logprobs.then(|| LogprobWriter::whole(state.pipeline.model.tokenizer.clone()));
        let id = caller.id.clone();
        let mut response = json_response(state, &caller, candidates, move || {
            let answer = Answer::whole(id.as_str(), names, logprobs, choice);
            serde_json::to_vec(&answer.response(&head, usage))
        })
        .await?;
        routing_headers(response.headers_mut(), &route);
        return Ok(response);
    };

    let generation = Generation::start(&state.pipeline, &mut prepared).await.map_err(to_http)?;
    let route = generation.route();
    let meter = Meter::new(state, options, vec![route], admission, prepared.reads_reasoning());
    let writer = || {
        LogprobWriter::streamed(
            state.pipeline.model.tokenizer.clone(),
            state.pipeline.media.budget().empty_charge(),
        )
    };
    let (mut answer, begun) =
        Answer::streamed(caller.id.as_str(), names, wants_logprobs.then(writer), &head);
    let events = meter::events(
        begun.concat(),
        generation.into_deltas(),
        meter,
        move |delta: Result<ChoiceDelta, ApiError>, meter, events| {
            match delta {
                Ok(delta) => {
                    meter.count(0, &delta);
                    answer.add(&delta);
                    if delta.finish.is_some() {
                        answer.end(&head, meter.total());
                    }
                }
                Err(error) => answer.fail(&head, &error),
            }
            answer.take_events().into_iter().for_each(|event| events.extend_from_slice(&event));
        },
        // The last delta has already written the end of the stream.
        |_, _| {},
    );
    let mut response = sse::response(events);
    routing_headers(response.headers_mut(), &route);
    Ok(response)
}

/// `GET` and `DELETE /v1/responses/ID`, `GET …/input_items`, `POST …/cancel`
pub(crate) async fn not_kept(
    uri: Uri,
    id: Result<Path<String>, PathRejection>,
) -> Result<(), HttpError> {
    let Path(id) = id.map_err(|_| HttpError::no_such_path(uri.path()))?;
    Err(HttpError::no_such_response(&id))
}

/// Renames the field at fault to this API's `input`: the pipeline names it `messages` for any
/// conversation.
fn with_input_param(error: HttpError) -> HttpError {
    match error.param() {
        Some("messages" | "continue_final_message") => {
            let renamed = ApiError { param: Some("input".to_owned()), ..error.error };
            HttpError { error: renamed, ..error }
        }
        _ => error,
    }
}
