//! Statistics of an engine and of single requests.

use rmpv::Value;

use super::codec::wire_map;

/// Statistics of a prefill, in tokens (`PrefillStats` in `vllm/v1/metrics/stats.py`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefillStats {
    /// The length of the prompt.
    pub num_prompt_tokens: u64,
    /// Tokens that were computed.
    pub num_computed_tokens: u64,
    /// Tokens that were cached and not computed: local and external together.
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
    /// `true` if `reset_prefix_cache` emptied the cache.
    pub reset: bool,
    /// The number of requests that queried the cache.
    pub requests: u64,
    /// The number of tokens queried.
    pub queries: u64,
    /// The number of tokens found.
    pub hits: u64,
    /// `requests` for preempted requests.
    pub preempted_requests: u64,
    /// `queries` for preempted requests.
    pub preempted_queries: u64,
    /// `hits` for preempted requests.
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

/// The state of an engine's scheduler (`SchedulerStats` in `vllm/v1/metrics/stats.py`).
///
/// Fields for LoRA, speculative decoding, KV connectors and profiling are skipped on reading. They
/// are written empty because vLLM's Rust frontend refuses messages without them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SchedulerStats {
    /// The number of running requests.
    pub num_running_reqs: u64,
    /// The number of queued requests.
    pub num_waiting_reqs: u64,
    /// The number of requests that wait for something other than the queue.
    pub num_skipped_waiting_reqs: u64,
    /// The number of requests that wait for KV transfer, by stage.
    pub num_kv_fetch_reqs_by_stage: Vec<(String, u64)>,
    /// The number of steps since the start; only counted with data parallelism.
    pub step_counter: u64,
    /// Only used by data parallelism.
    pub current_wave: u64,
    /// The part of the KV cache that running requests use, 0 to 1.
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
} written empty {
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
