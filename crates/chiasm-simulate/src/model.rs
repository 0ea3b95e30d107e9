//! The parameters of the modelled engines and frontends.

use chiasm_types::BlockSize;

use crate::error::SimulateError;

/// The parameters of a modelled engine. Times are in seconds of virtual time.
///
/// A step that computes `t` tokens (prompt and decode), encodes `e` image embeddings and reads `c`
/// tokens of context takes
///
/// ```text
/// overhead + max(weights, t · token) + e · embed + c · kv_read + p · attention
/// ```
///
/// where `p` is the sum, over the computed prompt tokens, of the number of tokens before each.
/// Embeddings that other engines have stored are read at `transfer_bandwidth` instead of encoded.
/// The `max` is the roofline of the matrix products: the time is limited either by reading the
/// weights or by arithmetic.
///
/// The defaults are Qwen2.5-VL-7B in bfloat16 on a GPU of the H100's class: 3.35 TB/s and 989
/// TFLOP/s on paper, of which three quarters and two fifths are reached, 2.5 TB/s and 400 TFLOP/s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineModel {
    /// Tokens per block of the KV cache. Default 16, as in vLLM.
    pub block_size: BlockSize,
    /// Usable blocks of the KV cache. Default 60,000: 55 GB (80 less 17 of weights and 8
    /// of activations) over 57 kB per token (2 · 28 layers · 4 heads · 128 · 2 bytes) and 16
    /// tokens.
    pub num_blocks: u32,
    /// The maximum number of running requests. Default 1024: vLLM's for its API server on a GPU of
    /// 70 GiB or more other than an A100 (`EngineArgs.get_batch_defaults`).
    pub max_running: usize,
    /// The maximum number of tokens that a step computes; longer prompts are computed in chunks.
    /// Default 8192, vLLM's for the same case.
    pub max_batched_tokens: usize,
    /// The fixed time of a step: scheduling, launching, sampling. Default 2 ms.
    pub overhead: f64,
    /// The time to read the weights once. Default 6 ms: 15.2 GB at 2.5 TB/s.
    pub weights: f64,
    /// The arithmetic of one token. Default 1/28,000 s: 14 GFLOP at 400 TFLOP/s.
    pub token: f64,
    /// The time to encode one image embedding. Default 1/70,000 s: 4 patches of 2 · 0.63 G
    /// parameters and the merger, 5.1 GFLOP at 360 TFLOP/s.
    pub embed: f64,
    /// The time to read the keys and values of one token of context. Default 23 ns: 57 kB at 2.5
    /// TB/s.
    pub kv_read: f64,
    /// The time of the attention of one prompt token to one before it. Default 1 ns: 4 · 28 layers
    /// · 3584 FLOP at 400 TFLOP/s.
    pub attention: f64,
    /// Bytes of the keys and values of one token, for prompts that engines transfer to each other.
    /// Default 57,344: 2 · 28 layers · 4 heads · 128 · 2 bytes.
    pub kv_bytes: f64,
    /// Bytes of a token's embedding, which encoding engines store for others. Default 7,168: 3584 ·
    /// 2 bytes.
    pub embed_bytes: f64,
    /// Bytes per second at which an engine receives or sends keys and values, or reads stored
    /// embeddings of others. Default 25 GB/s: a network card of 200 Gbit/s.
    pub transfer_bandwidth: f64,
    /// The latency of transferring a prompt between engines, besides its bytes. Default 1 ms: the
    /// notification of both engines, an assumption.
    pub transfer_latency: f64,
    /// The capacity of the encoder cache, in embeddings. Default 114,688: vLLM makes it large
    /// enough for the largest item that the model takes (`compute_mm_encoder_budget`), which is a
    /// video of 14 frames with 16,384 embeddings for every two. It is an image, 16,384, with
    /// `--limit-mm-per-prompt '{"video": 0}'`.
    pub encoder_cache_tokens: u64,
    /// The capacity of the store of embeddings that encoding engines share with the others, in
    /// bytes. Beyond it the least recently used ones are evicted. Default 4 GiB, like
    /// `chiasm serve`.
    pub embedding_store_bytes: u64,
    /// The capacity of the receiver cache, in bytes. Default 4 GiB, vLLM's
    /// `--mm-processor-cache-gb 4`.
    pub receiver_cache_bytes: u64,
    /// The delay from the end of a step until the frontend has its KV events and statistics.
    /// Default 1 ms.
    pub event_delay: f64,
}

/// The maximum number of frontends, as each has a prefix index of the whole fleet.
const MAX_FRONTENDS: usize = 64;

const BLOCK_SIZE: BlockSize = match BlockSize::new(16) {
    Some(size) => size,
    None => unreachable!(),
};

impl Default for EngineModel {
    fn default() -> Self {
        Self {
            block_size: BLOCK_SIZE,
            num_blocks: 60_000,
            max_running: 1024,
            max_batched_tokens: 8192,
            overhead: 2e-3,
            weights: 6e-3,
            token: 1.0 / 28_000.0,
            embed: 1.0 / 70_000.0,
            kv_read: 23e-9,
            attention: 1e-9,
            kv_bytes: 57_344.0,
            embed_bytes: 7168.0,
            transfer_bandwidth: 25e9,
            transfer_latency: 1e-3,
            encoder_cache_tokens: 114_688,
            embedding_store_bytes: 4 << 30,
            receiver_cache_bytes: 4 << 30,
            event_delay: 1e-3,
        }
    }
}

/// The parameters of the modelled frontends. Each has a router. Their threads turn images into
/// tensors, first come, first served; everything else takes no time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FrontendModel {
    /// The number of frontends, 1 to 64. Each request arrives at a random one. Default 1.
    pub frontends: usize,
    /// The delay from a frontend's choice of a worker until the other frontends know of it, in
    /// seconds. The request's first token and its end are announced with the same delay. `None` for
    /// no announcements. Default 1 ms.
    pub announce_delay: Option<f64>,
    /// Threads per worker. All threads serve the whole fleet, whatever the number of frontends.
    /// Default 2.
    pub threads_per_worker: usize,
    /// Seconds per pixel of an image that the chosen engine's receiver cache lacks. Default 5 ns: a
    /// JPEG of 1024² takes 4.6 ms (`docs/benchmarks/pixels.md`), and its tensor has to be written
    /// into shared memory.
    pub pixel: f64,
    /// The capacity that routers assume for an engine's encoder cache, in embeddings. `None` if
    /// they know the real capacity.
    pub believed_encoder_cache_tokens: Option<u64>,
}

impl Default for FrontendModel {
    fn default() -> Self {
        Self {
            frontends: 1,
            announce_delay: Some(1e-3),
            threads_per_worker: 2,
            pixel: 5e-9,
            believed_encoder_cache_tokens: None,
        }
    }
}

impl EngineModel {
    /// Checks that the parameters are valid.
    pub(crate) fn check(&self) -> Result<(), SimulateError> {
        let times = [
            self.overhead,
            self.weights,
            self.token,
            self.embed,
            self.kv_read,
            self.attention,
            self.event_delay,
            self.transfer_latency,
            self.kv_bytes,
            self.embed_bytes,
        ];
        if times.iter().any(|time| !time.is_finite() || *time < 0.0) {
            return Err(SimulateError::Config(
                "the times of an engine and the bytes of a token must be 0 or more",
            ));
        }
        if self.overhead + self.weights.max(self.token) <= 0.0 {
            return Err(SimulateError::Config(
                "an engine's step must take time: raise --step-overhead-ms",
            ));
        }
        if !self.transfer_bandwidth.is_finite() || self.transfer_bandwidth <= 0.0 {
            return Err(SimulateError::Config("--transfer-rate must be more than 0"));
        }
        if self.num_blocks == 0
            || self.max_running == 0
            || self.max_batched_tokens <= self.max_running
        {
            return Err(SimulateError::Config(
                "--num-blocks and --max-num-seqs must be 1 or more, and --max-num-batched-tokens \
                 more than --max-num-seqs",
            ));
        }
        Ok(())
    }
}

impl FrontendModel {
    /// Checks that the parameters are valid.
    pub(crate) fn check(&self) -> Result<(), SimulateError> {
        if !(1..=MAX_FRONTENDS).contains(&self.frontends) {
            return Err(SimulateError::Config("--frontends: a fleet has 1 to 64 frontends"));
        }
        if self.announce_delay.is_some_and(|delay| !delay.is_finite() || delay < 0.0) {
            return Err(SimulateError::Config("--announce-ms must be 0 or more"));
        }
        if self.threads_per_worker == 0 || !self.pixel.is_finite() || self.pixel < 0.0 {
            return Err(SimulateError::Config(
                "--threads-per-worker must be 1 or more, and --pixel-ns 0 or more",
            ));
        }
        Ok(())
    }
}
