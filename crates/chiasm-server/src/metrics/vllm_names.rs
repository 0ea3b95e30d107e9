//! Metrics under vLLM's names, for dashboards and autoscalers made for vLLM.
//!
//! A frontend looks like one vLLM server: counts are totals over all its workers. So a program that
//! reads one series per server, such as the endpoint picker of the Gateway API Inference Extension,
//! gets the totals. The engines behind the frontend serve no metrics of their own, so nothing is
//! counted twice. Names, labels and meanings are those of `v1/metrics/loggers.py` of vLLM 0.33,
//! without the label `engine`: the metrics `chiasm_worker_…` have the values per worker.
//!
//! Histograms and counters are the same objects as those of `chiasm_…`, so a request is counted
//! once and appears under both names.

use std::borrow::Cow;
use std::sync::atomic::AtomicU64;

use chiasm_pipeline::{Pipeline, PipelineMetrics};
use chiasm_router::{EngineStats, WorkerSnapshot};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::Metrics;

/// The two settings of vLLM's KV cache that endpoint pickers read, to know a server's capacity.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CacheLabels {
    /// The block size in tokens.
    block_size: u32,
    /// The number of blocks of all workers' KV caches.
    num_gpu_blocks: u64,
}

/// The load of all engines together.
#[derive(Debug, Default, PartialEq)]
struct EngineTotals {
    running: u64,
    waiting: u64,
    /// The mean over the engines that have reported, 0 to 1.
    kv_usage: f64,
}

impl EngineTotals {
    fn from_workers(workers: &[WorkerSnapshot]) -> Self {
        let mut totals = Self::default();
        let stats: Vec<EngineStats> = workers.iter().filter_map(|worker| worker.engine).collect();
        for engine in &stats {
            totals.running += engine.running;
            totals.waiting += engine.waiting;
            totals.kv_usage += engine.kv_usage / stats.len() as f64;
        }
        totals
    }
}

/// Returns a registry of the metrics with their current values.
pub(super) fn registry(metrics: &Metrics, pipeline: &Pipeline) -> Registry {
    let name = Cow::from(pipeline.model.name.clone());
    let mut r = Registry::with_labels(std::iter::once((Cow::from("model_name"), name)));
    let workers = pipeline.fleet.router().workers();
    let EngineTotals { running, waiting, kv_usage } = EngineTotals::from_workers(&workers);
    register_gauge(
        &mut r,
        "vllm:num_requests_running",
        "Requests that engines run",
        running as f64,
    );
    register_gauge(
        &mut r,
        "vllm:num_requests_waiting",
        "Requests that wait in engines",
        waiting as f64,
    );
    register_gauge(
        &mut r,
        "vllm:kv_cache_usage_perc",
        "Part of an engine's KV cache in use, 0 to 1, mean over the engines",
        kv_usage,
    );
    let cache: Family<CacheLabels, Gauge> = Family::default();
    if let Some(labels) = cache_labels(&workers) {
        cache.get_or_create(&labels).set(1);
    }
    r.register(
        "vllm:cache_config_info",
        "Always 1; the labels have the size of all KV caches together",
        cache,
    );
    register_requests(&mut r, metrics, &pipeline.metrics);
    r
}

fn register_requests(r: &mut Registry, metrics: &Metrics, pipeline: &PipelineMetrics) {
    r.register("vllm:prompt_tokens", "Tokens of expanded prompts", metrics.prompt_tokens.clone());
    r.register("vllm:generation_tokens", "New tokens", metrics.completion_tokens.clone());
    r.register(
        "vllm:prefix_cache_queries",
        "Tokens of expanded prompts",
        metrics.prompt_tokens.clone(),
    );
    r.register(
        "vllm:prefix_cache_hits",
        "Prompt tokens that engines found in their caches",
        metrics.cached_tokens.clone(),
    );
    r.register(
        "vllm:request_success",
        "Continuations that ran to their end, by reason",
        pipeline.finished_choices(),
    );
    r.register_with_unit(
        "vllm:time_to_first_token",
        "From a request's arrival to its first token",
        Unit::Seconds,
        pipeline.time_to_first_token.clone(),
    );
    r.register_with_unit(
        "vllm:request_queue_time",
        "Time that requests waited in an engine",
        Unit::Seconds,
        pipeline.queue_time(),
    );
    r.register_with_unit(
        "vllm:inter_token_latency",
        "Time between two tokens of an answer",
        Unit::Seconds,
        pipeline.inter_token_latency.clone(),
    );
    r.register_with_unit(
        "vllm:e2e_request_latency",
        "From a request's arrival to the end of its answer, successful or not",
        Unit::Seconds,
        metrics.request_duration.clone(),
    );
}

/// Returns the size of all KV caches together. `None` if there is no worker, or if block sizes
/// differ: blocks of different sizes can't be added up.
fn cache_labels(workers: &[WorkerSnapshot]) -> Option<CacheLabels> {
    let block_size = workers.first()?.info.block_size;
    let is_uniform = workers.iter().all(|worker| worker.info.block_size == block_size);
    let num_gpu_blocks = workers.iter().map(|worker| worker.info.total_blocks).sum();
    is_uniform.then(|| CacheLabels { block_size: block_size.get() as u32, num_gpu_blocks })
}

fn register_gauge(r: &mut Registry, name: &str, help: &str, value: f64) {
    let gauge: Gauge<f64, AtomicU64> = Gauge::default();
    gauge.set(value);
    r.register(name, help, gauge);
}
