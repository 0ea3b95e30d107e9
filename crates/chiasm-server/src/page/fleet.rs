//! The workers, as open pages are told of them.

use std::collections::BTreeMap;

use chiasm_backend::{Locality, MemoryUsage};
use chiasm_fleet::{BreakerState, Worker};
use chiasm_pipeline::Pipeline;
use chiasm_router::WorkerSnapshot;
use chiasm_types::{Role, WorkerId};
use serde::Serialize;

/// One worker.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Row {
    id: String,
    /// The engine and its version.
    runs: Option<String>,
    /// Which stages of requests it computes; `None` for all.
    role: Option<&'static str>,
    /// The address of its machine; `None` for this one.
    machine: Option<String>,
    condition: Option<&'static str>,
    /// The state of its breaker, open or half-open; `None` if it is closed.
    breaker: Option<&'static str>,
    knowledge: &'static str,
    draining: bool,
    /// Nothing names its agent any more.
    unnamed: bool,
    running: Option<u64>,
    waiting: Option<u64>,
    /// Requests of this frontend.
    requests: usize,
    /// The part of the KV cache that running requests use, 0 to 1.
    kv_usage: Option<f64>,
    known_blocks: usize,
    total_blocks: u64,
    promised_blocks: usize,
    pending_tokens: u64,
    hit_rate: Option<f64>,
    /// Bytes of media items that it keeps, at most.
    receiver_cache_bytes: u64,
    arena: Option<Arena>,
}

/// Shared memory of a worker, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Arena {
    reserved: u64,
    used: u64,
    slots: usize,
}

/// Every worker, in the order of their ids.
pub(super) fn rows(pipeline: &Pipeline) -> BTreeMap<WorkerId, Row> {
    let fleet = &pipeline.fleet;
    let workers = fleet.router().workers();
    let found = pipeline.metrics.found(&workers);
    let unnamed = fleet.unnamed();
    let present: BTreeMap<_, _> =
        fleet.workers().into_iter().map(|worker| (worker.id, worker)).collect();
    let row = |worker: &WorkerSnapshot| {
        let hit_rate = found.of_worker(worker.id).tokens.hit_rate();
        let present = present.get(&worker.id).map(|worker| &**worker);
        (worker.id, Row::new(worker, present, unnamed.contains(&worker.id), hit_rate))
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
        let can = present.map(|worker| worker.backend.capabilities());
        let engine = worker.engine;
        Self {
            id: worker.id.to_string(),
            runs: can.map(|can| can.engine.clone()),
            role: Some(worker.info.role).filter(|role| *role != Role::Aggregated).map(Role::name),
            machine: can.and_then(|can| match &can.locality {
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
            // Finer steps than are seen would make every row a new one.
            kv_usage: engine.map(|engine| thousandths(engine.kv_usage)),
            known_blocks: worker.index.blocks,
            total_blocks: worker.info.total_blocks,
            promised_blocks: worker.promised_blocks,
            pending_tokens: worker.pending_tokens,
            hit_rate: hit_rate.map(thousandths),
            receiver_cache_bytes: can.map_or(0, |can| can.receiver_cache_bytes),
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
