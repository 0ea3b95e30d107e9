//! LoRA adapters in an engine.
//!
//! An engine loads an adapter that it does not have when a request names it, within a step: if it
//! can't, it dies. So every adapter is loaded by a call first, whose failure is harmless, as vLLM's
//! frontend does it (`OpenAIServingModels.load_lora_adapter`).

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
    let Adapter { id, name, path } = adapter;
    LoraRequest { name: name.clone(), id: id.get(), path: path.clone() }
}

/// Loads an adapter that the engine may have already.
pub(super) async fn load(client: &EngineClient, adapter: &Adapter) -> Result<(), AdapterError> {
    if !client.info().supports_lora {
        return Err(AdapterError::NotEnabled);
    }
    let lora = request(adapter);
    if let Some(problem) = lora.problem() {
        return Err(AdapterError::Refused(problem.to_string()));
    }
    match client.utility("add_lora", vec![lora.to_value()], LOAD_TIMEOUT).await {
        // False says that it was there before.
        Ok(_) => Ok(()),
        Err(EngineError::Utility { message, .. }) => Err(refusal(message, adapter)),
        Err(EngineError::Dead { cause } | EngineError::NotSent { cause }) => {
            Err(AdapterError::Gone(cause.into()))
        }
        Err(error) => Err(AdapterError::Refused(error.to_string())),
    }
}

/// What an engine's words about an adapter mean.
fn refusal(message: String, adapter: &Adapter) -> AdapterError {
    // The text of `LoRAAdapterNotFoundError`, which vLLM's frontend looks for too.
    if message.contains("No adapter found for") {
        return AdapterError::NotFound(adapter.path.clone());
    }
    AdapterError::Refused(reason(&message).to_owned())
}

/// The words of whoever failed, without those of who passed them on: `_invoke_utility_method`, and
/// `MultiprocExecutor` where workers have processes of their own.
fn reason(message: &str) -> &str {
    let reason = message.split_once(" method failed: ").map_or(message, |(_, reason)| reason);
    let of_worker = reason.strip_prefix("Worker failed with error '");
    of_worker.and_then(|reason| Some(reason.rsplit_once("', please check")?.0)).unwrap_or(reason)
}

/// Makes room for others. What is not forgotten is what the engine lets go of first.
pub(super) async fn unload(client: &EngineClient, adapter: &Adapter) {
    if !client.info().supports_lora {
        return;
    }
    let forgotten =
        client.utility("remove_lora", vec![Value::from(adapter.id.get())], UNLOAD_TIMEOUT).await;
    if let Err(error) = forgotten {
        tracing::debug!(adapter = adapter.name, %error, "an engine keeps an adapter that nobody asks for");
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    #[test]
    fn an_engine_is_quoted_without_its_go_betweens() {
        let adapter =
            Adapter { id: NonZeroU32::MIN, name: "a@1".to_owned(), path: "/a".to_owned() };
        let of = |message: &str| refusal(message.to_owned(), &adapter).to_string();
        let rank = "LoRA rank 64 is greater than max_lora_rank 16.";
        let worker = "', please check the stack trace above for the root cause";
        assert_eq!(of(&format!("Call to add_lora method failed: {rank}")), rank);
        assert_eq!(
            of(&format!(
                "Call to add_lora method failed: Worker failed with error '{rank}{worker}"
            )),
            rank
        );
        assert_eq!(of("something else"), "something else");
        let missing =
            "Call to add_lora method failed: Loading lora a@1 failed: No adapter found for /a";
        assert_eq!(of(missing), "no adapter is found at '/a'");
    }
}
