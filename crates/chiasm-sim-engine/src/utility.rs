//! The methods that a frontend can call, modelled on `_invoke_utility_method` in
//! `vllm/v1/engine/core.py`.

use chiasm_engine::wire::{LoraError, LoraRequest, Value};

use crate::intake::SharedReceiverCache;
use crate::loras::{LoraReadError, Loras};
use crate::plugin::{AttachError, Plugin};
use crate::scheduler::Scheduler;

/// The state that the methods work on.
pub(crate) struct UtilityContext<'a> {
    pub(crate) scheduler: &'a mut Scheduler,
    /// `None` if adapters are not enabled.
    pub(crate) loras: Option<&'a mut Loras>,
    pub(crate) receiver_cache: Option<&'a SharedReceiverCache>,
    /// `None` for a vLLM without the plugin.
    pub(crate) plugin: Option<&'a Plugin>,
    pub(crate) now: f64,
}

/// An error of a call, with the message of vLLM's `_invoke_utility_method`.
#[derive(Debug, thiserror::Error)]
#[error("Call to {method} method failed: {problem}")]
pub(crate) struct CallError {
    method: String,
    problem: CallProblem,
}

/// The exception of a failed method. The message of a failed attach differs from the plugin's.
#[derive(Debug, thiserror::Error)]
enum CallProblem {
    #[error("'EngineCoreProc' object has no attribute '{0}'")]
    NoMethod(String),
    /// An assertion without a message.
    #[error("")]
    TooManyArguments,
    #[error("chiasm_attach() missing 1 required positional argument: 'name'")]
    NoArenaName,
    #[error("missing 1 required positional argument")]
    MissingArgument,
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error("LoRA is not enabled. Use --enable-lora to enable LoRA.")]
    LoraDisabled,
    #[error(transparent)]
    LoraRequest(#[from] LoraError),
    #[error(transparent)]
    LoraRead(#[from] LoraReadError),
}

impl UtilityContext<'_> {
    /// Calls `method`.
    ///
    /// # Errors
    ///
    /// Returns [`CallError`] if the method fails, or if the simulator does not have it.
    pub(crate) fn call(&mut self, method: &str, args: &[Value]) -> Result<Value, CallError> {
        self.invoke(method, args)
            .map_err(|problem| CallError { method: method.to_owned(), problem })
    }

    fn invoke(&mut self, method: &str, args: &[Value]) -> Result<Value, CallProblem> {
        let parameters = match method {
            "reset_prefix_cache" => 2,
            "add_lora" | "remove_lora" => 1,
            "list_loras" => 0,
            "chiasm_attach" if self.plugin.is_some() => 1,
            "reset_mm_cache"
            | "reset_encoder_cache"
            | "get_supported_tasks"
            | "is_scheduler_paused" => 0,
            _ => return Err(CallProblem::NoMethod(method.to_owned())),
        };
        if args.len() > parameters {
            return Err(CallProblem::TooManyArguments);
        }
        if let ("chiasm_attach", Some(plugin)) = (method, self.plugin) {
            return Ok(plugin.attach(args.first().ok_or(CallProblem::NoArenaName)?)?);
        }
        if let "add_lora" | "remove_lora" | "list_loras" = method {
            return self.call_for_lora(method, args.first());
        }
        Ok(match method {
            "reset_mm_cache" => {
                if let Some(cache) = self.receiver_cache {
                    cache.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clear();
                }
                Value::Nil
            }
            "reset_encoder_cache" => {
                self.scheduler.reset_encoder_cache();
                Value::Nil
            }
            "reset_prefix_cache" => {
                let preempt = args.first().and_then(Value::as_bool).unwrap_or(false);
                Value::from(self.scheduler.reset_prefix_cache(preempt, self.now))
            }
            "get_supported_tasks" => Value::Array(vec![Value::from("generate")]),
            _ => Value::from(false),
        })
    }

    fn call_for_lora(&mut self, method: &str, arg: Option<&Value>) -> Result<Value, CallProblem> {
        let loras = self.loras.as_deref_mut().ok_or(CallProblem::LoraDisabled)?;
        Ok(match (method, arg) {
            ("add_lora", Some(lora)) => {
                loras.touch(&LoraRequest::from_value(lora)?)?;
                Value::from(true)
            }
            ("remove_lora", Some(id)) => Value::from(loras.remove(id.as_u64().unwrap_or(0))),
            ("list_loras", _) => Value::Array(loras.ids().map(Value::from).collect()),
            _ => return Err(CallProblem::MissingArgument),
        })
    }
}
