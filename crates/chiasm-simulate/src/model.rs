//! What the modelled engines and the frontends before them are.

use chiasm_types::BlockSize;

use crate::error::SimulateError;

/// A modelled engine. Times are in seconds of virtual time.
///
/// A step that computes `t` tokens (prompt and decode), encodes `e` image embeddings and has `c`
/// tokens of context to read takes
///
/// ```text
/// overhead + max(weights, t · token) + e · embed + c · kv_read + p · attention
/// ```
///
/// where `p` counts, for each prompt token computed, the tokens before it; embeddings that other
/// engines have left are read at `transfer_bandwidth` instead of encoded. The first `max` is the
/// roofline of the matrix products: either reading the weights or the arithmetic is what takes
/// time.
///
/// The defaults are Qwen2.5-VL-7B in bfloat16 on a GPU of the H100's class: 3.35 TB/s and 989
/// TFLOP/s on paper, of which three quarters and two fifths are reached, 2.5 TB/s and 400 TFLOP/s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineModel {
    /// Tokens per block of the KV cache. Default 16, as vLLM.
    pub block_size: BlockSize,
    /// Blocks of the KV cache that can be used. Default 60,000: 55 GB (80 less 17 of weights and 8
    /// of activations) over 57 kB per token (2 · 28 layers · 4 heads · 128 · 2 bytes) and 16
    /// tokens.
    pub num_blocks: u32,
    /// Requests that run at once. Default 1024: vLLM's for its API server on a GPU of 70 GiB or
    /// more that is no A100 (`EngineArgs.get_batch_defaults`).
    pub max_running: usize,
    /// Tokens that a step computes at most; longer prompts are computed in chunks. Default 8192, as
    /// vLLM's there.
    pub max_batched_tokens: usize,
    /// Fixed cost of a step: scheduling, launching, sampling. Default 2 ms.
    pub overhead: f64,
    /// Reading the weights once. Default 6 ms: 15.2 GB at 2.5 TB/s.
    pub weights: f64,
    /// Arithmetic of one token. Default 1/28,000 s: 14 GFLOP at 400 TFLOP/s.
    pub token: f64,
    /// Encoding one image embedding. Default 1/70,000 s: 4 patches of 2 · 0.63 G parameters and the
    /// merger, 5.1 GFLOP at 360 TFLOP/s.
    pub embed: f64,
    /// Reading the keys and values of one token of context. Default 23 ns: 57 kB at 2.5 TB/s.
    pub kv_read: f64,
    /// Attention of one prompt token to one before it. Default 1 ns: 4 · 28 layers · 3584 FLOP at
    /// 400 TFLOP/s.
    pub attention: f64,
    /// Bytes of the keys and values of one token, of which engines give each other prompts. Default
    /// 57,344: 2 · 28 layers · 4 heads · 128 · 2 bytes.
    pub kv_bytes: f64,
    /// Bytes of a token's embedding, which engines that encode leave for others. Default 7,168:
    /// 3584 · 2 bytes.
    pub embed_bytes: f64,
    /// Bytes per second at which an engine gets keys and values from another one, or gives them to
    /// one, or reads embeddings that others have left. Default 25 GB/s: a network card of 200
    /// Gbit/s.
    pub transfer_bandwidth: f64,
    /// Time that getting a prompt from another engine takes besides its bytes. Default 1 ms: that
    /// both engines hear of it, an assumption.
    pub transfer_latency: f64,
    /// Embeddings that the encoder's cache holds. Default 114,688: vLLM gives it room for the
    /// largest item that the model takes (`compute_mm_encoder_budget`), which is a video of 14
    /// frames with 16,384 embeddings for every two. With `--limit-mm-per-prompt '{"video": 0}'` it
    /// is an image, 16,384.
    pub encoder_cache_tokens: u64,
    /// Bytes of embeddings that engines which encode leave for all; beyond them what was used
    /// longest ago is gone. Default 4 GiB, that of `chiasm serve`.
    pub embedding_store_bytes: u64,
    /// Bytes of the receiver cache. Default 4 GiB, vLLM's `--mm-processor-cache-gb 4`.
    pub receiver_cache_bytes: u64,
    /// Delay from the end of a step until the frontend has its KV events and statistics. Default 1
    /// ms.
    pub event_delay: f64,
}

/// Most frontends: each has a prefix index of the whole fleet.
const MOST_FRONTENDS: usize = 64;

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

/// The modelled frontends: a router each, and threads that turn images into tensors, first come,
/// first served. Everything else they do takes no time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FrontendModel {
    /// Frontends before the engines, 1 to 64; each request comes to one of them at random. Default
    /// 1.
    pub frontends: usize,
    /// Seconds from a frontend's choice of a worker until the other frontends know of it; they know
    /// as much later of the request's first token and of its end. `None` when they are told of
    /// nothing. Default 1 ms.
    pub announce_delay: Option<f64>,
    /// Threads per worker; all of them serve the whole fleet, whatever the number of frontends.
    /// Default 2.
    pub threads_per_worker: usize,
    /// Seconds per pixel of an image that the chosen engine's receiver cache lacks. Default 5 ns: a
    /// JPEG of 1024² takes 4.6 ms (`docs/benchmarks/pixels.md`), and its tensor has to be written
    /// into shared memory.
    pub pixel: f64,
    /// Embeddings that routers take an engine's encoder cache to hold; `None` when they know.
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
    /// Refuses what no engine could be.
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
                "an engine's step must take time; raise the overhead",
            ));
        }
        if !self.transfer_bandwidth.is_finite() || self.transfer_bandwidth <= 0.0 {
            return Err(SimulateError::Config(
                "engines must be able to give each other more than 0 bytes a second",
            ));
        }
        if self.num_blocks == 0
            || self.max_running == 0
            || self.max_batched_tokens <= self.max_running
        {
            return Err(SimulateError::Config(
                "an engine needs a block, a running request, and more batched tokens than running requests",
            ));
        }
        Ok(())
    }
}

impl FrontendModel {
    /// Refuses what no frontend could be.
    pub(crate) fn check(&self) -> Result<(), SimulateError> {
        if !(1..=MOST_FRONTENDS).contains(&self.frontends) {
            return Err(SimulateError::Config("a fleet has 1 to 64 frontends"));
        }
        if self.announce_delay.is_some_and(|delay| !delay.is_finite() || delay < 0.0) {
            return Err(SimulateError::Config("the delay of announcements must be 0 or more"));
        }
        if self.threads_per_worker == 0 || !self.pixel.is_finite() || self.pixel < 0.0 {
            return Err(SimulateError::Config(
                "a frontend needs a thread per worker and a time per pixel of 0 or more",
            ));
        }
        Ok(())
    }
}
