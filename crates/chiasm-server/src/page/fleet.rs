//! The workers as pages show them.

use std::collections::BTreeMap;

use chiasm_backend::{Locality, MemoryUsage};
use chiasm_fleet::{BreakerState, Worker};
use chiasm_pipeline::Pipeline;
use chiasm_router::WorkerSnapshot;
use chiasm_types::{Role, WorkerId};
use serde::Serialize;

/// A worker.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Row {
    id: String,
    /// The engine and its version.
    runs: Option<String>,
    /// The stages of requests that the worker computes; `None` for all.
    role: Option<&'static str>,
    /// The address of the worker's machine; `None` for this one.
    machine: Option<String>,
    condition: Option<&'static str>,
    /// The state of the circuit breaker, open or half-open; `None` if it is closed.
    breaker: Option<&'static str>,
    knowledge: &'static str,
    draining: bool,
    /// `true` if its agent is no longer named.
    unnamed: bool,
    running: Option<u64>,
    waiting: Option<u64>,
    /// Requests of this frontend at the worker.
    requests: usize,
    /// The part of the KV cache that running requests use, 0 to 1.
    kv_usage: Option<f64>,
    known_blocks: usize,
    total_blocks: u64,
    promised_blocks: usize,
    pending_tokens: u64,
    hit_rate: Option<f64>,
    /// The maximum size of the worker's receiver cache, in bytes.
    receiver_cache_bytes: u64,
    arena: Option<Arena>,
}

/// The shared memory of a worker, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Arena {
    reserved: u64,
    used: u64,
    slots: usize,
}

/// Returns every worker, ordered by id.
pub(super) fn rows(pipeline: &Pipeline) -> BTreeMap<WorkerId, Row> {
    let fleet = &pipeline.fleet;
    let workers = fleet.router().workers();
    let cache_stats = pipeline.metrics.cache_stats(&workers);
    let unnamed = fleet.unnamed();
    let present: BTreeMap<_, _> =
        fleet.workers().into_iter().map(|worker| (worker.id, worker)).collect();
    let row = |snapshot: &WorkerSnapshot| {
        let hit_rate = cache_stats.worker(snapshot.id).tokens.hit_rate();
        let worker = present.get(&snapshot.id).map(|worker| &**worker);
        (snapshot.id, Row::new(snapshot, worker, unnamed.contains(&snapshot.id), hit_rate))
    };
    workers.iter().map(row).collect()
}

impl Row {
    fn new(
        worker: &WorkerSnapshot,
        present: Option<&Worker>,
        unnamed: bool,
        hit_rate: Option<f64>,
    ) -> Self {
        let capabilities = present.map(|worker| worker.backend.capabilities());
        let engine = worker.engine;
        Self {
            id: worker.id.to_string(),
            runs: capabilities.map(|capabilities| capabilities.engine.clone()),
            role: Some(worker.info.role).filter(|role| *role != Role::Aggregated).map(Role::name),
            machine: capabilities.and_then(|capabilities| match &capabilities.locality {
                Locality::Here => None,
                Locality::Host(address) => Some(address.to_string()),
                Locality::Unknown => Some("unknown".to_owned()),
            }),
            condition: present.map(|worker| worker.condition().name()),
            breaker: present
                .map(|worker| worker.breaker())
                .filter(|breaker| *breaker != BreakerState::Closed)
                .map(BreakerState::name),
            knowledge: worker.knowledge.name(),
            draining: engine.is_some_and(|engine| engine.draining),
            unnamed,
            running: engine.map(|engine| engine.running),
            waiting: engine.map(|engine| engine.waiting),
            requests: worker.requests,
            // Rounded to what pages show: finer changes would mark every row as changed.
            kv_usage: engine.map(|engine| thousandths(engine.kv_usage)),
            known_blocks: worker.index.blocks,
            total_blocks: worker.info.total_blocks,
            promised_blocks: worker.promised_blocks,
            pending_tokens: worker.pending_tokens,
            hit_rate: hit_rate.map(thousandths),
            receiver_cache_bytes: capabilities
                .map_or(0, |capabilities| capabilities.receiver_cache_bytes),
            arena: present.and_then(|worker| worker.backend.memory()).map(Arena::from),
        }
    }
}

impl From<MemoryUsage> for Arena {
    fn from(usage: MemoryUsage) -> Self {
        Self { reserved: usage.reserved, used: usage.used, slots: usage.slots }
    }
}

fn thousandths(part: f64) -> f64 {
    (part * 1e3).round() / 1e3
}
