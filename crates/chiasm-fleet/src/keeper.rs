//! One worker's keeper: connects to its backend, joins it, follows it, replaces it.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{Backend, ConnectError, Connected, Connector, Death, KvSource, Life, Load};
use chiasm_router::EngineStats;
use chiasm_types::WorkerId;
use futures_util::FutureExt;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use crate::Fleet;
use crate::backoff::Backoff;
use crate::condition::Watch;
use crate::events::{self, Following};
use crate::loaded::Loaded;

/// Why a backend's turn ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("shutting down")]
    Shutdown,
    #[error("{0}")]
    NotConnected(#[from] ConnectError),
    #[error("{0}")]
    Died(Death),
    #[error("its keeper panicked; the log says how")]
    Panicked,
}

/// Keeps worker `id` running until the fleet is shut down.
pub(crate) async fn keep(
    fleet: Arc<Fleet>,
    id: WorkerId,
    connector: Box<dyn Connector>,
    mut shutdown: watch::Receiver<bool>,
) {
    let mut backoff = Backoff::new(connector.longest_pause());
    loop {
        let mut ready = None;
        let one_backend = one_backend(&fleet, id, connector.as_ref(), &mut shutdown, &mut ready);
        let ended = AssertUnwindSafe(one_backend).catch_unwind().await.unwrap_or_else(|_| {
            // What ran was ended as it was dropped.
            fleet.left(id, &Ended::Panicked);
            Ended::Panicked
        });
        if matches!(ended, Ended::Shutdown) {
            break;
        }
        let pause = backoff.pause_after(ready.map_or(Duration::ZERO, |ready| ready.elapsed()));
        tracing::info!(worker = %id, seconds = pause.as_secs_f64(), "connecting again after a pause");
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = shutdown.wait_for(|&down| down) => break,
        }
    }
    fleet.metrics.forget(id);
    if let Some(forget) = fleet.on_departure.get() {
        forget(id);
    }
    fleet.adapters.offer(id, Vec::new());
}

impl Fleet {
    /// Takes a worker out after its backend's turn, and tells why it ended.
    fn left(&self, id: WorkerId, ended: &Ended) {
        let what = self.worker(id).map_or_else(String::new, |worker| worker.what.clone());
        self.leave(id);
        if !matches!(ended, Ended::Shutdown) {
            self.metrics.engine_died(id);
            tracing::error!(worker = %id, what, cause = %ended, "engine lost");
        }
    }
}

/// One backend from its start to its end. `ready` is when it could take jobs, if it ever could.
async fn one_backend(
    fleet: &Arc<Fleet>,
    id: WorkerId,
    connector: &dyn Connector,
    shutdown: &mut watch::Receiver<bool>,
    ready: &mut Option<Instant>,
) -> Ended {
    let mut life = None;
    let mut following = None;
    let ended = tokio::select! {
        // First: a backend that was cut off by the shutdown is no loss.
        biased;
        _ = shutdown.wait_for(|&down| down) => Ended::Shutdown,
        Err(ended) = live(fleet, id, connector, &mut life, &mut following, ready) => ended,
    };
    if let Some(death) = fleet.cut.get()
        && let Some(worker) = fleet.worker(id)
    {
        worker.backend.declare_dead(death.clone());
    }
    // A worker that was removed while this process goes on leaves nothing to the next one.
    let is_left = matches!(ended, Ended::Shutdown) && *fleet.shutdown.borrow();
    if is_left
        && life.as_ref().is_some_and(|life| life.outlives())
        && let Some(worker) = fleet.worker(id)
        && let Some(following) = following.take()
    {
        following.keep(fleet, &worker).await;
    }
    drop(following);
    // First out of the router, then the end: no request may be sent to a backend that is being
    // stopped.
    fleet.left(id, &ended);
    match (life, &ended) {
        (Some(life), Ended::Shutdown) => life.leave().await,
        (Some(life), _) => life.stop().await,
        (None, _) => {}
    }
    ended
}

/// Follows one backend to its end, which is all that it can return.
async fn live(
    fleet: &Arc<Fleet>,
    id: WorkerId,
    connector: &dyn Connector,
    life: &mut Option<Box<dyn Life>>,
    following: &mut Option<Following>,
    ready: &mut Option<Instant>,
) -> Result<Infallible, Ended> {
    let started = Instant::now();
    tracing::info!(worker = %id, what = connector.describe(), "connecting");
    let connected: Connected = connector.connect(id, fleet.metrics.media.clone()).await?;
    let backend: Arc<dyn Backend> = connected.backend;
    let life = life.insert(connected.life);
    let can = backend.capabilities();
    if let KvSource::Unknown { why } = &can.kv {
        tracing::warn!(worker = %id, why, "served in approximate mode: the worker is taken to hold what it was sent");
    }
    fleet.adapters.offer(id, can.adapters.values().cloned().collect());
    let loaded = Arc::new(Loaded::default());
    loaded.load_all(id, backend.as_ref(), &fleet.adapters).await;
    let worker = fleet.join(id, connector.describe(), backend.clone(), loaded.clone());
    let followed = following.insert(events::follow(fleet, &worker).await);
    let (router, told) = (fleet.router.clone(), worker.load.clone());
    backend.follow_load(Box::new(move |load| {
        told.send_replace(load);
        let Load { running, waiting, kv_usage, pending_tokens_of_others, draining, media: _ } =
            load;
        router.set_stats(
            id,
            EngineStats { running, waiting, kv_usage, pending_tokens_of_others, draining },
        );
    }));
    *ready = Some(Instant::now());
    // One that came into service since was not loaded here by whoever loaded it.
    loaded.load_all(id, backend.as_ref(), &fleet.adapters).await;
    tracing::info!(
        worker = %id,
        seconds = started.elapsed().as_secs_f64(),
        engine = can.engine,
        blocks = can.total_blocks,
        block_size = can.class.block_size.get(),
        context = can.max_model_len,
        hand_off = ?can.hand_off,
        "ready"
    );
    let mut distrusted = backend.distrusted().fuse();
    let mut watch = Watch::new(fleet.patience);
    let mut looks = tokio::time::interval(fleet.patience.look_every());
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            death = backend.ended() => return Err(Ended::Died(death)),
            death = life.ended() => {
                // The process is a faster witness than its sockets: requests in flight learn of it
                // now.
                backend.declare_dead(death.clone());
                return Err(Ended::Died(death));
            }
            why = &mut distrusted => {
                tracing::warn!(worker = %id, why, "also taken to hold what it is sent (approximate)");
                fleet.metrics.distrusted(id);
                followed.distrust(&fleet.router, id);
                continue;
            }
            () = worker.pause_is_over() => {
                fleet.half_open(&worker);
                continue;
            }
            _ = looks.tick() => {}
        }
        let activity = if watch.wants_activity() { life.activity().await } else { None };
        fleet.set_condition(id, watch.look(backend.silent_for(), activity));
    }
}
