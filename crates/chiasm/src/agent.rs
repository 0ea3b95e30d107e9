//! `chiasm agent`: serves the engines of this machine to frontends on any machine.

use std::net::SocketAddr;
use std::sync::Arc;

use chiasm_agent::{AgentServer, AgentTls};
use chiasm_fleet::{Fleet, NoEngines};
use chiasm_pipeline::MachineMedia;

use crate::cli::ServeArgs;
use crate::error::CliError;
use crate::serve::{self, ServeSetup};
use crate::side::Side;
use crate::signals::{Hangup, Hangups, Interrupts};
use crate::{kept_indexes, key_secret, nixl, open_files, signals};

/// Runs until SIGTERM or Ctrl-C.
pub(crate) async fn run(mut args: ServeArgs) -> Result<(), CliError> {
    let mut hangups = Hangups::listen();
    serve::check_flags(&args, Side::Agent)?;
    open_files::raise_limit();
    let address = SocketAddr::new(args.host, args.port);
    let tls = args.agents.tls.load()?;
    key_secret::load(args.agents.block_key_secret.as_deref(), args.engines.state_dir.as_deref())?;
    let kept_indexes = kept_indexes::open(&args, true);
    let ServeSetup {
        model, loader, patience, connectors, router, limits, adapters, processor, ..
    } = serve::prepare(&mut args, Side::Agent).await?;
    let reader = nixl::start_reader(&args).await?;
    let engines = connectors.len() as u32;
    let listener = serve::listen(address).await?;
    if connectors.is_empty() {
        return Err(NoEngines.into());
    }
    let fleet = Fleet::empty(router, patience, adapters);
    if let Some(indexes) = kept_indexes {
        fleet.keep_indexes(indexes);
    }
    for connector in connectors {
        fleet.add(connector);
    }
    let tensor_bytes = args.agents.take_tensors.then_some(args.processor.processor_item_bytes);
    let fetches_media = args.agents.fetch_media;
    let budget = loader.budget().clone();
    let media = MachineMedia::new(
        model.clone(),
        loader,
        fleet.clone(),
        &limits.pipeline,
        tensor_bytes,
        processor,
        fetches_media,
    );
    if let Ok(address) = listener.local_addr() {
        let tls = tls.is_some();
        let model = &model.name;
        tracing::info!(model, engines, %address, tls, "the agent is ready for frontends");
    }
    let agent = AgentServer::new(fleet.clone(), media, budget, engines);
    let agent = match reader {
        Some(reader) => agent.with_reader(reader),
        None => agent,
    };
    let drain = agent.drain();
    let registration = args.agents.register(listener.local_addr().ok(), &model.name)?;
    let reloaded_tls = tls.clone();
    let stop = async {
        tokio::select! {
            () = signals::terminated() => {}
            () = reload_on_hangup(&mut hangups, reloaded_tls) => {}
        }
        let mut interrupts = Interrupts::listen();
        tracing::info!("shutting down: requests in flight finish; another Ctrl-C aborts them");
        // First, so that no further frontend discovers this agent.
        if let Some(registration) = registration {
            registration.end().await;
        }
        let finished = tokio::select! {
            finished = drain.finish_jobs(args.limits.drain_timeout) => finished,
            () = interrupts.next() => false,
        };
        if !finished {
            tracing::warn!("aborting requests in flight (--drain-timeout or another Ctrl-C)");
        }
    };
    let served = chiasm_agent::serve(agent, listener, tls, stop).await;
    fleet.shutdown().await;
    served.map_err(|error| CliError::Usage(format!("the agent failed: {error}")))
}

/// Reloads the certificate at each SIGHUP. Returns when the process's terminal is gone.
async fn reload_on_hangup(hangups: &mut Hangups, tls: Option<Arc<AgentTls>>) {
    while hangups.next().await == Hangup::Reload {
        tracing::info!("SIGHUP: reloading certificates");
        if let Some(tls) = &tls {
            tls.reload().await;
        }
    }
}
