//! The engine's side of the handshake, modelled on `startup_handshake` and `_make_ready_response`
//! in `vllm/v1/engine/core.py`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chiasm_engine::wire::handshake::{KvEventsConfig, identity};
use chiasm_engine::wire::{EngineReady, Hello, InitMessage};
use zeromq::{DealerSocket, SocketSend};

use crate::config::SimConfig;
use crate::connection::{Connection, check_address};
use crate::error::SimError;

/// The time after which HELLO is sent again.
///
/// A frontend answers at once, unless it was about to close the socket that accepted the
/// connection because it waited for the previous engine. libzmq's sockets would notice that; a
/// connection that `zeromq` accepted while closing can stay open and silent.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// The handshake socket between HELLO and READY.
pub(crate) struct Handshake {
    connection: Connection<DealerSocket>,
    address: String,
}

impl Handshake {
    /// Sends HELLO and waits for INIT.
    pub(crate) async fn start(config: &SimConfig) -> Result<(Self, InitMessage), SimError> {
        let (handshake, init) =
            match tokio::time::timeout(config.init_timeout, Self::greet(config)).await {
                Ok(greeted) => greeted?,
                Err(_) => {
                    return Err(SimError::NoInit {
                        handshake: config.handshake.clone(),
                        seconds: config.init_timeout.as_secs(),
                    });
                }
            };
        init.addresses
            .inputs
            .iter()
            .chain(&init.addresses.outputs)
            .try_for_each(|address| check_address(address))?;
        Ok((handshake, init))
    }

    async fn greet(config: &SimConfig) -> Result<(Self, InitMessage), SimError> {
        loop {
            let connection = Connection::open(&config.handshake, Some(identity(config.rank))).await;
            let mut handshake = Self { connection, address: config.handshake.clone() };
            match tokio::time::timeout(HELLO_TIMEOUT, handshake.hello()).await {
                Ok(init) => return Ok((handshake, init?)),
                Err(_) => tracing::debug!(
                    address = handshake.address,
                    "no answer to HELLO; sending it again"
                ),
            }
        }
    }

    async fn hello(&mut self) -> Result<InitMessage, SimError> {
        let lost_frontend = SimError::HandshakeLost(self.address.clone());
        if self.connection.socket.send(Hello::hello().encode().into()).await.is_err() {
            return Err(lost_frontend);
        }
        let message = self.connection.receive().await;
        match message.and_then(|message| message.get(0).cloned()) {
            Some(frame) => Ok(InitMessage::decode(&frame)?),
            None => Err(lost_frontend),
        }
    }

    /// Sends READY and closes the socket, as vLLM does. `configuration` is the hash of the parallel
    /// configuration of an engine in a group.
    pub(crate) async fn finish(mut self, configuration: Option<String>) -> Result<(), SimError> {
        let ready = Hello { parallel_config_hash: configuration, ..Hello::ready() };
        let sent = self.connection.socket.send(ready.encode().into()).await;
        sent.map_err(|_| SimError::HandshakeLost(self.address))
    }
}

/// Returns the engine's description for its READY response. `group_size` is 1 for an engine on its
/// own.
pub(crate) fn ready(
    config: &SimConfig,
    kv_events_config: Option<KvEventsConfig>,
    group_size: u16,
) -> EngineReady {
    let block_size = config.block_size.get() as u32;
    let kv_tokens = u64::from(config.num_blocks) * u64::from(block_size);
    EngineReady {
        max_model_len: config.max_model_len,
        num_gpu_blocks: u64::from(config.num_blocks),
        block_size,
        dtype: config.dtype.clone(),
        vllm_version: config.vllm_version.clone(),
        world_size: 1,
        data_parallel_size: group_size.into(),
        tensor_parallel_size: 1,
        pipeline_parallel_size: 1,
        decode_context_parallel_size: 1,
        data_parallel_rank: u32::from(config.rank),
        max_num_seqs: config.max_num_seqs as u32,
        max_num_batched_tokens: config.max_num_batched_tokens as u32,
        instance_id: instance_id(),
        kv_cache_size_tokens: Some(kv_tokens),
        kv_cache_max_concurrency: Some(kv_tokens as f64 / config.max_model_len as f64),
        supports_lora: config.lora.is_some(),
        max_loras: config.lora.as_ref().map_or(0, |lora| lora.max_loras),
        kv_events_config,
        effective_attention_block_size: Some(block_size),
        ..EngineReady::default()
    }
}

/// Returns a unique id for each start, also for several engines in one process.
fn instance_id() -> String {
    static STARTED: AtomicU64 = AtomicU64::new(0);
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("sim-{}-{}", since.as_nanos(), STARTED.fetch_add(1, Ordering::Relaxed))
}
