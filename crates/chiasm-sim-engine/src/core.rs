//! The engine's loop, as `EngineCoreProc.run_busy_loop` in `vllm/v1/engine/core.py`.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chiasm_engine::wire::{
    EngineCoreOutput, EngineCoreOutputs, FailureMessage, FinishReason, Utility, UtilityOutput,
};
use chiasm_kv::event::KvEventBatch;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::config::SimConfig;
use crate::intake::SharedReceiverCache;
use crate::item::Item;
use crate::loras::Loras;
use crate::moment_log::MomentLog;
use crate::monotonic_time::MonotonicTime;
use crate::outbox::Outbox;
use crate::pace::StepWork;
use crate::plugin::Plugin;
use crate::scheduler::{Fatal, Scheduler};
use crate::step_outputs::ClientOutputs;
use crate::utility::Callee;
use crate::work::Work;

/// A step that can compute nothing although requests are there. vLLM was measured at 7 500 of them
/// per second.
const IDLE_STEP: Duration = Duration::from_micros(133);
/// Shorter waits are saved up: the timer works in milliseconds.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// Why the loop ended.
pub(crate) enum End {
    /// SIGTERM, and everything is done.
    Stopped,
    /// The frontend was told ENGINE_CORE_DEAD because of this.
    Died(String),
    /// [`Faults`](crate::Faults) demanded it. Whether the frontend is told is up to them, too.
    Fault,
}

/// Everything that the loop works on.
pub(crate) struct Core {
    pub(crate) config: Arc<SimConfig>,
    pub(crate) scheduler: Scheduler,
    /// `None` if adapters are not enabled.
    pub(crate) loras: Option<Loras>,
    pub(crate) receiver_cache: Option<SharedReceiverCache>,
    pub(crate) plugin: Option<Plugin>,
    pub(crate) time: MonotonicTime,
    pub(crate) outbox: Outbox,
    pub(crate) kv_events: Option<mpsc::UnboundedSender<KvEventBatch>>,
    pub(crate) step_log: Option<MomentLog>,
}

impl Core {
    /// Runs until the engine ends.
    pub(crate) async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Work>) -> End {
        let mut pending = Vec::new();
        let mut stopping = false;
        let mut generated = 0;
        let mut free_at = Instant::now();
        loop {
            if !self.scheduler.has_work() && pending.is_empty() {
                if stopping {
                    return self.stopped();
                }
                match inbox.recv().await {
                    Some(work) => pending.push(work),
                    None => return End::Stopped,
                }
                free_at = Instant::now();
            }
            drain(&mut inbox, &mut pending);
            for work in pending.drain(..) {
                if let Err(Fatal(reason)) = self.handle(work, &mut stopping) {
                    return self.died(reason);
                }
            }
            if !self.scheduler.has_work() {
                continue;
            }

            let work = match self.scheduler.schedule(self.time.now()) {
                Ok(work) => work,
                Err(Fatal(reason)) => return self.died(reason),
            };
            free_at = free_at.max(Instant::now() - SHORTEST_WAIT) + self.duration(&work);
            wait_until(free_at).await;

            // What was aborted meanwhile gets no output of this step. The abort is kept for its
            // turn as well: it may be for a request that comes right before it.
            drain(&mut inbox, &mut pending);
            for work in &pending {
                if let Work::Abort(ids) = work {
                    self.scheduler.abort(ids);
                }
            }
            let messages = self.scheduler.update(self.time.now());
            generated += tokens(&messages);
            if self.config.faults.die_after_tokens.is_some_and(|limit| generated > limit) {
                return End::Fault;
            }
            self.publish_kv_events();
            let has_outputs = messages.iter().any(|(_, outputs)| !outputs.outputs.is_empty());
            for (client, outputs) in messages {
                self.outbox.send(client, outputs);
            }
            if let Some(log) = self.step_log.as_ref().filter(|_| has_outputs) {
                log.write(SystemTime::now());
            }
        }
    }

    /// The last look at what the receiver cache holds. No vLLM takes one, but what was written to
    /// must not pass unnoticed.
    fn stopped(&self) -> End {
        let Some(cache) = &self.receiver_cache else {
            return End::Stopped;
        };
        let cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
        match cache.values().try_for_each(Item::check) {
            Ok(()) => End::Stopped,
            Err(overwritten) => self.died(overwritten.to_string()),
        }
    }

    fn died(&self, reason: String) -> End {
        self.outbox.send_dead();
        End::Died(reason)
    }

    fn duration(&self, work: &StepWork) -> Duration {
        match *work == StepWork::default() && self.scheduler.has_unfinished() {
            true => IDLE_STEP,
            false => self.config.pace.step(work),
        }
    }

    fn handle(&mut self, work: Work, stopping: &mut bool) -> Result<(), Fatal> {
        match work {
            Work::Add(sequence) | Work::Await(sequence) if *stopping => {
                self.send_aborted(sequence.client, vec![sequence.id])
            }
            Work::Add(sequence) => {
                // Within the step that begins with it, in vLLM; it dies of what it can't read, too.
                if let (Some(loras), Some(lora)) = (&mut self.loras, &sequence.lora) {
                    loras.touch(lora).map_err(|error| Fatal(error.to_string()))?;
                }
                self.scheduler.add(*sequence, self.time.now())?;
            }
            Work::Await(sequence) => self.scheduler.wait_for_prompt(*sequence, self.time.now())?,
            Work::Given(id, is_given) => self.scheduler.given(&id, is_given),
            Work::LetGo(number) => self.scheduler.let_go(number),
            Work::Abort(ids) => self.scheduler.abort(&ids),
            Work::Call(call) => self.call(&call, *stopping),
            Work::Die(reason) => return Err(Fatal(reason)),
            Work::Stop => {
                *stopping = true;
                for (client, ids) in self.scheduler.abort_all() {
                    self.send_aborted(client, ids);
                }
            }
        }
        Ok(())
    }

    fn call(&mut self, call: &Utility, stopping: bool) {
        let now = self.time.now();
        let result = match stopping {
            true => Err(FailureMessage("Server shutting down".to_owned())),
            false => {
                let (receiver_cache, plugin) = (self.receiver_cache.as_ref(), self.plugin.as_ref());
                let loras = self.loras.as_mut();
                Callee { scheduler: &mut self.scheduler, loras, receiver_cache, plugin, now }
                    .call(&call.method, &call.args)
                    .map_err(|error| FailureMessage(error.to_string()))
            }
        };
        let utility_output = Some(UtilityOutput { call_id: call.call_id, result });
        let outputs =
            EngineCoreOutputs { utility_output, timestamp: now, ..EngineCoreOutputs::default() };
        self.outbox.send(call.client_index, outputs);
    }

    fn send_aborted(&self, client: u32, ids: Vec<String>) {
        let output = |id: &String| EngineCoreOutput {
            request_id: id.clone(),
            finish_reason: Some(FinishReason::Abort),
            ..EngineCoreOutput::default()
        };
        let outputs = EngineCoreOutputs {
            outputs: ids.iter().map(output).collect(),
            finished_requests: ids,
            timestamp: self.time.now(),
            ..EngineCoreOutputs::default()
        };
        self.outbox.send(client, outputs);
    }

    /// One batch per step that changed the cache.
    fn publish_kv_events(&mut self) {
        let events = self.scheduler.take_kv_events();
        if let Some(queue) = self.kv_events.as_ref().filter(|_| !events.is_empty()) {
            let timestamp =
                SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
            let data_parallel_rank = Some(u32::from(self.config.rank));
            // The other end is gone only while everything is being torn down.
            let _ = queue.send(KvEventBatch { timestamp, events, data_parallel_rank });
        }
    }
}

fn drain(inbox: &mut mpsc::UnboundedReceiver<Work>, pending: &mut Vec<Work>) {
    while let Ok(work) = inbox.try_recv() {
        pending.push(work);
    }
}

/// Lets the other tasks run in any case.
async fn wait_until(moment: Instant) {
    if moment.saturating_duration_since(Instant::now()) < SHORTEST_WAIT {
        tokio::task::yield_now().await;
    } else {
        tokio::time::sleep_until(moment).await;
    }
}

fn tokens(messages: &[ClientOutputs]) -> u64 {
    let outputs = messages.iter().flat_map(|(_, message)| &message.outputs);
    outputs.map(|output| output.new_token_ids.len() as u64).sum()
}
