//! The engine's loop, modelled on `EngineCoreProc.run_busy_loop` in `vllm/v1/engine/core.py`.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chiasm_engine::wire::{
    EngineCoreOutput, EngineCoreOutputs, FailureMessage, FinishReason, Utility, UtilityOutput,
};
use chiasm_kv::event::KvEventBatch;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::config::SimConfig;
use crate::group::Group;
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
use crate::utility::UtilityContext;
use crate::work::Work;

/// The duration of a step that has requests but can compute nothing. vLLM was measured at 7 500
/// such steps per second.
const IDLE_STEP: Duration = Duration::from_micros(133);
/// The minimum wait. Shorter waits accumulate, because the timer has a resolution of milliseconds.
const MIN_WAIT: Duration = Duration::from_millis(1);

/// The reason that the loop ended.
pub(crate) enum End {
    /// SIGTERM was received, and all work is done.
    Stopped,
    /// The engine died for this reason, and has sent ENGINE_CORE_DEAD.
    Died(String),
    /// [`Faults`](crate::Faults) ended the engine. They also decide whether the frontend is
    /// notified.
    Fault,
}

/// The state of the loop.
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
    /// `None` for an engine on its own.
    pub(crate) group: Option<Group>,
}

impl Core {
    /// Runs the loop until the engine ends.
    pub(crate) async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Work>) -> End {
        let mut pending = Vec::new();
        let mut stopping = false;
        let mut generated = 0;
        let mut free_at = Instant::now();
        loop {
            if !self.has_step() && pending.is_empty() {
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
            if !self.has_step() {
                continue;
            }

            let has_work = self.scheduler.has_work();
            let work = if has_work {
                match self.scheduler.schedule(self.time.now()) {
                    Ok(work) => work,
                    Err(Fatal(reason)) => return self.died(reason),
                }
            } else {
                StepWork::default()
            };
            free_at = free_at.max(Instant::now() - MIN_WAIT) + self.duration(&work);
            wait_until(free_at).await;
            if let Some(group) = &mut self.group
                && let Err(error) = group.step(self.scheduler.has_unfinished()).await
            {
                return self.died(format!("an engine of the group is gone: {error}"));
            }
            if !has_work {
                continue;
            }

            // Requests that were aborted meanwhile get no output of this step. The abort is
            // processed again later, because it may be for a request that arrives right before it.
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

    /// Checks the receiver cache's slots once more at the end. vLLM has no such check, but a slot
    /// that was overwritten must not pass unnoticed.
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

    /// Returns `true` if there is a step to take: for requests, or for those of other engines.
    fn has_step(&self) -> bool {
        self.scheduler.has_work() || self.group.as_ref().is_some_and(Group::is_running)
    }

    fn duration(&self, work: &StepWork) -> Duration {
        if self.group.is_some() && *work == StepWork::default() {
            // A step without requests costs as much as one with.
            return self.config.pace.step(&StepWork { decodes: 1, ..StepWork::default() });
        }
        if *work == StepWork::default() && self.scheduler.has_unfinished() {
            IDLE_STEP
        } else {
            self.config.pace.step(work)
        }
    }

    fn handle(&mut self, work: Work, stopping: &mut bool) -> Result<(), Fatal> {
        match work {
            Work::Add(sequence) | Work::WaitForPrompt(sequence) if *stopping => {
                self.send_aborted(sequence.client, vec![sequence.id])
            }
            Work::Add(sequence) => {
                if let Some(group) = &mut self.group {
                    group.on_request(sequence.wave);
                }
                // vLLM does this in the step that begins with the request, and also dies of an
                // unreadable adapter.
                if let (Some(loras), Some(lora)) = (&mut self.loras, &sequence.lora) {
                    loras.touch(lora).map_err(|error| Fatal(error.to_string()))?;
                }
                self.scheduler.add(*sequence, self.time.now())?;
            }
            Work::WaitForPrompt(sequence) => {
                self.scheduler.wait_for_prompt(*sequence, self.time.now())?;
            }
            Work::PromptFetched { id, found } => self.scheduler.prompt_fetched(&id, found),
            Work::ReleaseRetained(id) => self.scheduler.release_retained(id),
            Work::Abort(ids) => self.scheduler.abort(&ids),
            Work::Call(call) => self.call(&call, *stopping),
            Work::StartWave { wave, started_by } => {
                if let Some(group) = &mut self.group {
                    group.on_start(wave, started_by);
                }
            }
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
        let result = if stopping {
            Err(FailureMessage("Server shutting down".to_owned()))
        } else {
            UtilityContext {
                scheduler: &mut self.scheduler,
                loras: self.loras.as_mut(),
                receiver_cache: self.receiver_cache.as_ref(),
                plugin: self.plugin.as_ref(),
                now,
            }
            .call(&call.method, &call.args)
            .map_err(|error| FailureMessage(error.to_string()))
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

    /// Publishes one batch for a step that changed the cache.
    fn publish_kv_events(&mut self) {
        let events = self.scheduler.take_kv_events();
        if let Some(queue) = self.kv_events.as_ref().filter(|_| !events.is_empty()) {
            let timestamp =
                SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
            let data_parallel_rank = Some(u32::from(self.config.rank));
            // The publisher is gone only during shutdown.
            let _ = queue.send(KvEventBatch { timestamp, events, data_parallel_rank });
        }
    }
}

fn drain(inbox: &mut mpsc::UnboundedReceiver<Work>, pending: &mut Vec<Work>) {
    while let Ok(work) = inbox.try_recv() {
        pending.push(work);
    }
}

/// Waits until `moment`. Always yields to other tasks.
async fn wait_until(moment: Instant) {
    if moment.saturating_duration_since(Instant::now()) < MIN_WAIT {
        tokio::task::yield_now().await;
    } else {
        tokio::time::sleep_until(moment).await;
    }
}

fn tokens(messages: &[ClientOutputs]) -> u64 {
    let outputs = messages.iter().flat_map(|(_, message)| &message.outputs);
    outputs.map(|output| output.new_token_ids.len() as u64).sum()
}
