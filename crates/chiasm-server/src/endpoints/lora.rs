//! `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, which exist only where they are
//! allowed.

use std::sync::Arc;

use axum::extract::State;
use chiasm_api::openai::lora::{LoadRequest, UnloadRequest};
use chiasm_backend::AdapterError;
use chiasm_fleet::adapters::{AdapterSource, LoadError};

use crate::admission::Admitted;
use crate::endpoint_state::EndpointState;
use crate::error::HttpError;

/// `POST /v1/load_lora_adapter`: responds when all engines have loaded the adapter.
pub(crate) async fn load(
    State(state): State<Arc<EndpointState>>,
    request: Admitted<LoadRequest>,
) -> Result<String, HttpError> {
    let LoadRequest { name, path, in_place } = request.body.request;
    let source = AdapterSource { name, path };
    if source.name == state.pipeline.model.name {
        return Err(to_http(LoadError::IsModel(source.name)));
    }
    let fleet = state.pipeline.fleet.clone();
    let name = source.name.clone();
    // Spawned, so that a disconnect does not leave the adapter in only half of the engines.
    let loading = tokio::spawn(async move { fleet.load_adapter(source, in_place).await });
    loading.await.map_err(|error| HttpError::internal(error.to_string()))?.map_err(to_http)?;
    Ok(format!("Success: LoRA adapter '{name}' added successfully."))
}

/// `POST /v1/unload_lora_adapter`
pub(crate) async fn unload(
    State(state): State<Arc<EndpointState>>,
    request: Admitted<UnloadRequest>,
) -> Result<String, HttpError> {
    let UnloadRequest { name } = request.body.request;
    state.pipeline.fleet.unload_adapter(&name).await.map_err(to_http)?;
    Ok(format!("Success: LoRA adapter '{name}' removed successfully."))
}

/// Converts an error as vLLM does, except that an adapter refused by engines is a client error.
fn to_http(error: LoadError) -> HttpError {
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
        | LoadError::OwnedByAgents(_)
        | LoadError::Full(_) => HttpError::invalid("lora_name", message),
        LoadError::Files { .. } | LoadError::Engine(_) => HttpError::invalid("lora_path", message),
    }
}
