//! One worker's keeper: connects a backend, serves until the backend ends, and reconnects.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{
    Backend, BackendLifecycle, Capabilities, ConnectError, Connected, Connector, DeathReason,
    KvSource, Load,
};
use chiasm_router::EngineStats;
use chiasm_types::WorkerId;
use futures_util::FutureExt;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use crate::Fleet;
use crate::backoff::Backoff;
use crate::condition::{Condition, ConditionTracker};
use crate::events::{self, Following};
use crate::loaded::LoadedAdapters;

/// The reason for the end of a backend.
#[derive(Debug, thiserror::Error)]
enum EndReason {
    #[error("shutting down")]
    Shutdown,
    #[error("{0}")]
    NotConnected(#[from] ConnectError),
    #[error("{0}")]
    Died(DeathReason),
    #[error("the worker's keeper panicked; the log has the panic")]
    Panicked,
}

/// Keeps a worker connected until it is removed or the fleet is shut down.
pub(crate) async fn keep(
    fleet: Arc<Fleet>,
    id: WorkerId,
    connector: Box<dyn Connector>,
    mut shutdown: watch::Receiver<bool>,
) {
    let mut backoff = Backoff::new(connector.max_retry_pause());
    loop {
        let mut ready_at = None;
        let run = run_backend(&fleet, id, connector.as_ref(), &mut shutdown, &mut ready_at);
        let reason = AssertUnwindSafe(run).catch_unwind().await.unwrap_or_else(|_| {
            // Dropping the future has ended the backend.
            fleet.remove_ended(id, &EndReason::Panicked, connector.as_ref());
            EndReason::Panicked
        });
        if matches!(reason, EndReason::Shutdown) {
            break;
        }
        let pause = backoff.pause_after(ready_at.map_or(Duration::ZERO, |at| at.elapsed()));
        tracing::info!(
            worker = %id,
            seconds = pause.as_secs_f64(),
            "reconnecting after a pause"
        );
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = shutdown.wait_for(|&down| down) => break,
        }
    }
    fleet.metrics.forget(id);
    if let Some(callback) = fleet.on_departure.get() {
        callback(id);
    }
    fleet.adapters.set_preloaded(id, Vec::new());
}

impl Fleet {
    /// Removes a worker whose backend ended. Logs and counts the loss of an engine.
    fn remove_ended(&self, id: WorkerId, reason: &EndReason, connector: &dyn Connector) {
        let worker = self.worker(id);
        let what = worker.map_or_else(|| connector.describe(), |worker| worker.description.clone());
        self.leave(id);
        match reason {
            EndReason::Shutdown => return,
            EndReason::NotConnected(_) => {
                tracing::error!(worker = %id, what, cause = %reason, "engine not connected");
            }
            EndReason::Died(_) | EndReason::Panicked => {
                tracing::error!(worker = %id, what, cause = %reason, "engine lost");
            }
        }
        // An engine that dies while it starts is counted, too.
        self.metrics.engine_died(id);
    }
}

/// Runs one backend from its connection to its end. Sets `ready_at` when the backend accepts jobs.
async fn run_backend(
    fleet: &Arc<Fleet>,
    id: WorkerId,
    connector: &dyn Connector,
    shutdown: &mut watch::Receiver<bool>,
    ready_at: &mut Option<Instant>,
) -> EndReason {
    let mut lifecycle = None;
    let mut following = None;
    let reason = tokio::select! {
        // The shutdown takes precedence: a backend that it ends is not a lost engine.
        biased;
        _ = shutdown.wait_for(|&down| down) => EndReason::Shutdown,
        Err(reason) = serve(fleet, id, connector, &mut lifecycle, &mut following, ready_at) => {
            reason
        }
    };
    if let Some(death) = fleet.abort_reason.get()
        && let Some(worker) = fleet.worker(id)
    {
        worker.backend.declare_dead(death.clone());
    }
    // Only at the shutdown of the fleet: a worker that is removed alone saves nothing for the next
    // process.
    let is_fleet_shutdown = matches!(reason, EndReason::Shutdown) && *fleet.shutdown.borrow();
    if is_fleet_shutdown
        && lifecycle.as_ref().is_some_and(|lifecycle| lifecycle.survives_detach())
        && let Some(worker) = fleet.worker(id)
        && let Some(following) = following.take()
    {
        following.keep(fleet, &worker).await;
    }
    drop(following);
    // Out of the router before it stops, so that no request is sent to a stopping backend.
    fleet.remove_ended(id, &reason, connector);
    match (lifecycle, &reason) {
        (Some(lifecycle), EndReason::Shutdown) => lifecycle.detach().await,
        (Some(lifecycle), _) => lifecycle.stop().await,
        (None, _) => {}
    }
    reason
}

/// Connects one backend, joins its worker to the fleet and follows it until it ends.
async fn serve(
    fleet: &Arc<Fleet>,
    id: WorkerId,
    connector: &dyn Connector,
    lifecycle: &mut Option<Box<dyn BackendLifecycle>>,
    following: &mut Option<Following>,
    ready_at: &mut Option<Instant>,
) -> Result<Infallible, EndReason> {
    let started = Instant::now();
    tracing::info!(worker = %id, what = connector.describe(), "connecting");
    let connected: Connected = connector.connect(id, fleet.metrics.media.clone()).await?;
    let backend: Arc<dyn Backend> = connected.backend;
    let lifecycle = lifecycle.insert(connected.lifecycle);
    let capabilities = backend.capabilities();
    if let KvSource::Unknown { why } = &capabilities.kv {
        tracing::warn!(
            worker = %id, why,
            "approximate mode: the worker is presumed to hold the prompts that it was sent"
        );
    }
    fleet.adapters.set_preloaded(id, capabilities.adapters.values().cloned().collect());
    let loaded = Arc::new(LoadedAdapters::default());
    loaded.load_all(id, backend.as_ref(), &fleet.adapters).await;
    let worker = fleet.join(id, connector.describe(), backend.clone(), loaded.clone());
    let following = following.insert(events::follow(fleet, &worker).await);
    let router = fleet.router.clone();
    let load_sender = worker.load.clone();
    backend.follow_load(Box::new(move |load| {
        load_sender.send_replace(load);
        let Load { running, waiting, kv_usage, pending_tokens_of_others, draining, media: _ } =
            load;
        router.set_stats(
            id,
            EngineStats { running, waiting, kv_usage, pending_tokens_of_others, draining },
        );
    }));
    *ready_at = Some(Instant::now());
    // Again: `Fleet::load_adapter` did not see this worker before it joined.
    loaded.load_all(id, backend.as_ref(), &fleet.adapters).await;
    let context = Some(capabilities.max_model_len);
    let context = context.filter(|tokens| *tokens < Capabilities::UNLIMITED_TOKENS);
    tracing::info!(
        worker = %id,
        seconds = started.elapsed().as_secs_f64(),
        engine = capabilities.engine,
        blocks = capabilities.total_blocks,
        block_size = capabilities.class.block_size.get(),
        context,
        hand_off = ?capabilities.hand_off,
        "ready"
    );
    let mut distrusted = backend.distrusted().fuse();
    let mut condition = ConditionTracker::new(fleet.patience);
    let mut checks = tokio::time::interval(fleet.patience.check_interval());
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            death = backend.ended() => return Err(EndReason::Died(death)),
            death = lifecycle.ended() => {
                // The end of the process may be seen before that of its sockets. Requests in flight
                // end now.
                backend.declare_dead(death.clone());
                return Err(EndReason::Died(death));
            }
            why = &mut distrusted => {
                tracing::warn!(
                    worker = %id, why,
                    "knowledge of the worker's KV cache is now approximate"
                );
                fleet.metrics.distrusted(id);
                following.distrust(&fleet.router, id);
                continue;
            }
            () = worker.breaker_pause_ended() => {
                fleet.half_open(&worker);
                continue;
            }
            _ = checks.tick() => {}
        }
        let activity = if condition.needs_activity() { lifecycle.activity().await } else { None };
        let silent = backend.silent_for();
        let now = condition.update(silent, activity);
        fleet.set_condition(id, now);
        // Only if an earlier check found it silent, too.
        if !matches!(now, Condition::Answers)
            && let Some(limit) = lifecycle.max_silence()
            && silent >= limit
        {
            let death = DeathReason::new(format!("it was silent for {} s", silent.as_secs()));
            backend.declare_dead(death.clone());
            return Err(EndReason::Died(death));
        }
    }
}
