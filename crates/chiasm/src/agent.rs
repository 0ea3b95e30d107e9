//! `chiasm agent`: the engines of this machine, for frontends on any.

use std::net::SocketAddr;
use std::sync::Arc;

use chiasm_agent::{AgentServer, AgentTls};
use chiasm_fleet::{Fleet, NoEngines};
use chiasm_pipeline::MachineMedia;

use crate::cli::{AgentMediaArg, ProcessorChoice, ServeArgs};
use crate::error::CliError;
use crate::serve::{self, Machine};
use crate::side::Side;
use crate::signals::{Hangup, Hangups, Interrupts};
use crate::{kept_indexes, key_secret, nixl, open_files, signals};

/// Runs until SIGTERM or Ctrl-C.
pub(crate) async fn run(mut args: ServeArgs) -> Result<(), CliError> {
    let mut hangups = Hangups::listen();
    open_files::raise();
    let address = SocketAddr::new(args.host, args.port);
    let tls = args.agents.tls.load()?;
    if tls.is_none() {
        args.agents.tls.check_plaintext_at(address)?;
    }
    if args.processor.processor == ProcessorChoice::Vllm && !args.agents.take_tensors {
        let message = "--processor vllm: frontends make the tensors then, and an agent takes them with --take-tensors";
        return Err(CliError::Usage(message.to_owned()));
    }
    if args.agents.agent_media != AgentMediaArg::Auto {
        return Err(CliError::Usage(
            "--agent-media is of chiasm serve: an agent takes what frontends send".to_owned(),
        ));
    }
    key_secret::share(args.agents.block_key_secret.as_deref(), args.engines.state_dir.as_deref())?;
    let kept = kept_indexes::open(&args, true);
    let Machine { model, door, patience, connectors, router, limits, adapters, .. } =
        serve::machine(&mut args, Side::Agent).await?;
    let reader = nixl::reader(&args).await?;
    let engines = connectors.len() as u32;
    let listener = serve::listen(address).await?;
    if connectors.is_empty() {
        return Err(NoEngines.into());
    }
    let fleet = Fleet::empty(router, patience, adapters);
    kept.into_iter().for_each(|kept| fleet.keep_indexes(kept));
    for connector in connectors {
        fleet.add(connector);
    }
    let tensor_bytes = args.agents.take_tensors.then_some(args.processor.processor_item_bytes);
    let fetches = args.agents.fetch_media;
    let budget = door.budget().clone();
    let media = MachineMedia::new(
        model.clone(),
        door,
        fleet.clone(),
        &limits.pipeline,
        tensor_bytes,
        fetches,
    );
    if let Ok(address) = listener.local_addr() {
        tracing::info!(model = model.name, engines, %address, tls = tls.is_some(), "an agent waits for frontends");
    }
    let agent = AgentServer::new(fleet.clone(), media, budget, engines);
    let agent = match reader {
        Some(reader) => agent.with_reader(reader),
        None => agent,
    };
    let drain = agent.drain();
    let registration = args.agents.register(listener.local_addr().ok(), &model.name)?;
    let renewed = tls.clone();
    let stop = async {
        tokio::select! {
            () = signals::terminated() => {}
            () = reload_at(&mut hangups, renewed) => {}
        }
        let mut interrupts = Interrupts::listen();
        tracing::info!("going down: requests in flight finish, a second Ctrl-C cuts them off");
        // First: nobody else is to come.
        if let Some(registration) = registration {
            registration.end().await;
        }
        let finished = tokio::select! {
            finished = drain.finished_within(args.limits.drain_timeout) => finished,
            () = interrupts.next() => false,
        };
        if !finished {
            tracing::warn!("requests were still in flight (--drain-timeout, or a second Ctrl-C)");
        }
    };
    let served = chiasm_agent::serve(agent, listener, tls, stop).await;
    fleet.shutdown().await;
    served.map_err(|error| CliError::Usage(format!("the agent failed: {error}")))
}

/// Reads the certificate again at each SIGHUP. Returns when the terminal that the process was
/// started at is gone.
async fn reload_at(hangups: &mut Hangups, tls: Option<Arc<AgentTls>>) {
    while hangups.next().await == Hangup::Reload {
        tracing::info!("SIGHUP: certificates are read again");
        if let Some(tls) = &tls {
            tls.reload().await;
        }
    }
}
