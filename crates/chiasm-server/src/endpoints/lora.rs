//! `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`: there only where they are
//! allowed.

use std::sync::Arc;

use axum::extract::State;
use chiasm_api::openai::lora::{LoadRequest, UnloadRequest};
use chiasm_backend::AdapterError;
use chiasm_fleet::adapters::{AdapterSource, LoadError};

use crate::admission::Admitted;
use crate::endpoint_state::EndpointState;
use crate::error::HttpError;

/// `POST /v1/load_lora_adapter`: answers when all engines have the adapter.
pub(crate) async fn load(
    State(state): State<Arc<EndpointState>>,
    request: Admitted<LoadRequest>,
) -> Result<String, HttpError> {
    let LoadRequest { name, path, in_place } = request.body.request;
    let source = AdapterSource { name, path };
    if source.name == state.pipeline.model.name {
        return Err(told(LoadError::IsModel(source.name)));
    }
    let (fleet, name) = (state.pipeline.fleet.clone(), source.name.clone());
    // A client that goes away must not leave half of the engines with it.
    let loading = tokio::spawn(async move { fleet.load_adapter(source, in_place).await });
    loading.await.map_err(|error| HttpError::internal(error.to_string()))?.map_err(told)?;
    Ok(format!("Success: LoRA adapter '{name}' added successfully."))
}

/// `POST /v1/unload_lora_adapter`
pub(crate) async fn unload(
    State(state): State<Arc<EndpointState>>,
    request: Admitted<UnloadRequest>,
) -> Result<String, HttpError> {
    let UnloadRequest { name } = request.body.request;
    state.pipeline.fleet.unload_adapter(&name).await.map_err(told)?;
    Ok(format!("Success: LoRA adapter '{name}' removed successfully."))
}

/// As vLLM tells it, but that an adapter which engines refuse is the client's fault.
fn told(error: LoadError) -> HttpError {
    let message = error.to_string();
    let not_found = |param| HttpError::no_adapter(param, message.clone());
    match error {
        LoadError::NotLoaded(_) => not_found("lora_name"),
        LoadError::Engine(AdapterError::NotFound(_)) => not_found("lora_path"),
        LoadError::NoEngine | LoadError::Engine(AdapterError::Gone(_)) => {
            HttpError::unavailable("no_engine", message)
        }
        LoadError::Empty(field) => HttpError::invalid(field, message),
        LoadError::IsModel(_)
        | LoadError::IsLoaded(_)
        | LoadError::OfAgents(_)
        | LoadError::Full(_) => HttpError::invalid("lora_name", message),
        LoadError::Files { .. } | LoadError::Engine(_) => HttpError::invalid("lora_path", message),
    }
}
