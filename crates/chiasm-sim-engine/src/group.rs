//! An engine's place in a group that steps together, modelled on `DPEngineCoreProc` in
//! `vllm/v1/engine/core.py`.
//!
//! vLLM's engines exchange the inputs of experts in each layer of each step. Here they exchange one
//! byte in each step, over TCP connections to rank 0, which has the same effect: an engine that
//! steps alone waits for the others, and notices when one of them is gone.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use chiasm_engine::wire::coordinator::{READY, decode_start};
use chiasm_engine::wire::{EngineCoreOutputs, InitMessage, Value, output};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use zeromq::SubSocket;

use crate::connection::{Connection, check_address};
use crate::error::SimError;
use crate::work::Work;

/// The interval at which all engines of a group check whether any of them has work, in steps
/// (`--dp-sync-interval`). They also check after the first step.
const SYNC_INTERVAL: u64 = 16;
/// The pause between two attempts to reach rank 0.
const CONNECT_PAUSE: Duration = Duration::from_millis(20);
/// The byte of an engine with requests.
const BUSY: u8 = 1;

/// The addresses of an engine's group, from its INIT.
#[derive(Clone, Debug)]
pub(crate) struct Membership {
    pub(crate) size: u16,
    /// The coordinator's XPUB socket.
    coordinator_input: String,
    /// The coordinator's PULL socket.
    pub(crate) coordinator_output: String,
    /// The address at which rank 0 listens.
    collective: SocketAddr,
}

impl Membership {
    /// Returns the group that an INIT names; `None` for an engine on its own.
    ///
    /// # Errors
    /// [`SimError::Group`]: a part is missing or wrong.
    pub(crate) fn from_init(init: &InitMessage) -> Result<Option<Self>, SimError> {
        let value = |name: &str| {
            let entry = init.parallel_config.iter().find(|(key, _)| key == name);
            entry.map(|(_, value)| value)
        };
        let number = |name: &'static str| {
            let number = value(name).and_then(Value::as_u64).and_then(|it| u16::try_from(it).ok());
            number.ok_or(SimError::Group(name))
        };
        if value("data_parallel_size").is_none() {
            return Ok(None);
        }
        let address = |address: &Option<String>, name| {
            let address = address.clone().ok_or(SimError::Group(name))?;
            check_address(&address)?;
            Ok::<_, SimError>(address)
        };
        let host = value("data_parallel_master_ip").and_then(Value::as_str);
        let host: Option<IpAddr> = host.and_then(|host| host.parse().ok());
        let host = host.ok_or(SimError::Group("data_parallel_master_ip"))?;
        Ok(Some(Self {
            size: number("data_parallel_size")?,
            coordinator_input: address(&init.addresses.coordinator_input, "coordinator_input")?,
            coordinator_output: address(&init.addresses.coordinator_output, "coordinator_output")?,
            collective: SocketAddr::new(host, number("data_parallel_master_port")?),
        }))
    }

    /// Subscribes to the coordinator's messages, and waits until all engines have.
    pub(crate) async fn subscribe(&self) -> Result<Connection<SubSocket>, SimError> {
        let lost = || SimError::CoordinatorLost(self.coordinator_input.clone());
        let mut connection = Connection::<SubSocket>::open(&self.coordinator_input, None).await;
        connection.socket.subscribe("").await.map_err(|_| lost())?;
        loop {
            let message = connection.receive().await.ok_or_else(lost)?;
            if message.get(0).is_some_and(|frame| *frame == READY) {
                return Ok(connection);
            }
        }
    }
}

/// Passes the coordinator's messages on to the engine's loop, until the coordinator is gone.
pub(crate) async fn follow(
    mut coordinator: Connection<SubSocket>,
    work: mpsc::UnboundedSender<Work>,
) {
    while let Some(message) = coordinator.receive().await {
        if let Some((wave, started_by)) = decode_start(&message.into_vec()) {
            let _ = work.send(Work::StartWave { wave, started_by });
        }
    }
}

/// The waves of a running engine.
pub(crate) struct Group {
    rank: u32,
    /// `true` if an idle engine starts a wave for every request, as since vLLM 0.33; `false` if
    /// only for requests of earlier waves.
    always_starts: bool,
    /// The number of the running wave, or of the next one.
    wave: i64,
    is_running: bool,
    /// The number of steps of the running wave.
    steps: u64,
    collective: Collective,
    /// The messages to the coordinator.
    reports: mpsc::UnboundedSender<Vec<Bytes>>,
}

impl Group {
    /// Waits for the other engines of the group.
    ///
    /// # Errors
    /// A connection fails.
    pub(crate) async fn form(
        membership: &Membership,
        rank: u16,
        always_starts: bool,
        reports: mpsc::UnboundedSender<Vec<Bytes>>,
    ) -> Result<Self, SimError> {
        let collective = Collective::form(membership.collective, rank, membership.size).await;
        let collective = collective.map_err(SimError::Collective)?;
        let rank = rank.into();
        Ok(Self { rank, always_starts, wave: 0, is_running: false, steps: 0, collective, reports })
    }

    /// Returns `true` in a wave: the engine then steps even without requests.
    pub(crate) fn is_running(&self) -> bool {
        self.is_running
    }

    /// Handles a request that was sent in a wave.
    pub(crate) fn on_request(&mut self, wave: i64) {
        let is_stale = wave < self.wave;
        self.wave = self.wave.max(wave);
        if !self.is_running && (self.always_starts || is_stale) {
            self.is_running = true;
            self.report(EngineCoreOutputs {
                start_wave: Some(self.wave),
                ..EngineCoreOutputs::default()
            });
        }
    }

    /// Handles the coordinator's message that a wave starts.
    pub(crate) fn on_start(&mut self, wave: i64, started_by: Option<u32>) {
        if started_by != Some(self.rank) && wave >= self.wave {
            self.wave = wave;
            self.is_running = true;
        }
    }

    /// Steps together with all engines of the group.
    ///
    /// # Errors
    /// Another engine is gone.
    pub(crate) async fn step(&mut self, has_requests: bool) -> io::Result<()> {
        let is_any_busy = self.collective.any(has_requests).await?;
        self.steps += 1;
        if self.steps != 1 && !self.steps.is_multiple_of(SYNC_INTERVAL) {
            return Ok(());
        }
        self.is_running = is_any_busy;
        if !is_any_busy {
            if self.rank == 0 {
                self.report(EngineCoreOutputs {
                    wave_complete: Some(self.wave),
                    ..EngineCoreOutputs::default()
                });
            }
            self.wave += 1;
            self.steps = 0;
        }
        Ok(())
    }

    fn report(&self, outputs: EngineCoreOutputs) {
        let outputs = EngineCoreOutputs { engine_index: self.rank, ..outputs };
        // The receiver is gone only during shutdown.
        let _ = self.reports.send(output::encode(&outputs));
    }
}

/// The connections between the engines of a group.
enum Collective {
    /// Of rank 0, to all others.
    First(Vec<TcpStream>),
    /// To rank 0.
    Other(TcpStream),
}

impl Collective {
    async fn form(address: SocketAddr, rank: u16, size: u16) -> io::Result<Self> {
        if rank > 0 {
            loop {
                match TcpStream::connect(address).await {
                    Ok(first) => {
                        first.set_nodelay(true)?;
                        return Ok(Self::Other(first));
                    }
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                        tokio::time::sleep(CONNECT_PAUSE).await;
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        let listener = TcpListener::bind(address).await?;
        let mut others = Vec::new();
        while others.len() + 1 < usize::from(size) {
            let (other, _) = listener.accept().await?;
            other.set_nodelay(true)?;
            others.push(other);
        }
        Ok(Self::First(others))
    }

    /// Waits for all engines, and returns `true` if any of them is busy.
    async fn any(&mut self, is_busy: bool) -> io::Result<bool> {
        let mut byte = [u8::from(is_busy)];
        match self {
            Self::First(others) => {
                for other in &mut *others {
                    let mut theirs = [0];
                    other.read_exact(&mut theirs).await?;
                    byte[0] |= theirs[0];
                }
                for other in others {
                    other.write_all(&byte).await?;
                }
            }
            Self::Other(first) => {
                first.write_all(&byte).await?;
                first.read_exact(&mut byte).await?;
            }
        }
        Ok(byte[0] == BUSY)
    }
}
