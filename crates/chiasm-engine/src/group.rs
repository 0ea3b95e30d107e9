//! Engines that step together: the ranks of a model with data and expert parallelism.
//!
//! Each rank is an engine of its own, with sockets, caches and a worker. A group only binds their
//! lives: its engines start together, and the end of one ends all, because the others would wait
//! for it in their next step. One life of all engines is a generation. Nothing of it remains in the
//! next, which has new ports.

mod coordinator;

use std::collections::BTreeSet;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chiasm_backend::ConnectError;
use chiasm_types::VllmVersion;
use chiasm_zmtp::{Pull, XPub};
use rmpv::Value;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::error::EngineError;
use crate::launch::free_ports;
use crate::wire::InitMessage;
use crate::wire::handshake::Addresses;
use crate::{EngineEndpoints, SocketDir};
use coordinator::coordinate;

/// The number of ports that vLLM takes from `_data_parallel_master_port_list` or may take after a
/// conflict; it takes the last ones first.
const LISTED_PORTS: usize = 5;

/// The oldest release of vLLM whose groups are supported.
const OLDEST_VERSION: VllmVersion = VllmVersion::minor(0, 32);

/// The maximum number of engines in a group: the peers that a coordinator's sockets accept.
pub const MAX_GROUP_SIZE: u16 = chiasm_zmtp::MAX_PEERS as u16;

/// A group of engines on one machine.
#[derive(Debug)]
pub struct EngineGroup {
    size: u16,
    max_silence: Duration,
    forming: Mutex<Forming>,
}

/// The next generation, which waits for its ranks.
#[derive(Debug)]
struct Forming {
    number: u64,
    present: BTreeSet<u16>,
    outcome: watch::Sender<Option<Result<Arc<Generation>, Arc<EngineError>>>>,
}

impl Forming {
    fn new(number: u64) -> Self {
        Self { number, present: BTreeSet::new(), outcome: watch::Sender::new(None) }
    }
}

/// One life of all engines of a group. The coordinator ends with the last reference.
#[derive(Debug)]
pub struct Generation {
    number: u64,
    size: u16,
    max_silence: Duration,
    /// The ports of the engines' collectives: first the one of the configuration, then the list.
    ports: [u16; 1 + LISTED_PORTS],
    coordinator: CoordinatorAddresses,
    /// The reason why the generation ends; `None` while it lives.
    dissolved: watch::Sender<Option<Arc<str>>>,
    /// The engines that are ready.
    ready: watch::Sender<Vec<ReadyRank>>,
    _coordinator: JoinSet<()>,
    _sockets: SocketDir,
}

/// The properties that the engines of a group must have in common.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ReadyRank {
    /// The version of vLLM.
    pub(crate) version: String,
    /// The hash of the parallel configuration.
    pub(crate) configuration: Option<String>,
}

#[derive(Debug)]
struct CoordinatorAddresses {
    /// The XPUB socket.
    input: String,
    /// The PULL socket.
    output: String,
}

impl EngineGroup {
    /// Creates a group of `size` engines, from 2 to [`MAX_GROUP_SIZE`]. It is started again when
    /// one of them has been silent for `max_silence`: an engine that is stuck in a step stops all.
    pub fn new(size: u16, max_silence: Duration) -> Arc<Self> {
        Arc::new(Self { size, max_silence, forming: Mutex::new(Forming::new(0)) })
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
            let mut forming = self.forming();
            forming.present.insert(rank);
            let outcome = forming.outcome.subscribe();
            let is_full = forming.present.len() == usize::from(self.size);
            let next = forming.number + 1;
            (outcome, is_full.then(|| mem::replace(&mut *forming, Forming::new(next))))
        };
        // A rank that stops waiting does not count.
        let waiting = Waiting { group: self, rank, outcome: outcome.clone() };
        if let Some(Forming { number, outcome, .. }) = full {
            let formed = Generation::form(number, self.size, self.max_silence).await;
            outcome.send_replace(Some(formed.map(Arc::new).map_err(Arc::new)));
        }
        let formed = outcome.wait_for(Option::is_some).await;
        let formed = formed.ok().and_then(|formed| formed.clone());
        drop(waiting);
        match formed {
            Some(Ok(generation)) => Ok(generation),
            Some(Err(error)) => Err(ConnectError::new(error)),
            None => Err(ConnectError::new("the rank that formed the group has left")),
        }
    }

    fn forming(&self) -> MutexGuard<'_, Forming> {
        self.forming.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes a rank that no longer waits for its generation.
struct Waiting<'a> {
    group: &'a EngineGroup,
    rank: u16,
    outcome: watch::Receiver<Option<Result<Arc<Generation>, Arc<EngineError>>>>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut forming = self.group.forming();
        if forming.outcome.subscribe().same_channel(&self.outcome) {
            forming.present.remove(&self.rank);
        }
    }
}

impl Generation {
    async fn form(number: u64, size: u16, max_silence: Duration) -> Result<Self, EngineError> {
        let sockets = SocketDir::new()?;
        let bind_error = |address: &str| {
            let address = address.to_owned();
            move |source| EngineError::Bind { address, source }
        };
        let input = sockets.ipc("wave-out");
        let engines = XPub::bind(&input).await.map_err(bind_error(&input))?;
        let output = sockets.ipc("wave-in");
        let reports = Pull::bind(&output).await.map_err(bind_error(&output))?;
        let ports = free_ports()?;
        let mut tasks = JoinSet::new();
        tasks.spawn(coordinate(usize::from(size), engines, reports));
        tracing::info!(generation = number, size, "a group of engines starts");
        Ok(Self {
            number,
            size,
            max_silence,
            ports,
            coordinator: CoordinatorAddresses { input, output },
            dissolved: watch::Sender::new(None),
            ready: watch::Sender::default(),
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

    /// Waits until all engines are ready, of which this is one.
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

    /// Ends the generation, unless it has ended.
    pub(crate) fn dissolve(&self, reason: &str) {
        let is_news = self.dissolved.send_if_modified(|dissolved| {
            let is_news = dissolved.is_none();
            dissolved.get_or_insert_with(|| reason.into());
            is_news
        });
        if is_news {
            tracing::info!(generation = self.number, reason, "a group of engines ends");
        }
    }

    /// Waits until the generation has ended, and returns the reason.
    pub(crate) async fn dissolved(&self) -> Arc<str> {
        let mut dissolved = self.dissolved.subscribe();
        let reason =
            dissolved.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
        reason.unwrap_or_else(|| "its group has ended".into())
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
        let group = EngineGroup::new(2, PATIENCE);
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
        let group = EngineGroup::new(2, PATIENCE);
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
            generation.dissolve("the end of the test");
            generation.dissolve("another end");
            assert_eq!(&*generation.dissolved().await, "the end of the test");
        }
    }

    #[tokio::test]
    async fn engines_are_ready_together_if_they_fit() {
        let rank = |version: &str, hash: &str| ReadyRank {
            version: version.to_owned(),
            configuration: Some(hash.to_owned()),
        };
        let group = EngineGroup::new(2, PATIENCE);
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
