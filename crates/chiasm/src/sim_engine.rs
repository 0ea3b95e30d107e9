//! `chiasm sim-engine`: one simulated engine as a process of its own.

use chiasm_pipeline::model::{NativeImages, ServedModel};
use chiasm_sim_engine::{Exit, KvEvents, SimConfig, SimEngine};

use crate::cli::SimEngineArgs;
use crate::error::CliError;
use crate::serve::cache_bytes;
use crate::signals;
use crate::sim_host::sim_config;

/// Runs until SIGTERM, Ctrl-C or the end of the engine.
pub(crate) async fn run(args: SimEngineArgs) -> Result<(), CliError> {
    let model = match &args.model {
        Some(dir) => Some(ServedModel::load_with(
            dir,
            dir.display().to_string(),
            None,
            NativeImages::WhereSupported,
        )?),
        None => None,
    };
    let config = sim_config(&args.sim, model.as_ref(), None);
    let config = SimConfig {
        handshake: args.handshake,
        rank: args.rank,
        receiver_cache_bytes: cache_bytes(args.receiver_cache_gb),
        kv_events: config.kv_events.map(|events| KvEvents { endpoint: args.kv_events, ..events }),
        ..config
    };
    let engine = SimEngine::start(config);
    let exit = tokio::select! {
        exit = engine.done() => exit,
        () = signals::terminated() => engine.stop().await,
    };
    match exit {
        Exit::Failed(error) => Err(CliError::Sim(error)),
        Exit::Killed | Exit::Stopped => Ok(()),
    }
}
