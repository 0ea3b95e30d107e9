//! Methods that a frontend can call, as `_invoke_utility_method` in `vllm/v1/engine/core.py`.

use chiasm_engine::wire::{LoraRequest, Value};

use crate::intake::SharedReceiverCache;
use crate::loras::Loras;
use crate::plugin::Plugin;
use crate::scheduler::Scheduler;

/// What the methods work on.
pub(crate) struct Callee<'a> {
    pub(crate) scheduler: &'a mut Scheduler,
    /// `None` if adapters are not enabled.
    pub(crate) loras: Option<&'a mut Loras>,
    pub(crate) receiver_cache: Option<&'a SharedReceiverCache>,
    /// `None` if this is a vLLM without the plugin.
    pub(crate) plugin: Option<&'a Plugin>,
    pub(crate) now: f64,
}

impl Callee<'_> {
    /// Calls `method`.
    ///
    /// # Errors
    /// The text that vLLM answers, also for methods that it has and the simulator has not. Why an arena can't be attached is
    /// said in other words than the plugin's.
    pub(crate) fn call(&mut self, method: &str, args: &[Value]) -> Result<Value, String> {
        let parameters = match method {
            "reset_prefix_cache" => 2,
            "add_lora" | "remove_lora" => 1,
            "list_loras" => 0,
            "chiasm_attach" if self.plugin.is_some() => 1,
            "reset_mm_cache" | "reset_encoder_cache" | "get_supported_tasks" | "is_scheduler_paused" => 0,
            _ => {
                return Err(format!(
                    "Call to {method} method failed: 'EngineCoreProc' object has no attribute '{method}'"
                ));
            }
        };
        if args.len() > parameters {
            // An assertion without a text.
            return Err(format!("Call to {method} method failed: "));
        }
        if let ("chiasm_attach", Some(plugin)) = (method, self.plugin) {
            let attached = match args.first() {
                Some(name) => plugin.attach(name),
                None => Err("chiasm_attach() missing 1 required positional argument: 'name'".to_owned()),
            };
            return attached.map_err(|reason| format!("Call to {method} method failed: {reason}"));
        }
        if let "add_lora" | "remove_lora" | "list_loras" = method {
            let called = self.call_for_lora(method, args.first());
            return called.map_err(|reason| format!("Call to {method} method failed: {reason}"));
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

    fn call_for_lora(&mut self, method: &str, arg: Option<&Value>) -> Result<Value, String> {
        let loras = self.loras.as_deref_mut().ok_or("LoRA is not enabled. Use --enable-lora to enable LoRA.")?;
        Ok(match (method, arg) {
            ("add_lora", Some(lora)) => {
                loras.touch(&LoraRequest::from_value(lora)?)?;
                Value::from(true)
            }
            ("remove_lora", Some(id)) => Value::from(loras.remove(id.as_u64().unwrap_or(0))),
            ("list_loras", _) => Value::Array(loras.ids().map(Value::from).collect()),
            _ => return Err("missing 1 required positional argument".to_owned()),
        })
    }
}
