//! A running simulated engine.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use chiasm_types::VllmVersion;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};

use crate::config::SimConfig;
use crate::connection::check_address;
use crate::core::{Core, End};
use crate::error::SimError;
use crate::faults::Death;
use crate::group::{self, Group, Membership};
use crate::handshake::{self, Handshake};
use crate::intake::Intake;
use crate::kv_publisher::KvPublisher;
use crate::lent_slot::Alarm;
use crate::loras::Loras;
use crate::moment_log::MomentLog;
use crate::monotonic_time::MonotonicTime;
use crate::outbox::Outbox;
use crate::plugin::Plugin;
use crate::prompt_store::PromptStore;
use crate::receiver_cache::ReceiverCache;
use crate::scheduler::Scheduler;
use crate::sockets;
use crate::work::Work;

/// The deadline for sending the last messages; vLLM's output sockets linger as long.
const LINGER: Duration = Duration::from_secs(4);
/// The pause before the sockets close. `zeromq` writes in the background and does not report when
/// it is done; see [`crate::connection`].
const FLUSH_PAUSE: Duration = Duration::from_millis(50);

/// The way in which a simulated engine ended.
#[derive(Clone, Debug)]
pub enum Exit {
    /// [`SimEngine::kill`] was called, or the handle was dropped.
    Killed,
    /// [`SimEngine::stop`] was called.
    Stopped,
    /// The engine ended by itself, for this reason.
    Failed(Arc<SimError>),
}

/// A simulated engine: tasks on the caller's tokio runtime. Dropping the handle kills it.
#[derive(Debug)]
pub struct SimEngine {
    stop: watch::Sender<bool>,
    task: AbortHandle,
    exit: watch::Receiver<Option<Exit>>,
}

impl SimEngine {
    /// Starts an engine, which connects to the handshake address as a headless vLLM does. The
    /// frontend may start later, and errors are not reported here: an error ends the engine, and
    /// [`SimEngine::done`] returns it.
    ///
    /// Must be called within a tokio runtime with time and network enabled.
    pub fn start(config: SimConfig) -> Self {
        let (stop, stopping) = watch::channel(false);
        let (ended, exit) = watch::channel(None);
        let task = tokio::spawn(async move {
            let result = run(Arc::new(config), stopping).await;
            let _ = ended.send(Some(match result {
                Ok(()) => Exit::Stopped,
                Err(error) => Exit::Failed(Arc::new(error)),
            }));
        });
        Self { stop, task: task.abort_handle(), exit }
    }

    /// Ends the engine like `kill -9`: all connections close without a message.
    pub fn kill(&self) {
        self.task.abort();
    }

    /// Ends the engine like SIGTERM: requests in flight end as aborted, then the engine ends. An
    /// engine that is not ready ends at once.
    pub async fn stop(&self) -> Exit {
        self.stop.send_replace(true);
        self.done().await
    }

    /// Waits for the engine's end.
    pub async fn done(&self) -> Exit {
        let mut exit = self.exit.clone();
        match exit.wait_for(Option::is_some).await {
            Ok(exit) => exit.clone().unwrap_or(Exit::Killed),
            // The task was aborted before it sent an exit.
            Err(_) => Exit::Killed,
        }
    }
}

impl Drop for SimEngine {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs the engine to its end. All tasks live in sets here, so that they end with this future.
async fn run(config: Arc<SimConfig>, stop: watch::Receiver<bool>) -> Result<(), SimError> {
    config.check()?;
    check_address(&config.handshake)?;
    let mut tasks = JoinSet::new();
    let mut senders = JoinSet::new();
    let (work, inbox) = mpsc::unbounded_channel();
    let core = tokio::select! {
        core = start(&config, work.clone(), &mut tasks, &mut senders) => core?,
        () = stop_requested(stop.clone()) => return Ok(()),
    };
    tracing::info!(handshake = config.handshake, rank = config.rank, "simulated engine ready");
    tasks.spawn(async move {
        stop_requested(stop).await;
        let _ = work.send(Work::Stop);
    });

    let outbox = core.outbox.clone();
    let end = core.run(inbox).await;
    if matches!(end, End::Fault) && config.faults.death == Death::Announced {
        outbox.send_dead();
    }
    // The system delivers the last messages of an ended process before its connections close, even
    // after `kill -9`.
    outbox.close();
    let flushed = async { while senders.join_next().await.is_some() {} };
    if tokio::time::timeout(LINGER, flushed).await.is_err() {
        tracing::warn!("the frontend did not receive the last messages in time");
    }
    tokio::time::sleep(FLUSH_PAUSE).await;
    tasks.shutdown().await;
    match end {
        End::Stopped => Ok(()),
        End::Died(reason) => Err(SimError::Died(reason)),
        End::Fault => Err(SimError::Fault),
    }
}

/// Waits until a stop is requested.
async fn stop_requested(mut stop: watch::Receiver<bool>) {
    if stop.wait_for(|stop| *stop).await.is_err() {
        // The handle is gone, which kills the engine.
        std::future::pending().await
    }
}

/// Starts everything up to READY. Reading tasks go to `tasks`, writing ones to `senders`.
async fn start(
    config: &Arc<SimConfig>,
    work: mpsc::UnboundedSender<Work>,
    tasks: &mut JoinSet<()>,
    senders: &mut JoinSet<()>,
) -> Result<Core, SimError> {
    let mut kv_events = None;
    let mut kv_events_config = None;
    if let Some(configured) = &config.kv_events {
        let (publisher, reported) = KvPublisher::bind(configured, &config.faults).await?;
        let (queue, batches) = mpsc::unbounded_channel();
        tasks.spawn(publisher.run(batches));
        kv_events = Some(queue);
        kv_events_config = Some(reported);
    }
    let (handshake, init) = Handshake::start(config).await?;
    let membership = Membership::from_init(&init)?;
    let version = VllmVersion::parse(&config.vllm_version);
    let is_since_33 = version.is_some_and(|version| version >= VllmVersion::minor(0, 33));
    let group = match &membership {
        None => None,
        Some(membership) => {
            let (reports, queue) = mpsc::unbounded_channel();
            let address = membership.coordinator_output.clone();
            // The coordinator lives as long as its group, so nothing is sent again.
            senders.spawn(async move { sockets::send(address, queue, watch::channel(0).1).await });
            Some(Group::form(membership, config.rank, is_since_33, reports).await?)
        }
    };

    let time = MonotonicTime::start();
    let receiver_cache =
        config.receiver_cache_bytes.map(ReceiverCache::new).map(Mutex::new).map(Arc::new);
    let plugin = config.plugin.then(|| Plugin::new(config.encoder_cache_tokens));
    let (outbox, queues) = Outbox::new(config.rank, init.addresses.outputs.len());
    let (losses, lost) = watch::channel(0);
    for (address, queue) in init.addresses.outputs.into_iter().zip(queues) {
        senders.spawn(sockets::send(address, queue, lost.clone()));
    }
    let prompt_store = if config.kv_connector {
        let store = PromptStore::bind(config.side_channel, config.prompt_lease).await;
        let (store, listener) = store.map_err(SimError::SideChannel)?;
        tasks.spawn(store.clone().serve(listener, work.clone()));
        Some(store)
    } else {
        None
    };
    let group_work = work.clone();
    let intake = Intake {
        receiver_cache: receiver_cache.clone(),
        plugin: plugin.clone(),
        alarm: config.verify_slots.then(|| Alarm::new(work.clone())),
        retained: Arc::default(),
        block_size: config.block_size.get(),
        time,
        outbox: outbox.clone(),
        work,
        prompt_store: prompt_store.clone(),
        explains_errors: is_since_33,
        request_log: config
            .request_log
            .as_deref()
            .map(MomentLog::create)
            .transpose()?
            .map(Arc::new),
    };
    let group_size = membership.as_ref().map_or(1, |membership| membership.size);
    let ready = handshake::ready(config, kv_events_config, group_size).encode();
    let mut inputs = Vec::new();
    for address in init.addresses.inputs {
        let (connected, input) = oneshot::channel();
        inputs.push(input);
        tasks.spawn(sockets::receive(
            address,
            config.rank,
            ready.clone(),
            connected,
            losses.clone(),
            intake.clone(),
        ));
    }
    for input in inputs {
        if input.await.is_err() {
            return Err(SimError::HandshakeLost(config.handshake.clone()));
        }
    }
    let configuration = membership.as_ref().map(|membership| format!("{membership:?}"));
    if let Some(membership) = &membership {
        let coordinator = membership.subscribe().await?;
        tasks.spawn(group::follow(coordinator, group_work));
    }
    handshake.finish(configuration).await?;

    let step_log = config.step_log.as_deref().map(MomentLog::create).transpose()?;
    let scheduler = Scheduler::new(config.clone(), prompt_store);
    let loras = config.lora.clone().map(Loras::new);
    Ok(Core {
        config: config.clone(),
        scheduler,
        loras,
        receiver_cache,
        plugin,
        time,
        outbox,
        kv_events,
        step_log,
        group,
    })
}
