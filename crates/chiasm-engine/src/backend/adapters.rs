//! LoRA adapters in an engine.
//!
//! An engine loads an unknown adapter within a step when a request names it, and dies if that
//! fails. So every adapter is first loaded by a method call, whose failure is harmless. vLLM's
//! frontend does the same (`OpenAIServingModels.load_lora_adapter`).

use std::time::Duration;

use chiasm_backend::{Adapter, AdapterError};

use crate::EngineClient;
use crate::error::EngineError;
use crate::wire::{LoraRequest, Value};

/// The timeout for loading an adapter. The engine reads it from disk between two steps.
const LOAD_TIMEOUT: Duration = Duration::from_secs(300);

/// The timeout for unloading an adapter.
const UNLOAD_TIMEOUT: Duration = Duration::from_secs(60);

/// Converts an adapter to its form on the wire.
pub(super) fn to_lora_request(adapter: &Adapter) -> LoraRequest {
    let Adapter { id, name, path } = adapter;
    LoraRequest { name: name.clone(), id: id.get(), path: path.clone() }
}

/// Loads an adapter, which the engine may have already.
pub(super) async fn load(client: &EngineClient, adapter: &Adapter) -> Result<(), AdapterError> {
    if !client.info().supports_lora {
        return Err(AdapterError::NotEnabled);
    }
    let lora = to_lora_request(adapter);
    if let Err(error) = lora.validate() {
        return Err(AdapterError::Refused(error.to_string()));
    }
    match client.utility("add_lora", vec![lora.to_value()], LOAD_TIMEOUT).await {
        // The result is false if the adapter was loaded already.
        Ok(_) => Ok(()),
        Err(EngineError::Utility { message, .. }) => Err(refusal(message, adapter)),
        Err(EngineError::Dead { cause } | EngineError::NotSent { cause }) => {
            Err(AdapterError::Gone(cause.into()))
        }
        Err(error) => Err(AdapterError::Refused(error.to_string())),
    }
}

/// Converts an engine's message about an adapter to an error.
fn refusal(message: String, adapter: &Adapter) -> AdapterError {
    // The text of `LoRAAdapterNotFoundError`, for which vLLM's frontend searches too.
    if message.contains("No adapter found for") {
        return AdapterError::NotFound(adapter.path.clone());
    }
    AdapterError::Refused(reason(&message).to_owned())
}

/// Extracts the original error from a message, without the text that `_invoke_utility_method` adds,
/// or `MultiprocExecutor` if workers run in their own processes.
fn reason(message: &str) -> &str {
    let reason = message.split_once(" method failed: ").map_or(message, |(_, reason)| reason);
    let worker_error = reason.strip_prefix("Worker failed with error '");
    worker_error.and_then(|error| Some(error.rsplit_once("', please check")?.0)).unwrap_or(reason)
}

/// Unloads an adapter to make room for others. If that fails, the engine evicts it later.
pub(super) async fn unload(client: &EngineClient, adapter: &Adapter) {
    if !client.info().supports_lora {
        return;
    }
    let args = vec![Value::from(adapter.id.get())];
    if let Err(error) = client.utility("remove_lora", args, UNLOAD_TIMEOUT).await {
        tracing::debug!(
            adapter = adapter.name,
            %error,
            "can't unload an adapter, the engine keeps it until it needs the room"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    #[test]
    fn refusal_has_only_the_original_error() {
        let adapter =
            Adapter { id: NonZeroU32::MIN, name: "a@1".to_owned(), path: "/a".to_owned() };
        let text = |message: &str| refusal(message.to_owned(), &adapter).to_string();
        let rank = "LoRA rank 64 is greater than max_lora_rank 16.";
        let worker = "', please check the stack trace above for the root cause";
        assert_eq!(text(&format!("Call to add_lora method failed: {rank}")), rank);
        let from_worker =
            format!("Call to add_lora method failed: Worker failed with error '{rank}{worker}");
        assert_eq!(text(&from_worker), rank);
        assert_eq!(text("something else"), "something else");
        let missing =
            "Call to add_lora method failed: Loading lora a@1 failed: No adapter found for /a";
        assert_eq!(text(missing), "no adapter found at '/a'");
    }
}
