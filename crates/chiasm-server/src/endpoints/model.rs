//! The model that a request names.

use std::sync::Arc;

use chiasm_fleet::adapters::ServedAdapter;
use chiasm_pipeline::Pipeline;

use crate::error::HttpError;

/// A request names the served model, none, or a LoRA adapter.
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
