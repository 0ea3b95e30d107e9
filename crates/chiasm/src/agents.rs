//! The engines of agents as workers of a frontend. Agents come from a list or from discovery, and
//! are removed once no source names them and they don't answer.

mod greeting_limiter;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use chiasm_agent::{
    AgentConnector, AgentLink, AgentMedia, AgentStatus, AgentTls, Greeting, Lending, LinkError,
};
use chiasm_discovery::{NamedAgents, SourceFollower};
use chiasm_fleet::Fleet;
use chiasm_types::WorkerId;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::timeout;

use crate::cli::{AgentArgs, AgentTlsArgs, DrainArgs, ProbeArgs, ServeArgs};
use crate::error::CliError;
use crate::stdout::line;

use greeting_limiter::{GreetingLimiter, SILENT_AFTER};

/// The interval between greetings of an agent that has no worker here or is no longer named.
const SHORT_INTERVAL: Duration = Duration::from_secs(1);
/// The interval between greetings of any other agent.
const LONG_INTERVAL: Duration = Duration::from_secs(10);

/// The interval at which `chiasm drain` asks for the number of running requests.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The discovery of agents for a fleet. Dropping it ends the discovery.
pub(crate) struct Agents {
    _sources: Vec<SourceFollower>,
}

/// The state that the tasks of all agents share.
struct Shared {
    fleet: Arc<Fleet>,
    processor: Arc<[u8]>,
    media: AgentMedia,
    args: AgentTlsArgs,
    tls: Option<Arc<AgentTls>>,
    lending: Lending,
    /// The address in use for each incarnation of an agent, because sources may name several
    /// addresses of one agent.
    serving: Mutex<HashMap<u64, String>>,
    /// The limit on greetings of agents that have no worker here.
    greetings: GreetingLimiter,
}

/// Starts to discover agents and to add their engines to the fleet.
pub(crate) fn discover(
    args: &ServeArgs,
    fleet: &Arc<Fleet>,
    processor: Arc<[u8]>,
    lending: Option<Lending>,
) -> Result<Agents, CliError> {
    let shared = Arc::new(Shared {
        fleet: fleet.clone(),
        processor,
        media: args.agents.agent_media.into(),
        args: args.agents.tls.clone(),
        tls: args.agents.tls.load()?,
        lending: lending.unwrap_or_default(),
        serving: Mutex::default(),
        greetings: GreetingLimiter::new(),
    });
    let sources = args.agents.sources()?;
    for source in &sources {
        tokio::spawn(follow(source.subscribe(), shared.clone()));
    }
    Ok(Agents { _sources: sources })
}

/// Runs a reconciler for each agent that a source names or has named.
async fn follow(mut named: watch::Receiver<NamedAgents>, shared: Arc<Shared>) {
    let mut agents: HashMap<String, watch::Sender<bool>> = HashMap::new();
    loop {
        let addresses = named.borrow_and_update().addresses.clone();
        // A reconciler ends when its agent is neither named nor answering.
        agents.retain(|_, set_named| !set_named.is_closed());
        for (address, set_named) in &agents {
            let is_named = addresses.contains(address);
            set_named.send_if_modified(|current| {
                let has_changed = *current != is_named;
                *current = is_named;
                has_changed
            });
        }
        for address in addresses {
            if agents.contains_key(&address) {
                continue;
            }
            let (set_named, is_named) = watch::channel(true);
            let shared = shared.clone();
            tokio::spawn(Reconciler::new(address.clone(), shared, is_named).run());
            agents.insert(address, set_named);
        }
        tokio::select! {
            changed = named.changed() => {
                if changed.is_err() {
                    return;
                }
            }
            // A reconciler may have ended at the moment when its agent was named again.
            () = tokio::time::sleep(LONG_INTERVAL) => {}
        }
    }
}

/// Checks the addresses of `--agents` and the certificates, without connecting.
///
/// # Errors
/// [`CliError::Usage`] names the address or the file.
pub(crate) fn check(args: &AgentArgs) -> Result<(), CliError> {
    let tls = args.tls.load()?;
    args.agents.iter().try_for_each(|address| link(&args.tls, &tls, address).map(drop))
}

/// Creates a link to an agent; does not connect yet.
fn link(
    args: &AgentTlsArgs,
    tls: &Option<Arc<AgentTls>>,
    address: &str,
) -> Result<AgentLink, CliError> {
    if tls.is_none() {
        args.check_plaintext_towards(address)?;
    }
    AgentLink::new(address, tls.clone()).map_err(|error| CliError::Usage(error.to_string()))
}

/// Runs `chiasm drain`: makes an agent refuse new jobs and waits until none runs, or makes it
/// accept jobs again.
pub(crate) async fn drain(args: DrainArgs) -> Result<(), CliError> {
    let link = link(&args.tls, &args.tls.load()?, &args.agent)?;
    let deadline = Instant::now() + args.wait;
    loop {
        let running =
            link.drain(!args.resume).await.map_err(|error| CliError::Usage(error.to_string()))?;
        let agent = &args.agent;
        if args.resume {
            line!("the agent at {agent} accepts new requests");
            return Ok(());
        }
        if running == 0 || args.wait.is_zero() {
            line!("the agent at {agent} accepts no new requests; {running} still run");
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(CliError::Usage(format!(
                "{running} requests still run at the agent {agent} (--wait)"
            )));
        }
        tokio::time::sleep(DRAIN_POLL_INTERVAL).await;
    }
}

/// Runs `chiasm probe`: prints an agent's status. Fails if the agent does not answer, or does not
/// meet the condition of the flags.
pub(crate) async fn probe(args: ProbeArgs) -> Result<(), CliError> {
    let link = link(&args.tls, &args.tls.load()?, &args.agent)?;
    let status = link.status().await.map_err(|error| CliError::Usage(error.to_string()))?;
    let AgentStatus { engines, admitted, draining } = status;
    let summary = format!(
        "frontends have admitted {admitted} of {engines} engines of the agent at {}",
        args.agent
    );
    if args.admitted && draining {
        let message = format!("the agent at {} accepts no new requests", args.agent);
        return Err(CliError::Usage(message));
    }
    if args.admitted && admitted < engines {
        return Err(CliError::Usage(summary));
    }
    line!("{summary}");
    Ok(())
}

/// A task that keeps the fleet's workers equal to the engines of one agent.
struct Reconciler {
    address: String,
    /// `None` until the agent has answered: a named address may have no agent.
    link: Option<AgentLink>,
    shared: Arc<Shared>,
    is_named: watch::Receiver<bool>,
    /// The workers of the agent's engines, by engine index.
    workers: Vec<WorkerId>,
    /// `true` if the agent did not answer the last greeting within [`SILENT_AFTER`].
    was_silent: bool,
}

impl Reconciler {
    fn new(address: String, shared: Arc<Shared>, is_named: watch::Receiver<bool>) -> Self {
        Self { address, link: None, shared, is_named, workers: Vec::new(), was_silent: false }
    }

    /// Greets the agent at intervals and follows the number of its engines. Ends when no source
    /// names the agent and it does not answer, or when the fleet is shut down.
    ///
    /// An agent that is no longer named stays while it answers.
    async fn run(mut self) {
        let mut last_error = None;
        let mut incarnation = None;
        loop {
            let Some(greeted) = self.greet().await else {
                return self.release_incarnation(incarnation);
            };
            let is_named = *self.is_named.borrow_and_update();
            match greeted {
                Ok(greeting) => {
                    last_error = None;
                    self.claim_incarnation(&mut incarnation, &greeting);
                    let engines = if incarnation.is_some() { greeting.engines } else { 0 };
                    if !self.set_worker_count(engines) {
                        return;
                    }
                    for worker in &self.workers {
                        self.shared.fleet.set_named(*worker, is_named);
                    }
                }
                Err(error) if !is_named => {
                    // Not logged for addresses that never answered: there may be thousands.
                    if !self.workers.is_empty() {
                        tracing::info!(
                            agent = self.address,
                            %error,
                            "an agent is gone: no source names it, and it does not answer"
                        );
                    }
                    self.set_worker_count(0);
                    self.release_incarnation(incarnation);
                    return;
                }
                Err(error) => {
                    let error = error.to_string();
                    if last_error.as_ref() != Some(&error) {
                        tracing::warn!(
                            agent = self.address,
                            error,
                            "no engines of this agent can be used"
                        );
                        last_error = Some(error);
                    }
                }
            }
            let interval =
                if self.workers.is_empty() || !is_named { SHORT_INTERVAL } else { LONG_INTERVAL };
            tokio::select! {
                () = tokio::time::sleep(interval) => {}
                changed = self.is_named.changed() => {
                    if changed.is_err() {
                        // The discovery was dropped.
                        return;
                    }
                    if !*self.is_named.borrow() && !self.workers.is_empty() {
                        tracing::info!(
                            agent = self.address,
                            "no source names an agent any more; it stays in use while it answers"
                        );
                    }
                }
            }
        }
    }

    /// Greets the agent. An agent without a worker here needs a permit, and its connection is kept
    /// only if it answers.
    ///
    /// Returns `None` if the address is invalid, or if the agent is no longer named before a permit
    /// is free.
    async fn greet(&mut self) -> Option<Result<Greeting, LinkError>> {
        if !self.workers.is_empty() {
            return self.greet_now().await;
        }
        if !self.was_silent {
            let _permit = self.acquire_permit().await?;
            match timeout(SILENT_AFTER, self.greet_now()).await {
                Ok(greeted) => return greeted,
                // The agent may just be slow. It gets more time, among the silent agents.
                Err(_) => self.was_silent = true,
            }
        }
        let _permit = self.acquire_permit().await?;
        let started = Instant::now();
        let greeted = self.greet_now().await;
        self.was_silent = started.elapsed() >= SILENT_AFTER;
        greeted
    }

    /// Greets the agent without a permit. Returns `None` if the address is invalid.
    async fn greet_now(&mut self) -> Option<Result<Greeting, LinkError>> {
        let link = match self.link.take() {
            Some(link) => link,
            None => match link(&self.shared.args, &self.shared.tls, &self.address) {
                Ok(link) => link.with_lending(&self.shared.lending),
                Err(error) => {
                    tracing::warn!(agent = self.address, %error, "an agent can't be used");
                    return None;
                }
            },
        };
        let greeted = link.greet().await;
        self.link = Some(link).filter(|_| greeted.is_ok() || !self.workers.is_empty());
        Some(greeted)
    }

    /// Waits for a permit to greet the agent. Returns `None` if the agent is no longer named
    /// before.
    async fn acquire_permit(&mut self) -> Option<OwnedSemaphorePermit> {
        tokio::select! {
            permit = self.shared.greetings.acquire(self.was_silent) => permit,
            _ = self.is_named.wait_for(|is_named| !is_named) => None,
        }
    }

    /// Claims the greeted incarnation of the agent for this address, unless another address has
    /// claimed it: an agent that is named by two addresses must be used once.
    ///
    /// `incarnation` is the one that this address has claimed.
    fn claim_incarnation(&self, incarnation: &mut Option<u64>, greeting: &Greeting) {
        if *incarnation == Some(greeting.incarnation) {
            return;
        }
        self.release_incarnation(incarnation.take());
        let mut serving = self.shared.serving.lock().unwrap_or_else(PoisonError::into_inner);
        match serving.get(&greeting.incarnation) {
            Some(other_address) => {
                tracing::debug!(agent = self.address, other_address, "an agent has two addresses");
            }
            None => {
                serving.insert(greeting.incarnation, self.address.clone());
                *incarnation = Some(greeting.incarnation);
            }
        }
    }

    fn release_incarnation(&self, incarnation: Option<u64>) {
        if let Some(incarnation) = incarnation {
            self.shared.serving.lock().unwrap_or_else(PoisonError::into_inner).remove(&incarnation);
        }
    }

    /// Adds or removes workers until there is one for each engine. Returns `false` if the fleet is
    /// shut down.
    fn set_worker_count(&mut self, engines: u32) -> bool {
        while self.workers.len() > engines as usize {
            if let Some(worker) = self.workers.pop() {
                self.shared.fleet.remove(worker);
            }
        }
        while self.workers.len() < engines as usize {
            let Shared { fleet, processor, media, .. } = &*self.shared;
            let Some(link) = &self.link else { return true };
            let connector =
                AgentConnector::new(link.clone(), self.workers.len() as u32, processor.clone());
            let connector = connector.with_media(*media);
            let Some(worker) = fleet.add(Box::new(connector)) else { return false };
            self.workers.push(worker);
        }
        true
    }
}
