//! `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`: there only where they are allowed.

use std::sync::Arc;

use axum::extract::State;
use chiasm_backend::AdapterError;

use crate::adapters::LoadError;
use crate::admission::Admitted;
use crate::error::ApiError;
use crate::frontend::Frontend;
use crate::openai::lora::{LoadRequest, UnloadRequest};

/// `POST /v1/load_lora_adapter`: answers when all engines have the adapter.
pub(crate) async fn load(
    State(frontend): State<Arc<Frontend>>,
    request: Admitted<LoadRequest>,
) -> Result<String, ApiError> {
    let LoadRequest { source, in_place } = request.body.request;
    if source.name == frontend.pipeline.model.name {
        return Err(told(LoadError::IsModel(source.name)));
    }
    let (fleet, name) = (frontend.pipeline.fleet.clone(), source.name.clone());
    // A client that goes away must not leave half of the engines with it.
    let loading = tokio::spawn(async move { fleet.load_adapter(source, in_place).await });
    loading.await.map_err(|error| ApiError::internal(error.to_string()))?.map_err(told)?;
    Ok(format!("Success: LoRA adapter '{name}' added successfully."))
}

/// `POST /v1/unload_lora_adapter`
pub(crate) async fn unload(
    State(frontend): State<Arc<Frontend>>,
    request: Admitted<UnloadRequest>,
) -> Result<String, ApiError> {
    let UnloadRequest { name } = request.body.request;
    frontend.pipeline.fleet.unload_adapter(&name).await.map_err(told)?;
    Ok(format!("Success: LoRA adapter '{name}' removed successfully."))
}

/// As vLLM tells it, but that an adapter which engines refuse is the client's fault.
fn told(error: LoadError) -> ApiError {
    let message = error.to_string();
    let not_found = |param| ApiError::no_adapter(param, message.clone());
    match error {
        LoadError::NotLoaded(_) => not_found("lora_name"),
        LoadError::Engine(AdapterError::NotFound(_)) => not_found("lora_path"),
        LoadError::NoEngine | LoadError::Engine(AdapterError::Gone(_)) => ApiError::unavailable("no_engine", message),
        LoadError::Empty(field) => ApiError::invalid(field, message),
        LoadError::IsModel(_) | LoadError::IsLoaded(_) | LoadError::OfAgents(_) | LoadError::Full(_) => {
            ApiError::invalid("lora_name", message)
        }
        LoadError::Files { .. } | LoadError::Engine(_) => ApiError::invalid("lora_path", message),
    }
}
