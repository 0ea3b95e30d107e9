//! Engines that step together: the ranks of a model with data and expert parallelism.
//!
//! Each rank is an engine of its own, with sockets, caches and a worker. The engines of a group
//! start together. When one ends, all end: the others would wait for it in their next step. A
//! *generation* is one such start of all engines; the next one has new ports and sockets.

mod coordinator;

use std::collections::BTreeSet;
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chiasm_backend::ConnectError;
use chiasm_types::VllmVersion;
use chiasm_zmtp::{Pull, XPub};
use rmpv::Value;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::error::EngineError;
use crate::launch::free_ports;
use crate::wire::InitMessage;
use crate::wire::handshake::Addresses;
use crate::{EngineEndpoints, SocketDir};
use coordinator::coordinate;

/// The length of `_data_parallel_master_port_list`. vLLM uses the last two ports; the others are
/// spares for ports in use.
const LISTED_PORTS: usize = 5;

/// The oldest release of vLLM whose groups are supported.
const OLDEST_VERSION: VllmVersion = VllmVersion::minor(0, 32);

/// The time after which a rank that waits for the others logs which are missing.
const JOIN_REPORT: Duration = Duration::from_secs(30);

/// The maximum number of engines in a group: the peers that a coordinator's sockets accept.
pub const MAX_GROUP_SIZE: u16 = chiasm_zmtp::MAX_PEERS as u16;

/// A group of engines on one machine.
#[derive(Debug)]
pub struct EngineGroup {
    /// The number of the group among those of this process, for the log.
    index: u32,
    size: u16,
    max_silence: Duration,
    pending: Mutex<PendingGeneration>,
}

/// The result of forming a generation; `None` while its ranks wait.
type Outcome = Option<Result<Arc<Generation>, Arc<EngineError>>>;

/// The next generation, which waits for its ranks.
#[derive(Debug)]
struct PendingGeneration {
    number: u64,
    present: BTreeSet<u16>,
    outcome: watch::Sender<Outcome>,
}

impl PendingGeneration {
    fn new(number: u64) -> Self {
        Self { number, present: BTreeSet::new(), outcome: watch::Sender::new(None) }
    }
}

/// One life of all engines of a group. The coordinator ends with the last reference.
#[derive(Debug)]
pub struct Generation {
    /// The number of the group.
    group: u32,
    number: u64,
    size: u16,
    max_silence: Duration,
    /// The ports of the engines' collectives: first the one of the configuration, then the list.
    ports: [u16; 1 + LISTED_PORTS],
    coordinator: CoordinatorAddresses,
    /// The rank that has ended the generation, and why; `None` while it lives.
    dissolved: watch::Sender<Option<(u16, Arc<str>)>>,
    /// The engines that are ready.
    ready: watch::Sender<Vec<ReadyRank>>,
    connections: Mutex<Connections>,
    _coordinator: JoinSet<()>,
    _sockets: SocketDir,
}

/// Ends the connection to an engine, for this reason.
pub(crate) type EndConnection = Box<dyn Fn(&Arc<str>) + Send + Sync>;

/// The connections to engines that are ready, by rank.
#[derive(Default)]
struct Connections(Vec<(u16, EndConnection)>);

impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(rank, _)| rank)).finish()
    }
}

/// The properties that the engines of a group must have in common.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ReadyRank {
    /// The version of vLLM.
    pub(crate) version: String,
    /// The hash of the parallel configuration.
    pub(crate) config_hash: Option<String>,
}

#[derive(Debug)]
struct CoordinatorAddresses {
    /// The XPUB socket.
    input: String,
    /// The PULL socket.
    output: String,
}

impl EngineGroup {
    /// Creates a group of `size` engines, from 2 to [`MAX_GROUP_SIZE`]. `index` is its number in
    /// the log. If an engine is silent for `max_silence`, the group restarts: an engine that is
    /// stuck in a step blocks all others.
    pub fn new(index: u32, size: u16, max_silence: Duration) -> Arc<Self> {
        let pending = Mutex::new(PendingGeneration::new(0));
        Arc::new(Self { index, size, max_silence, pending })
    }

    /// Returns the number of engines.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Waits until all ranks have called this, and returns their next generation.
    ///
    /// # Errors
    /// The coordinator's sockets can't be bound, or there are no free ports.
    pub(crate) async fn join(&self, rank: u16) -> Result<Arc<Generation>, ConnectError> {
        let (mut outcome, full) = {
            let mut pending = self.pending();
            pending.present.insert(rank);
            let outcome = pending.outcome.subscribe();
            let is_full = pending.present.len() == usize::from(self.size);
            let next = pending.number + 1;
            (outcome, is_full.then(|| mem::replace(&mut *pending, PendingGeneration::new(next))))
        };
        // A rank that stops waiting does not count.
        let guard = JoinGuard { group: self, rank, outcome: outcome.clone() };
        if let Some(PendingGeneration { number, outcome, .. }) = full {
            let formed = Generation::form(self, number).await;
            outcome.send_replace(Some(formed.map(Arc::new).map_err(Arc::new)));
        }
        let formed = self.wait(rank, &mut outcome).await;
        drop(guard);
        match formed {
            Some(Ok(generation)) => Ok(generation),
            Some(Err(error)) => Err(ConnectError::new(error)),
            None => Err(ConnectError::new("the rank that formed the group has left")),
        }
    }

    /// Waits for the outcome, and logs the missing ranks.
    async fn wait(&self, rank: u16, outcome: &mut watch::Receiver<Outcome>) -> Outcome {
        loop {
            match timeout(JOIN_REPORT, outcome.wait_for(Option::is_some)).await {
                Ok(formed) => return formed.ok().and_then(|formed| formed.clone()),
                Err(_) => {
                    let present = self.pending().present.clone();
                    let is_missing = |rank: &u16| !present.contains(rank);
                    let missing: Vec<u16> = (0..self.size).filter(is_missing).collect();
                    let group = self.index;
                    tracing::info!(group, rank, ?missing, "waiting for other ranks of the group");
                }
            }
        }
    }

    fn pending(&self) -> MutexGuard<'_, PendingGeneration> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes a rank that no longer waits for its generation.
struct JoinGuard<'a> {
    group: &'a EngineGroup,
    rank: u16,
    outcome: watch::Receiver<Outcome>,
}

impl Drop for JoinGuard<'_> {
    fn drop(&mut self) {
        let mut pending = self.group.pending();
        if pending.outcome.subscribe().same_channel(&self.outcome) {
            pending.present.remove(&self.rank);
        }
    }
}

impl Generation {
    async fn form(group: &EngineGroup, number: u64) -> Result<Self, EngineError> {
        let &EngineGroup { index, size, max_silence, .. } = group;
        let sockets = SocketDir::new()?;
        let bind_error = |address: &str| {
            let address = address.to_owned();
            move |source| EngineError::Bind { address, source }
        };
        let input = sockets.ipc("wave-out");
        let publisher = XPub::bind(&input).await.map_err(bind_error(&input))?;
        let output = sockets.ipc("wave-in");
        let reports = Pull::bind(&output).await.map_err(bind_error(&output))?;
        let ports = free_ports()?;
        let mut tasks = JoinSet::new();
        tasks.spawn(coordinate(usize::from(size), publisher, reports));
        tracing::info!(group = index, generation = number, size, "a group of engines starts");
        Ok(Self {
            group: index,
            number,
            size,
            max_silence,
            ports,
            coordinator: CoordinatorAddresses { input, output },
            dissolved: watch::Sender::new(None),
            ready: watch::Sender::default(),
            connections: Mutex::default(),
            _coordinator: tasks,
            _sockets: sockets,
        })
    }

    /// Returns the silence of one engine after which the generation ends.
    pub(crate) fn max_silence(&self) -> Duration {
        self.max_silence
    }

    /// Returns the message that tells an engine its sockets and its group.
    pub(crate) fn init(&self, endpoints: &EngineEndpoints) -> InitMessage {
        let CoordinatorAddresses { input, output } = &self.coordinator;
        let InitMessage { addresses, .. } = InitMessage::new(&endpoints.input, &endpoints.output);
        let addresses = Addresses {
            coordinator_input: Some(input.clone()),
            coordinator_output: Some(output.clone()),
            ..addresses
        };
        let [port, listed @ ..] = self.ports;
        let parallel_config = [
            ("data_parallel_master_ip", "127.0.0.1".into()),
            ("data_parallel_master_port", port.into()),
            ("_data_parallel_master_port_list", Value::Array(listed.map(Value::from).to_vec())),
            // 0: no store for elastic expert parallelism.
            ("_coord_store_port", 0.into()),
            ("data_parallel_size", self.size.into()),
        ];
        let parallel_config =
            parallel_config.map(|(name, value): (&str, Value)| (name.to_owned(), value)).to_vec();
        InitMessage { addresses, parallel_config }
    }

    /// Records that an engine is ready, and waits for the others.
    ///
    /// # Errors
    /// [`EngineError::Group`]: the engine is too old, or the engines do not fit together.
    pub(crate) async fn all_ready(&self, rank: ReadyRank) -> Result<(), EngineError> {
        if VllmVersion::parse(&rank.version).is_some_and(|version| version < OLDEST_VERSION) {
            let ReadyRank { version, .. } = rank;
            let VllmVersion { major, minor, .. } = OLDEST_VERSION;
            return Err(EngineError::Group(format!(
                "vLLM {version} is too old for it; use {major}.{minor} or a later one"
            )));
        }
        self.ready.send_modify(|ready| ready.push(rank));
        let mut ready = self.ready.subscribe();
        let size = usize::from(self.size);
        // The sender is in `self`, so waiting can't fail.
        let Ok(ready) = ready.wait_for(|ready| ready.len() >= size).await else { return Ok(()) };
        if ready.windows(2).any(|pair| pair[0] != pair[1]) {
            let problem = "its engines have different versions of vLLM, or different flags";
            return Err(EngineError::Group(problem.to_owned()));
        }
        Ok(())
    }

    /// Adds the connection to an engine, which ends with the generation.
    pub(crate) fn add_connection(&self, rank: u16, end: EndConnection) {
        self.connections().0.push((rank, end));
        let dissolved = self.dissolved.borrow().clone();
        if let Some((cause, reason)) = dissolved {
            self.end_connections(cause, &reason);
        }
    }

    /// Ends the generation and the connections to all engines but `rank`, which is the cause.
    /// Without effect if the generation has ended.
    pub(crate) fn dissolve(&self, rank: u16, why: &str) {
        let reason: Arc<str> = format!("rank {rank}: {why}").into();
        let is_first = self.dissolved.send_if_modified(|dissolved| {
            let is_first = dissolved.is_none();
            dissolved.get_or_insert_with(|| (rank, reason.clone()));
            is_first
        });
        if is_first {
            let Self { group, number: generation, .. } = self;
            tracing::info!(group, generation, %reason, "a group of engines ends");
            self.end_connections(rank, &reason);
        }
    }

    /// Ends the connections to all engines but the one of rank `cause`, which ends by itself.
    fn end_connections(&self, cause: u16, reason: &Arc<str>) {
        // Each call comes back to this generation, so the lock must not be held.
        let connections = mem::take(&mut self.connections().0);
        for (rank, end) in connections {
            if rank != cause {
                end(reason);
            }
        }
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the generation has ended, and returns the reason.
    pub(crate) async fn dissolved(&self) -> Arc<str> {
        let mut dissolved = self.dissolved.subscribe();
        let ended = dissolved.wait_for(Option::is_some).await.ok().and_then(|it| it.clone());
        ended.map_or_else(|| "its group has ended".into(), |(_, reason)| reason)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::join;
    use futures_util::{FutureExt, poll};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn ranks_wait_for_each_other() {
        let group = EngineGroup::new(0, 2, PATIENCE);
        let mut first = group.join(0).boxed();
        assert!(poll!(&mut first).is_pending());
        // A rank that leaves and returns counts once.
        drop(first);
        let mut second = group.join(1).boxed();
        assert!(poll!(&mut second).is_pending());
        let (first, second) = join(group.join(0), second).await;
        let (first, second) = (first.unwrap(), second.unwrap());
        assert!(Arc::ptr_eq(&first, &second));
        let (next, other) = join(group.join(1), group.join(0)).await;
        assert!(Arc::ptr_eq(&next.unwrap(), &other.unwrap()));
    }

    #[tokio::test]
    async fn generations_share_nothing() {
        let group = EngineGroup::new(0, 2, PATIENCE);
        let endpoints = EngineEndpoints {
            handshake: "tcp://127.0.0.1:1".to_owned(),
            input: "ipc:///tmp/in".to_owned(),
            output: "ipc:///tmp/out".to_owned(),
        };
        let mut seen = BTreeSet::new();
        for number in 0..3 {
            let (generation, _) = join(group.join(0), group.join(1)).await;
            let generation = generation.unwrap();
            assert_eq!(generation.number, number);
            let InitMessage { addresses, parallel_config } = generation.init(&endpoints);
            assert_eq!(
                (addresses.inputs, addresses.outputs),
                (vec![endpoints.input.clone()], vec![endpoints.output.clone()],)
            );
            assert!(seen.insert(addresses.coordinator_input.unwrap()));
            assert!(seen.insert(addresses.coordinator_output.unwrap()));
            let value = |name| {
                let entry = parallel_config.iter().find(|(key, _)| key == name);
                entry.map(|(_, value)| value.clone()).unwrap()
            };
            assert_eq!(value("data_parallel_size"), 2.into());
            // vLLM replaces each setting by the value, so `true` or `false` would end the engine.
            assert!(parallel_config.iter().all(|(_, value)| !value.is_bool()));
            let listed = value("_data_parallel_master_port_list");
            let mut ports = listed.as_array().unwrap().clone();
            ports.push(value("data_parallel_master_port"));
            ports.sort_by_key(Value::as_u64);
            ports.dedup();
            assert_eq!(ports.len(), 1 + LISTED_PORTS);
            generation.dissolve(1, "the end of the test");
            generation.dissolve(0, "another end");
            assert_eq!(&*generation.dissolved().await, "rank 1: the end of the test");
        }
    }

    #[tokio::test]
    async fn end_of_one_connection_ends_the_others_first() {
        let group = EngineGroup::new(0, 2, PATIENCE);
        let (generation, _) = join(group.join(0), group.join(1)).await;
        let generation = generation.unwrap();
        let ended = Arc::new(Mutex::new(Vec::new()));
        let add = |rank| {
            let ended = ended.clone();
            let again = Arc::downgrade(&generation);
            let end = move |reason: &Arc<str>| {
                ended.lock().unwrap().push((rank, reason.to_string()));
                // As the end of a connection does.
                again.upgrade().unwrap().dissolve(rank, "too late");
            };
            generation.add_connection(rank, Box::new(end));
        };
        add(0);
        add(1);
        generation.dissolve(1, "it was killed");
        let other = (0, "rank 1: it was killed".to_owned());
        assert_eq!(*ended.lock().unwrap(), std::slice::from_ref(&other));
        // An engine that was about to be ready.
        add(0);
        assert_eq!(*ended.lock().unwrap(), [other.clone(), other]);
    }

    #[tokio::test]
    async fn engines_are_ready_together_if_they_fit() {
        let rank = |version: &str, hash: &str| ReadyRank {
            version: version.to_owned(),
            config_hash: Some(hash.to_owned()),
        };
        let group = EngineGroup::new(0, 2, PATIENCE);
        let generation = async || join(group.join(0), group.join(1)).await.0.unwrap();
        let formed = generation().await;
        let mut first = formed.all_ready(rank("0.33.0", "a")).boxed();
        assert!(poll!(&mut first).is_pending());
        formed.all_ready(rank("0.33.0", "a")).await.unwrap();
        first.await.unwrap();
        for other in [rank("0.33.0", "b"), rank("0.32.0", "a")] {
            let formed = generation().await;
            let ready = join(formed.all_ready(rank("0.33.0", "a")), formed.all_ready(other)).await;
            assert!(matches!(ready, (Err(EngineError::Group(_)), Err(EngineError::Group(_)))));
        }
        let error = generation().await.all_ready(rank("0.31.2", "a")).await.unwrap_err();
        assert!(error.to_string().contains("0.31.2 is too old"), "{error}");
    }
}
