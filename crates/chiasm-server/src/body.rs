//! Parsing of complete request bodies as JSON.

use chiasm_api::openai::{Intake, RequestBody};
use chiasm_cpu::{CpuBudget, price};
use chiasm_media::Charge;
use chiasm_pipeline::RequestError;

use crate::arrival::ReceivedBody;
use crate::endpoint_state::EndpointState;
use crate::error::HttpError;

/// The largest body, in bytes, that is parsed on an async thread, in less than 200 µs. Larger
/// bodies are parsed on CPU threads.
const MAX_INLINE_BYTES: usize = 512 << 10;
/// The largest number of JSON values in a body that is parsed on an async thread. Each value takes
/// as long as a hundred bytes.
const MAX_INLINE_VALUES: u64 = 4096;

/// A parsed request body.
pub(crate) struct JsonBody<T> {
    pub(crate) request: T,
    /// The charge for the request's memory, until this is dropped.
    pub(crate) charge: Charge,
}

/// Parses a body.
pub(crate) async fn parse<T: RequestBody>(
    state: &EndpointState,
    cpu: &CpuBudget,
    body: ReceivedBody,
) -> Result<JsonBody<T>, HttpError> {
    let ReceivedBody { bytes, values } = body;
    let is_small = bytes.len() <= MAX_INLINE_BYTES && values <= MAX_INLINE_VALUES;
    let cost = price::json(bytes.len(), values);
    let mut intake = Intake::new(bytes, &state.body_limits, state.pipeline.media.budget());
    intake.template = state.pipeline.model.template.clone();
    let parsed =
        state.pipeline.cpu.run_inline_if(is_small, cpu, cost, move || T::parse(intake)).await;
    let (request, charge) = parsed.map_err(|error| RequestError::from(error).at("body"))??;
    Ok(JsonBody { request, charge })
}
