//! Sums over the requests of each worker, for Prometheus.

use std::sync::atomic::{AtomicU64, Ordering};

use chiasm_fleet::WorkerLabel;
use chiasm_router::WorkerSnapshot;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Registry, Unit};

use super::cache_stats::{CacheStats, WorkerCacheStats};

/// The series of [`CacheStats`], one for each present worker.
#[derive(Default)]
pub(super) struct WorkerSums {
    prompt_tokens: Family<WorkerLabel, Counter>,
    cached_tokens: Family<WorkerLabel, Counter>,
    first_tokens: Family<WorkerLabel, Counter>,
    first_token_time: Family<WorkerLabel, Counter<f64, AtomicU64>>,
    queue_time: Family<WorkerLabel, Counter<f64, AtomicU64>>,
}

impl WorkerSums {
    pub(super) fn register(&self, r: &mut Registry) {
        r.register(
            "worker_prompt_tokens",
            "Tokens of prompts that a worker's engine has computed or found in its cache",
            self.prompt_tokens.clone(),
        );
        r.register(
            "worker_cached_tokens",
            "Prompt tokens that a worker's engine found in its cache",
            self.cached_tokens.clone(),
        );
        r.register(
            "worker_first_tokens",
            "Requests to which a worker gave a first token",
            self.first_tokens.clone(),
        );
        r.register_with_unit(
            "worker_time_to_first_token",
            "Sum of the times from the arrivals of those requests to their first tokens; \
             divided by their number it is the mean",
            Unit::Seconds,
            self.first_token_time.clone(),
        );
        r.register_with_unit(
            "worker_queue",
            "Sum of the times that those requests waited in the worker's engine",
            Unit::Seconds,
            self.queue_time.clone(),
        );
    }

    /// Sets the series of these workers, and removes all others.
    pub(super) fn refresh(&self, workers: &[WorkerSnapshot], stats: &CacheStats) {
        let counters = [&self.prompt_tokens, &self.cached_tokens, &self.first_tokens];
        let times = [&self.first_token_time, &self.queue_time];
        counters.into_iter().for_each(Family::clear);
        times.into_iter().for_each(Family::clear);
        for worker in workers {
            let label = worker.id.into();
            let WorkerCacheStats { tokens, requests, first_token, queued } =
                stats.worker(worker.id);
            for (family, count) in
                counters.into_iter().zip([tokens.prompt, tokens.cached, requests])
            {
                family.get_or_create(&label).inner().store(count, Ordering::Relaxed);
            }
            for (family, time) in times.into_iter().zip([first_token, queued]) {
                family
                    .get_or_create(&label)
                    .inner()
                    .store(time.as_secs_f64().to_bits(), Ordering::Relaxed);
            }
        }
    }
}
