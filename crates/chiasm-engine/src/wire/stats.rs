//! What an engine reports about itself and about single requests.

use rmpv::Value;

use super::codec::wire_map;

/// How a prompt was computed (`PrefillStats` in `vllm/v1/metrics/stats.py`). In tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefillStats {
    /// Length of the prompt.
    pub num_prompt_tokens: u64,
    /// Tokens that were computed.
    pub num_computed_tokens: u64,
    /// Tokens that were not, because the cache held them: local and external together.
    pub num_cached_tokens: u64,
    /// The part of `num_cached_tokens` that the engine's own prefix cache held.
    pub num_local_cached_tokens: u64,
    /// The part of `num_cached_tokens` that came from another engine by KV transfer.
    pub num_external_cached_tokens: u64,
    /// Tokens that were added to the prefix cache.
    pub num_cache_creation_tokens: u64,
}

wire_map!(PrefillStats {
    num_prompt_tokens = "num_prompt_tokens",
    num_computed_tokens = "num_computed_tokens",
    num_cached_tokens = "num_cached_tokens",
    num_local_cached_tokens = "num_local_cached_tokens",
    num_external_cached_tokens = "num_external_cached_tokens",
    num_cache_creation_tokens = "num_cache_creation_tokens",
});

/// Prefix cache use since the last report (`PrefixCacheStats` in `vllm/v1/metrics/stats.py`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PrefixCacheStats {
    /// The cache was emptied by `reset_prefix_cache`.
    pub reset: bool,
    /// Requests that looked.
    pub requests: u64,
    /// Tokens that they looked for.
    pub queries: u64,
    /// Tokens that they found.
    pub hits: u64,
    /// The same for requests that had been preempted.
    pub preempted_requests: u64,
    /// The same for requests that had been preempted.
    pub preempted_queries: u64,
    /// The same for requests that had been preempted.
    pub preempted_hits: u64,
    /// `hits` by cache tier.
    pub hits_by_source: Vec<(Value, u64)>,
}

wire_map!(PrefixCacheStats {
    reset = "reset",
    requests = "requests",
    queries = "queries",
    hits = "hits",
    preempted_requests = "preempted_requests",
    preempted_queries = "preempted_queries",
    preempted_hits = "preempted_hits",
    hits_by_source = "hits_by_source",
});

/// State of an engine's scheduler (`SchedulerStats` in `vllm/v1/metrics/stats.py`).
///
/// Fields for LoRA, speculative decoding, KV connectors and profiling are passed over, and written
/// as empty: vLLM's Rust frontend takes no message without them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SchedulerStats {
    /// Requests that are being computed.
    pub num_running_reqs: u64,
    /// Requests that wait for their turn.
    pub num_waiting_reqs: u64,
    /// Requests that wait for something else.
    pub num_skipped_waiting_reqs: u64,
    /// Requests that wait for KV transfer, by stage.
    pub num_kv_fetch_reqs_by_stage: Vec<(String, u64)>,
    /// Steps since the start; counted for data parallelism only.
    pub step_counter: u64,
    /// Data parallelism only.
    pub current_wave: u64,
    /// Part of the KV cache that running requests use, 0 to 1.
    pub kv_cache_usage: f64,
    /// Prefix cache use since the last report.
    pub prefix_cache_stats: PrefixCacheStats,
}

wire_map!(SchedulerStats {
    num_running_reqs = "num_running_reqs",
    num_waiting_reqs = "num_waiting_reqs",
    num_skipped_waiting_reqs = "num_skipped_waiting_reqs",
    num_kv_fetch_reqs_by_stage = "num_kv_fetch_reqs_by_stage",
    step_counter = "step_counter",
    current_wave = "current_wave",
    kv_cache_usage = "kv_cache_usage",
    prefix_cache_stats = "prefix_cache_stats",
} passed over {
    "iteration_details" = Nil,
    "connector_prefix_cache_stats" = Nil,
    "kv_cache_eviction_events" = List,
    "spec_decoding_stats" = Nil,
    "kv_connector_stats" = Nil,
    "ec_connector_stats" = Nil,
    "waiting_lora_adapters" = Map,
    "running_lora_adapters" = Map,
    "cudagraph_stats" = Nil,
    "perf_stats" = Nil,
});
