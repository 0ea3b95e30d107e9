//! `chiasm agent`: the engines of this machine, for frontends on any.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use chiasm_agent::{AgentConnector, AgentLink, AgentServer};
use chiasm_server::MachineMedia;
use chiasm_server::fleet::Fleet;

use crate::cli::ServeArgs;
use crate::error::CliError;
use crate::serve::{self, Machine};
use crate::{key_secret, signals};

/// How often an agent is asked how many engines it has, before and after it first said so.
const ASK_AT_FIRST: Duration = Duration::from_secs(1);
const ASK_LATER: Duration = Duration::from_secs(10);

/// Runs until SIGTERM or Ctrl-C.
pub(crate) async fn run(mut args: ServeArgs) -> Result<(), CliError> {
    let address = SocketAddr::new(args.host, args.port);
    let tls = args.agents.listening(address)?;
    serve::without_helper(&mut args, "an agent")?;
    key_secret::share(args.agents.block_key_secret.as_deref(), args.engines.state_dir.as_deref())?;
    let Machine { model, door, patience, connectors, router, limits, .. } = serve::machine(&mut args).await?;
    let engines = connectors.len() as u32;
    let listener = serve::listen(address).await?;
    let fleet = Fleet::start(connectors, router, patience)?;
    let media = MachineMedia::new(model.clone(), door, fleet.clone(), &limits);
    if let Ok(address) = listener.local_addr() {
        tracing::info!(model = model.name, engines, %address, tls = tls.is_some(), "an agent waits for frontends");
    }
    let agent = AgentServer::new(fleet.clone(), media, engines);
    let drain = agent.drain();
    let stop = async {
        signals::terminated().await;
        tracing::info!("going down: requests in flight finish");
        if !drain.finished_within(args.limits.drain_timeout).await {
            tracing::warn!("requests were still in flight (--drain-timeout)");
        }
    };
    let served = chiasm_agent::serve(agent, listener, tls, stop).await;
    fleet.shutdown().await;
    served.map_err(|error| CliError::Usage(format!("the agent failed: {error}")))
}

/// Adds the engines of the agents that are named to a fleet, as they are found.
pub(crate) fn join(args: &ServeArgs, fleet: &Arc<Fleet>, processor: &Arc<[u8]>) -> Result<(), CliError> {
    for address in &args.agents.agents {
        let link = AgentLink::new(address, args.agents.towards(address)?);
        let link = link.map_err(|error| CliError::Usage(format!("--agents: {error}")))?;
        tokio::spawn(find(link, fleet.clone(), processor.clone()));
    }
    Ok(())
}

/// Asks an agent for its engines until the fleet is shut down. One that can't be reached is no reason to wait with the others.
async fn find(link: AgentLink, fleet: Arc<Fleet>, processor: Arc<[u8]>) {
    let mut known = 0;
    let mut told = None;
    loop {
        match link.engines().await {
            Ok(engines) => {
                told = None;
                while known < engines {
                    let connector = AgentConnector::new(link.clone(), known, processor.clone());
                    if fleet.add(Box::new(connector)).is_none() {
                        return;
                    }
                    known += 1;
                }
            }
            Err(error) => {
                let error = error.to_string();
                if told.as_ref() != Some(&error) {
                    tracing::warn!(agent = link.address(), error, "no engines of this agent can be used");
                    told = Some(error);
                }
            }
        }
        tokio::time::sleep(if known == 0 { ASK_AT_FIRST } else { ASK_LATER }).await;
    }
}
