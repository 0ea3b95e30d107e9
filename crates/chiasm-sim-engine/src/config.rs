//! The configuration of a simulated engine.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use chiasm_types::{BlockSize, Dtype, TokenId};

use crate::embeddings::EmbeddingFolder;
use crate::error::SimError;
use crate::faults::Faults;
use crate::pace::Pace;

/// Converts the text of an answer to tokens, usually with the model's tokenizer.
pub type TextToTokens = Arc<dyn Fn(&str) -> Vec<TokenId> + Send + Sync>;

/// The configuration of a simulated engine. [`SimConfig::new`] sets the defaults.
#[derive(Clone)]
pub struct SimConfig {
    /// The address of the frontend's handshake socket, `tcp://host:port` or `ipc://path`.
    pub handshake: String,
    /// The data-parallel rank, which is the engine's identity on the wire. 0 for a single engine.
    pub rank: u16,
    /// The number of tokens per block of the KV cache. Default 32.
    pub block_size: BlockSize,
    /// The number of blocks of the KV cache, including vLLM's null block. Default 4096. All but one
    /// must hold `max_model_len` tokens.
    pub num_blocks: u32,
    /// The size of the receiver cache in bytes (`--mm-processor-cache-gb` · 2³⁰); `None` for no
    /// such cache. Default 1 GiB.
    pub receiver_cache_bytes: Option<u64>,
    /// The capacity of the encoder cache, in embeddings. Default 16384.
    pub encoder_cache_tokens: usize,
    /// The maximum number of tokens of prompt and answer together. Default 8192.
    pub max_model_len: usize,
    /// The maximum number of running requests. Default 128.
    pub max_num_seqs: usize,
    /// The maximum number of tokens per step; longer prompts are computed in chunks. Default 8192.
    pub max_num_batched_tokens: usize,
    /// The speed of the simulated model.
    pub pace: Pace,
    /// The sockets for KV events; `None` for no events. Default: two free ports of the loopback
    /// interface.
    pub kv_events: Option<KvEvents>,
    /// The version of vLLM that the engine reports. Default 0.32.0.
    pub vllm_version: String,
    /// The model's element type as the engine reports it. Default `bfloat16`.
    pub dtype: String,
    /// Converts the text of an answer to tokens. Default: one token per byte, with the byte's value
    /// as its id.
    pub reply: TextToTokens,
    /// The token that ends an answer; `None` for the request's own EOS token, if it has one.
    /// Default `None`.
    pub eos: Option<TokenId>,
    /// The size of the vocabulary, for log probabilities. Default 151 936, as Qwen2.
    pub vocab_size: u32,
    /// The rules that image tensors must follow.
    pub images: ImageRules,
    /// `true` for an engine with a KV connector, which prefills for other engines or decodes their
    /// prompts. Default `false`.
    pub kv_connector: bool,
    /// The folder of embeddings that engines share; `None` without an EC connector. Default `None`.
    pub embeddings: Option<EmbeddingFolder>,
    /// The address of the side channel for prompts that this engine has computed for others, at a
    /// free port. Default: a loopback address.
    pub side_channel: IpAddr,
    /// The time for which a prompt is kept for another engine. Default 30 s, vLLM's
    /// `kv_lease_duration`.
    pub prompt_lease: Duration,
    /// The limits for LoRA adapters; `None` for an engine without `--enable-lora`. Such an engine
    /// reports that it supports no adapters, and computes requests with an adapter as if they had
    /// none. Default `None`.
    pub lora: Option<LoraLimits>,
    /// `true` for an engine with Chiasm's plugin, which has the method `chiasm_attach` and accepts
    /// handles of slots. Without it, a handle makes the engine stop receiving, as any vLLM. Default
    /// `true`.
    pub plugin: bool,
    /// `true` to compare the bytes of lent slots with their first contents, in each step that
    /// admits a request with the item or encodes the image, and before a lease is returned. If the
    /// bytes differ the engine dies. Each comparison is one pass of BLAKE3 over the tensor, once
    /// per step. Default `true`.
    pub verify_slots: bool,
    /// The maximum wait for the frontend's INIT. Default 5 minutes, as vLLM.
    pub init_timeout: Duration,
    /// The file for the times at which outputs are ready to be sent, for measurements: nanoseconds
    /// since 1970, each as eight bytes, little endian. Default `None`.
    pub step_log: Option<PathBuf>,
    /// The file for the times at which requests arrive, before they are decoded, in the same
    /// format. Default `None`.
    pub request_log: Option<PathBuf>,
    /// The failures to produce. Default none.
    pub faults: Faults,
}

/// The sockets for publishing and replaying KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEvents {
    /// The address of the PUB socket: `tcp://127.0.0.1:port`, with 0 for a free port, or
    /// `tcp://*:port` for all interfaces.
    pub endpoint: String,
    /// The address of the ROUTER socket for replays, in the same form; `None` for no replay.
    pub replay_endpoint: Option<String>,
    /// The first frame of every message. Default empty.
    pub topic: String,
    /// The number of batches that can be replayed. Default 10 000, as vLLM.
    pub buffer_steps: usize,
}

impl Default for KvEvents {
    fn default() -> Self {
        Self {
            endpoint: "tcp://127.0.0.1:0".to_owned(),
            replay_endpoint: Some("tcp://127.0.0.1:0".to_owned()),
            topic: String::new(),
            buffer_steps: 10_000,
        }
    }
}

/// The limits for LoRA adapters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraLimits {
    /// The maximum number of adapters in one step, as the engine reports it. Default 1, as vLLM.
    pub max_loras: u32,
    /// The maximum number of loaded adapters. Default 1, as vLLM's default of `max_loras`.
    pub max_cpu_loras: usize,
    /// The maximum rank. Default 16, as vLLM.
    pub max_rank: u64,
}

impl Default for LoraLimits {
    fn default() -> Self {
        Self { max_loras: 1, max_cpu_loras: 1, max_rank: 16 }
    }
}

/// The rules for the tensors of a Qwen-VL image. A violation kills the engine, as a wrong shape
/// kills vLLM's worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageRules {
    /// The accepted element types of `pixel_values`. Default: uint8 and the three float types.
    pub dtypes: Vec<Dtype>,
    /// The number of patches that are merged into one embedding, per side. Default 2.
    pub merge: u32,
    /// The number of frames per patch: a row has `3 · temporal · patch²` values. Default 2.
    pub temporal: u32,
    /// `true` if a placeholder must have exactly as many embedding tokens as the image has
    /// embeddings. vLLM accepts other lengths and computes wrong answers; the simulator dies
    /// instead, so that tests notice. Default `true`.
    pub strict_placeholders: bool,
}

impl Default for ImageRules {
    fn default() -> Self {
        Self {
            dtypes: vec![Dtype::U8, Dtype::F16, Dtype::BF16, Dtype::F32],
            merge: 2,
            temporal: 2,
            strict_placeholders: true,
        }
    }
}

impl SimConfig {
    /// Creates the default configuration for a frontend at this handshake address.
    pub fn new(handshake: impl Into<String>) -> Self {
        Self {
            handshake: handshake.into(),
            rank: 0,
            block_size: DEFAULT_BLOCK_SIZE,
            num_blocks: 4096,
            receiver_cache_bytes: Some(1 << 30),
            encoder_cache_tokens: 16_384,
            max_model_len: 8192,
            max_num_seqs: 128,
            max_num_batched_tokens: 8192,
            pace: Pace::default(),
            kv_events: Some(KvEvents::default()),
            vllm_version: "0.32.0".to_owned(),
            dtype: "bfloat16".to_owned(),
            reply: Arc::new(|text| text.bytes().map(|byte| TokenId(u32::from(byte))).collect()),
            eos: None,
            vocab_size: 151_936,
            images: ImageRules::default(),
            kv_connector: false,
            embeddings: None,
            side_channel: IpAddr::V4(Ipv4Addr::LOCALHOST),
            prompt_lease: Duration::from_secs(30),
            lora: None,
            plugin: true,
            verify_slots: true,
            init_timeout: Duration::from_secs(300),
            step_log: None,
            request_log: None,
            faults: Faults::default(),
        }
    }

    /// Checks the configuration as an engine does at its start.
    ///
    /// # Errors
    /// Returns [`SimError::Config`] with the problem.
    pub(crate) fn check(&self) -> Result<(), SimError> {
        let usable =
            (self.num_blocks.saturating_sub(1) as usize).saturating_mul(self.block_size.get());
        let problem = if usable < self.max_model_len {
            format!(
                "the KV cache holds {usable} tokens, fewer than max_model_len {}; raise num_blocks \
                or lower max_model_len",
                self.max_model_len
            )
        } else if self.max_model_len == 0
            || self.max_num_seqs == 0
            || self.max_num_batched_tokens == 0
        {
            "max_model_len, max_num_seqs and max_num_batched_tokens must be at least 1".to_owned()
        } else if self.images.merge == 0 || self.images.temporal == 0 {
            "images: merge and temporal must be at least 1".to_owned()
        } else {
            return Ok(());
        };
        Err(SimError::Config(problem))
    }
}

const DEFAULT_BLOCK_SIZE: BlockSize = match BlockSize::new(32) {
    Some(size) => size,
    None => unreachable!(),
};

impl fmt::Debug for SimConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // `reply` is a function without a debug form.
        f.debug_struct("SimConfig")
            .field("handshake", &self.handshake)
            .field("rank", &self.rank)
            .field("block_size", &self.block_size)
            .field("num_blocks", &self.num_blocks)
            .field("receiver_cache_bytes", &self.receiver_cache_bytes)
            .field("max_model_len", &self.max_model_len)
            .field("max_num_seqs", &self.max_num_seqs)
            .field("max_num_batched_tokens", &self.max_num_batched_tokens)
            .field("pace", &self.pace)
            .field("kv_events", &self.kv_events)
            .field("vllm_version", &self.vllm_version)
            .field("images", &self.images)
            .field("plugin", &self.plugin)
            .field("verify_slots", &self.verify_slots)
            .field("faults", &self.faults)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_smaller_than_one_request_is_refused() {
        let mut config = SimConfig::new("tcp://127.0.0.1:1");
        assert!(config.check().is_ok());
        // 256 blocks of 32 tokens, one of them the null block.
        config.num_blocks = 256;
        assert!(matches!(config.check(), Err(SimError::Config(_))));
        config.max_model_len = 255 * 32;
        assert!(config.check().is_ok());
    }
}
