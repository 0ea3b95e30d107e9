//! LoRA adapters in an engine.
//!
//! An engine loads an adapter that it does not have when a request names it, within a step: if it can't, it dies. So every adapter is
//! loaded by a call first, whose failure is harmless, as vLLM's frontend does it (`OpenAIServingModels.load_lora_adapter`).

use std::time::Duration;

use chiasm_backend::{Adapter, AdapterError};

use crate::EngineClient;
use crate::error::EngineError;
use crate::wire::{LoraRequest, Value};

/// How long an engine may take to load an adapter, which it reads from disk between two steps.
const LOAD_TIMEOUT: Duration = Duration::from_secs(300);

/// How long an engine may take to forget one.
const UNLOAD_TIMEOUT: Duration = Duration::from_secs(60);

/// What an engine is told of an adapter.
pub(super) fn request(adapter: &Adapter) -> LoraRequest {
    let Adapter { id, name, path, is_3d } = adapter;
    LoraRequest { name: name.clone(), id: id.get(), path: path.clone(), is_3d: *is_3d }
}

/// Loads an adapter that the engine may have already.
pub(super) async fn load(client: &EngineClient, adapter: &Adapter) -> Result<(), AdapterError> {
    if !client.info().supports_lora {
        return Err(AdapterError::NotEnabled);
    }
    let lora = request(adapter);
    if let Some(problem) = lora.problem() {
        return Err(AdapterError::Refused(problem.to_owned()));
    }
    match client.utility("add_lora", vec![lora.to_value()], LOAD_TIMEOUT).await {
        // False says that it was there before.
        Ok(_) => Ok(()),
        Err(EngineError::Utility { message, .. }) => Err(refusal(message, adapter)),
        Err(EngineError::Dead { cause } | EngineError::NotSent { cause }) => Err(AdapterError::Gone(cause.into())),
        Err(error) => Err(AdapterError::Refused(error.to_string())),
    }
}

/// What an engine's words about an adapter mean.
fn refusal(message: String, adapter: &Adapter) -> AdapterError {
    // The text of `LoRAAdapterNotFoundError`, which vLLM's frontend looks for too.
    if message.contains("No adapter found for") {
        return AdapterError::NotFound(adapter.path.clone());
    }
    let reason = message.split_once("method failed: ").map(|(_, reason)| reason.to_owned());
    AdapterError::Refused(reason.unwrap_or(message))
}

/// Makes room for others. What is not forgotten is what the engine lets go of first.
pub(super) async fn unload(client: &EngineClient, adapter: &Adapter) {
    if !client.info().supports_lora {
        return;
    }
    let forgotten = client.utility("remove_lora", vec![Value::from(adapter.id.get())], UNLOAD_TIMEOUT).await;
    if let Err(error) = forgotten {
        tracing::debug!(adapter = adapter.name, %error, "an engine keeps an adapter that nobody asks for");
    }
}
