//! Updates of the metrics' gauges from the fleet's state.

use chiasm_router::WorkerSnapshot;
use prometheus_client::metrics::family::Family;

use crate::Fleet;
use crate::metrics::{BreakerLabels, ConditionLabels, KnowledgeLabels, WorkerLabel};

impl Fleet {
    /// Updates all gauges. `workers` is the router's current snapshot.
    pub fn refresh_metrics(&self, workers: &[WorkerSnapshot]) {
        let metrics = &self.metrics;
        metrics.workers.set(workers.len() as i64);
        metrics.unnamed.set(self.unnamed().len() as i64);
        // Series of removed workers must not stay.
        metrics.worker_knowledge.clear();
        let worker_gauges = [
            &metrics.worker_blocks,
            &metrics.worker_pending,
            &metrics.worker_running,
            &metrics.worker_waiting,
            &metrics.worker_max_running,
            &metrics.worker_total_blocks,
            &metrics.worker_media_threads,
        ];
        let arena_gauges = [
            &metrics.arena_reserved,
            &metrics.arena_used,
            &metrics.arena_slots,
            &metrics.arena_leases,
        ];
        worker_gauges.into_iter().chain(arena_gauges).for_each(Family::clear);
        [&metrics.worker_kv_usage, &metrics.worker_media_pending]
            .into_iter()
            .for_each(Family::clear);
        for worker in workers {
            let labels =
                KnowledgeLabels { worker: worker.id.to_string(), state: worker.knowledge.name() };
            metrics.worker_knowledge.get_or_create(&labels).set(1);
            let label = WorkerLabel::from(worker.id);
            metrics.worker_blocks.get_or_create(&label).set(worker.index.blocks as i64);
            metrics.worker_pending.get_or_create(&label).set(worker.pending_tokens as i64);
            let engine = worker.engine.unwrap_or_default();
            metrics.worker_running.get_or_create(&label).set(engine.running as i64);
            metrics.worker_waiting.get_or_create(&label).set(engine.waiting as i64);
            metrics.worker_kv_usage.get_or_create(&label).set(engine.kv_usage);
            metrics.worker_total_blocks.get_or_create(&label).set(worker.info.total_blocks as i64);
        }
        metrics.kv_events.clear();
        for (id, counts) in self.kv_event_counts() {
            metrics.kv_events.set(&id.into(), counts);
        }
        metrics.worker_condition.clear();
        metrics.worker_breaker.clear();
        for worker in self.workers() {
            // Creates the counters together with their worker: Prometheus sees no increase in a
            // series that appears with its first event.
            drop(metrics.engine_deaths.get_or_create(&worker.id.into()));
            drop(metrics.distrusted.get_or_create(&worker.id.into()));
            let labels = ConditionLabels {
                worker: worker.id.to_string(),
                condition: worker.condition().name(),
            };
            metrics.worker_condition.get_or_create(&labels).set(1);
            let labels =
                BreakerLabels { worker: worker.id.to_string(), state: worker.breaker().name() };
            metrics.worker_breaker.get_or_create(&labels).set(1);
            let label = WorkerLabel::from(worker.id);
            let media = worker.load().media.unwrap_or_default();
            metrics.worker_media_threads.get_or_create(&label).set(i64::from(media.threads));
            metrics.worker_media_pending.get_or_create(&label).set(media.total().as_secs_f64());
            metrics
                .worker_max_running
                .get_or_create(&label)
                .set(worker.backend.capabilities().max_running as i64);
            let usage = worker.backend.memory().unwrap_or_default();
            metrics.arena_reserved.get_or_create(&label).set(usage.reserved as i64);
            metrics.arena_used.get_or_create(&label).set(usage.used as i64);
            metrics.arena_slots.get_or_create(&label).set(usage.slots as i64);
            metrics.arena_leases.get_or_create(&label).set(usage.leases as i64);
        }
        let index = self.router().index_totals();
        metrics.index_blocks.set(index.blocks as i64);
        metrics.index_entries.set(index.entries as i64);
        metrics.index_bytes.set(index.bytes as i64);
        metrics.index_shed.set(index.shed as i64);
    }
}
