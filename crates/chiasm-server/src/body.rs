//! Request bodies that have arrived, understood as JSON.

use chiasm_api::openai::{Intake, RequestBody};
use chiasm_media::Charge;
use chiasm_pipeline::RequestError;
use chiasm_pipeline::cpu::{CpuBudget, price};

use crate::arrival::Arrived;
use crate::endpoint_state::EndpointState;
use crate::error::HttpError;

/// Bodies up to this size are parsed at once, in less than 200 µs. Bigger ones are parsed off the
/// async threads.
const SMALL: usize = 512 << 10;
/// And those with many values, each of which takes as long as a hundred bytes.
const FEW_VALUES: u64 = 4096;

/// A body that has been understood.
pub(crate) struct JsonBody<T> {
    pub(crate) request: T,
    /// The request's memory, counted until this is dropped.
    pub(crate) charge: Charge,
}

/// Understands a body that has arrived.
pub(crate) async fn parse<T: RequestBody>(
    state: &EndpointState,
    cpu: &CpuBudget,
    body: Arrived,
) -> Result<JsonBody<T>, HttpError> {
    let Arrived { bytes, values } = body;
    let small = bytes.len() <= SMALL && values <= FEW_VALUES;
    let cost = price::json(bytes.len(), values);
    let mut intake = Intake::new(bytes, &state.body_limits, state.pipeline.media.budget());
    intake.template = state.pipeline.model.template.clone();
    let parsed = state.pipeline.cpu.run_or_here(small, cpu, cost, move || T::parse(intake)).await;
    let (request, charge) = parsed.map_err(|error| RequestError::from(error).at("body"))??;
    Ok(JsonBody { request, charge })
}
