//! The engines of agents as workers of a frontend: found by a list or by discovery, and let go when
//! nothing names them and none answers.

mod turns;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use chiasm_agent::{
    AgentConnector, AgentLink, AgentMedia, AgentStatus, AgentTls, Greeting, Lending, LinkError,
};
use chiasm_discovery::{Following, Named};
use chiasm_fleet::Fleet;
use chiasm_types::WorkerId;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::timeout;

use crate::cli::{AgentTlsArgs, DrainArgs, ProbeArgs, ServeArgs};
use crate::error::CliError;
use crate::stdout::line;

use turns::{SILENT_AFTER, Turns};

/// How often an agent is asked what it is: until it says so, and after it is named no more; and
/// otherwise.
const ASK_SOON: Duration = Duration::from_secs(1);
const ASK_LATER: Duration = Duration::from_secs(10);

/// How often an agent is asked whether its last request has ended.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Finds agents and adds their engines to a fleet for as long as this lives.
pub(crate) struct Agents {
    _sources: Vec<Following>,
}

/// What all agents of a frontend have in common.
struct Shared {
    fleet: Arc<Fleet>,
    processor: Arc<[u8]>,
    media: AgentMedia,
    args: AgentTlsArgs,
    tls: Option<Arc<AgentTls>>,
    lending: Lending,
    /// The address at which each start of an agent is served: some are named twice.
    serving: Mutex<HashMap<u64, String>>,
    /// The turns of agents that have no worker here.
    turns: Turns,
}

/// Begins to look for agents.
pub(crate) fn find(
    args: &ServeArgs,
    fleet: &Arc<Fleet>,
    processor: Arc<[u8]>,
    lending: Option<Lending>,
) -> Result<Agents, CliError> {
    let (fleet, tls) = (fleet.clone(), args.agents.tls.load()?);
    let (media, lending) = (args.agents.agent_media.into(), lending.unwrap_or_default());
    let shared = Arc::new(Shared {
        fleet,
        processor,
        media,
        args: args.agents.tls.clone(),
        tls,
        lending,
        serving: Mutex::default(),
        turns: Turns::new(),
    });
    // Those that are listed are told at once if they can't be.
    for address in &args.agents.agents {
        link(&shared.args, &shared.tls, address)?;
    }
    let sources = args.agents.sources()?;
    for source in &sources {
        tokio::spawn(follow(source.named(), shared.clone()));
    }
    Ok(Agents { _sources: sources })
}

/// Keeps an eye on each agent that a source names or has named.
async fn follow(mut named: watch::Receiver<Named>, shared: Arc<Shared>) {
    let mut agents: HashMap<String, watch::Sender<bool>> = HashMap::new();
    loop {
        let addresses = named.borrow_and_update().addresses.clone();
        // Those whose keeper has ended, as nothing named them and they did not answer.
        agents.retain(|_, is_named| !is_named.is_closed());
        for (address, is_named) in &agents {
            is_named
                .send_if_modified(|is| std::mem::replace(is, addresses.contains(address)) != *is);
        }
        for address in addresses {
            if agents.contains_key(&address) {
                continue;
            }
            let (told, is_named) = watch::channel(true);
            let shared = shared.clone();
            tokio::spawn(Keeper::new(address.clone(), shared, is_named).keep());
            agents.insert(address, told);
        }
        tokio::select! {
            changed = named.changed() => {
                if changed.is_err() {
                    return;
                }
            }
            // A keeper may have ended in the moment in which its agent was named again.
            () = tokio::time::sleep(ASK_LATER) => {}
        }
    }
}

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

/// `chiasm drain`: has an agent refuse new jobs, and waits until none runs; or has it take them
/// again.
pub(crate) async fn drain(args: DrainArgs) -> Result<(), CliError> {
    let link = link(&args.tls, &args.tls.load()?, &args.agent)?;
    let until = Instant::now() + args.wait;
    loop {
        let running =
            link.drain(!args.resume).await.map_err(|error| CliError::Usage(error.to_string()))?;
        if running == 0 || args.resume || args.wait.is_zero() {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(CliError::Usage(format!(
                "{running} requests still run at the agent {} (--wait)",
                args.agent
            )));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// `chiasm probe`: asks an agent how it is. Fails if it does not answer, or is not as it was asked
/// to be.
pub(crate) async fn probe(args: ProbeArgs) -> Result<(), CliError> {
    let link = link(&args.tls, &args.tls.load()?, &args.agent)?;
    let status = link.status().await.map_err(|error| CliError::Usage(error.to_string()))?;
    let AgentStatus { engines, admitted, draining } = status;
    let told = format!(
        "frontends have admitted {admitted} of {engines} engines of the agent at {}",
        args.agent
    );
    match args.admitted {
        true if draining => {
            Err(CliError::Usage(format!("the agent at {} takes no new requests", args.agent)))
        }
        true if admitted < engines => Err(CliError::Usage(told)),
        _ => {
            line!("{told}");
            Ok(())
        }
    }
}

/// Keeps the workers of one agent.
struct Keeper {
    address: String,
    /// None until the agent has answered: what is named may be nobody.
    link: Option<AgentLink>,
    shared: Arc<Shared>,
    is_named: watch::Receiver<bool>,
    /// Those of its engines, by their numbers.
    workers: Vec<WorkerId>,
    /// It did not answer within [`SILENT_AFTER`] when it was asked last.
    was_silent: bool,
}

impl Keeper {
    fn new(address: String, shared: Arc<Shared>, is_named: watch::Receiver<bool>) -> Self {
        Self { address, link: None, shared, is_named, workers: Vec::new(), was_silent: false }
    }

    /// Asks the agent for its engines until nothing names it and it does not answer, or the fleet
    /// is shut down. One that can't be reached is no reason to wait with others; one that is named
    /// no more and answers goes on.
    async fn keep(mut self) {
        let mut told = None;
        let mut incarnation = None;
        loop {
            let Some(greeted) = self.greet().await else { return self.forget(incarnation) };
            let is_named = *self.is_named.borrow_and_update();
            match greeted {
                Ok(greeting) => {
                    told = None;
                    self.serve_once(&mut incarnation, &greeting);
                    let engines = if incarnation.is_some() { greeting.engines } else { 0 };
                    if !self.match_workers(engines) {
                        return;
                    }
                    self.workers
                        .iter()
                        .for_each(|worker| self.shared.fleet.set_named(*worker, is_named));
                }
                Err(error) if !is_named => {
                    // There may be thousands of addresses that never answered.
                    if !self.workers.is_empty() {
                        tracing::info!(agent = self.address, %error, "an agent is gone: nothing names it, and it does not answer");
                    }
                    self.match_workers(0);
                    self.forget(incarnation);
                    return;
                }
                Err(error) => {
                    let error = error.to_string();
                    if told.as_ref() != Some(&error) {
                        tracing::warn!(
                            agent = self.address,
                            error,
                            "no engines of this agent can be used"
                        );
                        told = Some(error);
                    }
                }
            }
            let pause = if self.workers.is_empty() || !is_named { ASK_SOON } else { ASK_LATER };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                changed = self.is_named.changed() => {
                    if changed.is_err() {
                        // Nobody looks for agents any more.
                        return;
                    }
                    if !*self.is_named.borrow() && !self.workers.is_empty() {
                        tracing::info!(agent = self.address, "an agent is named no more; it goes on while it answers");
                    }
                }
            }
        }
    }

    /// Asks the agent what it is. One without a worker here is asked in its turn, over connections
    /// that stay only if it answers. None if it can't be asked, or is named no more before its
    /// turn.
    async fn greet(&mut self) -> Option<Result<Greeting, LinkError>> {
        if !self.workers.is_empty() {
            return self.ask().await;
        }
        if !self.was_silent {
            let _turn = self.turn().await?;
            match timeout(SILENT_AFTER, self.ask()).await {
                Ok(greeted) => return greeted,
                // It may be slow, and has longer next to others that are silent.
                Err(_) => self.was_silent = true,
            }
        }
        let _turn = self.turn().await?;
        let began = Instant::now();
        let greeted = self.ask().await;
        self.was_silent = began.elapsed() >= SILENT_AFTER;
        greeted
    }

    /// Asks the agent what it is, now.
    async fn ask(&mut self) -> Option<Result<Greeting, LinkError>> {
        let link = match self.link.take() {
            Some(link) => link,
            None => match link(&self.shared.args, &self.shared.tls, &self.address) {
                Ok(link) => link.with_lending(&self.shared.lending),
                Err(error) => {
                    tracing::warn!(agent = self.address, %error, "an agent that is named can't be asked");
                    return None;
                }
            },
        };
        let greeted = link.greet().await;
        self.link = Some(link).filter(|_| greeted.is_ok() || !self.workers.is_empty());
        Some(greeted)
    }

    /// Waits for the turn of an agent that has no worker here. None if it is named no more before.
    async fn turn(&mut self) -> Option<OwnedSemaphorePermit> {
        tokio::select! {
            turn = self.shared.turns.take(self.was_silent) => turn,
            _ = self.is_named.wait_for(|is_named| !is_named) => None,
        }
    }

    /// Makes sure that an agent that is named by two addresses is served at one of them.
    /// `incarnation` is the start of it that is served here.
    fn serve_once(&self, incarnation: &mut Option<u64>, greeting: &Greeting) {
        if *incarnation == Some(greeting.incarnation) {
            return;
        }
        self.forget(incarnation.take());
        let mut serving = self.shared.serving.lock().unwrap_or_else(PoisonError::into_inner);
        match serving.get(&greeting.incarnation) {
            Some(other) => tracing::debug!(agent = self.address, other, "an agent is named twice"),
            None => {
                serving.insert(greeting.incarnation, self.address.clone());
                *incarnation = Some(greeting.incarnation);
            }
        }
    }

    fn forget(&self, incarnation: Option<u64>) {
        if let Some(incarnation) = incarnation {
            self.shared.serving.lock().unwrap_or_else(PoisonError::into_inner).remove(&incarnation);
        }
    }

    /// Has a worker for each of so many engines. False if the fleet takes none any more.
    fn match_workers(&mut self, engines: u32) -> bool {
        while self.workers.len() > engines as usize {
            self.workers.pop().into_iter().for_each(|worker| self.shared.fleet.remove(worker));
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
