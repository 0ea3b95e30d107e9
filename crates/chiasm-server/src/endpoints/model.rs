//! The model that a request names.

use std::sync::Arc;

use chiasm_fleet::adapters::ServedAdapter;
use chiasm_pipeline::Pipeline;

use crate::error::HttpError;

/// Returns the LoRA adapter that a request names; `None` if it names the served model or no model.
///
/// # Errors
/// Fails if the name is neither the model's nor an adapter's.
pub(crate) fn find_model(
    pipeline: &Pipeline,
    model: Option<&str>,
) -> Result<Option<Arc<ServedAdapter>>, HttpError> {
    match model {
        Some(model) if *model != pipeline.model.name => {
            let adapter = pipeline.fleet.adapters().get(model);
            adapter.map(Some).ok_or_else(|| HttpError::no_such_model(model, &pipeline.model.name))
        }
        _ => Ok(None),
    }
}
