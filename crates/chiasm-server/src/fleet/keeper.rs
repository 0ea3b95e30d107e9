//! One worker's keeper: starts its engine, joins it, follows it, replaces it.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use chiasm_engine::wire::EngineReady;
use chiasm_engine::{DeathCause, EngineClient, EngineError, SocketDir};
use chiasm_router::{EngineStats, Router, WorkerInfo};
use chiasm_types::{BlockSize, Dtype, WorkerId};
use chiasm_vision::PixelFormat;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::backoff::Backoff;
use super::events;
use super::host::{EngineHost, HostError, RunningEngine};
use super::{Fleet, FleetOptions, PixelPolicy, Shape, Worker};

/// Why an engine's turn ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("shutting down")]
    Shutdown,
    #[error("{0}")]
    NotStarted(#[from] HostError),
    #[error("{0}")]
    Failed(#[from] EngineError),
    #[error("it does not fit: {0}")]
    Unsuitable(String),
    #[error("{0}")]
    Lost(DeathCause),
    #[error("it was not ready after {0} s (--startup-timeout)")]
    TooSlow(u64),
    #[error("{0}")]
    Exited(String),
}

/// Keeps worker `id` running until the fleet is shut down.
pub(super) async fn keep(
    fleet: Arc<Fleet>,
    id: WorkerId,
    host: Box<dyn EngineHost>,
    options: FleetOptions,
    mut shutdown: watch::Receiver<bool>,
) {
    let mut backoff = Backoff::new(host.longest_pause());
    loop {
        let mut ready = None;
        let ended = one_engine(&fleet, id, host.as_ref(), &options, &mut shutdown, &mut ready).await;
        if matches!(ended, Ended::Shutdown) {
            return;
        }
        let pause = backoff.pause_after(ready);
        tracing::info!("{id}: starting another engine in {:.1} s", pause.as_secs_f64());
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = shutdown.wait_for(|&down| down) => return,
        }
    }
}

/// One engine from its start to its end.
async fn one_engine(
    fleet: &Arc<Fleet>,
    id: WorkerId,
    host: &dyn EngineHost,
    options: &FleetOptions,
    shutdown: &mut watch::Receiver<bool>,
    ready: &mut Option<Instant>,
) -> Ended {
    let mut engine = None;
    let ended = tokio::select! {
        Err(ended) = live(fleet, id, host, options, &mut engine, ready) => ended,
        _ = shutdown.wait_for(|&down| down) => Ended::Shutdown,
    };
    // First out of the router, then the end: no request may be sent to an engine that is being stopped.
    fleet.leave(id);
    if !matches!(ended, Ended::Shutdown) {
        fleet.metrics.engine_deaths.inc();
        tracing::error!("{id}: engine lost: {ended}");
    }
    if let Some(engine) = engine {
        engine.stop().await;
    }
    ended
}

/// Follows one engine to its end, which is all that it can return.
async fn live(
    fleet: &Arc<Fleet>,
    id: WorkerId,
    host: &dyn EngineHost,
    options: &FleetOptions,
    engine: &mut Option<Box<dyn RunningEngine>>,
    ready: &mut Option<Instant>,
) -> Result<Infallible, Ended> {
    let started = Instant::now();
    let sockets = SocketDir::new()?;
    let pending = EngineClient::bind(host.endpoints(&sockets), options.client.clone()).await?;
    tracing::info!("{id}: {}", host.describe());
    let engine = engine.insert(host.start(id, pending.endpoints(), &sockets).await?);
    let client = tokio::select! {
        client = pending.ready() => client?,
        how = engine.exited() => return Err(Ended::Exited(how)),
        () = tokio::time::sleep(options.startup_timeout) => {
            return Err(Ended::TooSlow(options.startup_timeout.as_secs()));
        }
    };
    let info = client.info().clone();
    let shape = shape_of(&info)?;
    let pixel_format = pixel_format(&info, options.pixels)?;
    options.arena.attach(id, &client).await.map_err(|error| Ended::Unsuitable(error.to_string()))?;
    let worker = Worker {
        id,
        client: client.clone(),
        pixel_format,
        max_model_len: shape.max_model_len,
        wants_arena: options.arena.bytes().is_some(),
    };
    let events = events::source(&info);
    if events.is_none() {
        tracing::warn!(
            "{id}: publishes no KV events that can be had; served in approximate mode, which takes it to hold what it was sent"
        );
    }
    let worker_info = WorkerInfo {
        total_blocks: info.num_gpu_blocks,
        block_size: shape.block_size,
        publishes_events: events.is_some(),
        // At least; READY does not tell the size.
        encoder_cache_tokens: info.max_num_batched_tokens.into(),
        receiver_cache_bytes: options.client.receiver_cache_bytes.unwrap_or(0),
    };
    fleet.join(worker, shape, worker_info).map_err(Ended::Unsuitable)?;
    let followed = fleet.followed.get(&id).cloned().unwrap_or_default();
    let _events = events.map(|source| events::follow(fleet.router.clone(), id, source, followed));
    let _stats = follow_stats(fleet.router.clone(), id, &client);
    *ready = Some(Instant::now());
    tracing::info!(
        "{id}: ready after {:.1} s: vLLM {}, {} blocks of {} tokens, context {}",
        started.elapsed().as_secs_f64(),
        info.vllm_version,
        info.num_gpu_blocks,
        shape.block_size.get(),
        shape.max_model_len
    );
    Err(tokio::select! {
        cause = client.closed() => Ended::Lost(cause),
        how = engine.exited() => {
            // The process is a faster witness than its sockets: requests in flight learn of it now.
            client.mark_dead(DeathCause::Exited(how.clone()));
            Ended::Exited(how)
        }
    })
}

fn shape_of(info: &EngineReady) -> Result<Shape, Ended> {
    let block_size =
        BlockSize::new(info.cache_block_size()).ok_or_else(|| Ended::Unsuitable("its block size is 0".to_owned()))?;
    Ok(Shape {
        block_size,
        max_model_len: info.max_model_len,
        max_batched_tokens: info.max_num_batched_tokens as usize,
    })
}

/// The element type of normalised pixels is the model's own, as vLLM's frontend casts them.
fn pixel_format(info: &EngineReady, policy: PixelPolicy) -> Result<PixelFormat, Ended> {
    if policy == PixelPolicy::Raw {
        return Ok(PixelFormat::RawU8);
    }
    let name = info.dtype.trim_start_matches("torch.");
    match Dtype::from_torch_name(name) {
        Some(dtype @ (Dtype::F32 | Dtype::F16 | Dtype::BF16)) => Ok(PixelFormat::Normalized(dtype)),
        _ => Err(Ended::Unsuitable(format!("its element type '{name}' is not a float that pixels can have"))),
    }
}

/// A task that ends with this value.
struct Following(JoinHandle<()>);

impl Drop for Following {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Feeds the engine's own counts to the router.
fn follow_stats(router: Arc<Router>, id: WorkerId, client: &EngineClient) -> Following {
    let mut stats = client.stats();
    Following(tokio::spawn(async move {
        while stats.changed().await.is_ok() {
            let now = stats.borrow_and_update().clone();
            let (running, waiting) = (now.num_running_reqs, now.num_waiting_reqs);
            router.set_stats(id, EngineStats { running, waiting, kv_usage: now.kv_cache_usage });
        }
    }))
}
