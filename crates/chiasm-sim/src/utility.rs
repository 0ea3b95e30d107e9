//! Methods that a frontend can call, as `_invoke_utility_method` in `vllm/v1/engine/core.py`.

use chiasm_engine::wire::Value;

use crate::intake::SharedReceiverCache;
use crate::scheduler::Scheduler;

/// What the methods work on.
pub(crate) struct Callee<'a> {
    pub(crate) scheduler: &'a mut Scheduler,
    pub(crate) receiver_cache: Option<&'a SharedReceiverCache>,
    pub(crate) now: f64,
}

impl Callee<'_> {
    /// Calls `method`.
    ///
    /// # Errors
    /// The text that vLLM answers, also for methods that it has and the simulator has not.
    pub(crate) fn call(&mut self, method: &str, args: &[Value]) -> Result<Value, String> {
        let parameters = match method {
            "reset_prefix_cache" => 2,
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
}
