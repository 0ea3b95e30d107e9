//! `GET /workers`: the state of every worker, as JSON.

use std::collections::BTreeMap;
use std::sync::Arc;

use chiasm_backend::MediaLoad;
use chiasm_fleet::adapters::ServedAdapter;
use chiasm_fleet::{Fleet, KvEventCounts, Worker};
use chiasm_router::WorkerSnapshot;
use serde_json::{Value, json};

/// Returns the workers that can take requests, ordered by id. `docs/api.md` documents the
/// fields.
pub(crate) fn report(fleet: &Fleet) -> Value {
    let counts: BTreeMap<_, _> = fleet.kv_event_counts().into_iter().collect();
    let unnamed = fleet.unnamed();
    let workers: Vec<Value> = fleet
        .router()
        .workers()
        .iter()
        .map(|snapshot| {
            let mut report = router_report(snapshot);
            let events = counts.get(&snapshot.id).copied().unwrap_or_default();
            report["kv_events"] = events_report(events);
            report["named"] = (!unnamed.contains(&snapshot.id)).into();
            add_worker_report(&mut report, fleet, fleet.worker(snapshot.id).as_deref());
            report
        })
        .collect();
    json!({"workers": workers})
}

/// Adds the fields that only a connected worker has; they are null without one.
fn add_worker_report(report: &mut Value, fleet: &Fleet, worker: Option<&Worker>) {
    let capabilities = worker.map(|worker| worker.backend.capabilities());
    report["runs"] =
        capabilities.map_or(Value::Null, |capabilities| capabilities.engine.clone().into());
    report["private_network"] = capabilities
        .and_then(|capabilities| capabilities.private_network)
        .map_or(Value::Null, |network| network.to_string().into());
    report["condition"] = worker.map_or(Value::Null, |worker| worker.condition().name().into());
    report["breaker"] = worker.map_or(Value::Null, |worker| worker.breaker_report());
    report["media"] =
        worker.and_then(|worker| worker.load().media).map_or(Value::Null, media_report);
    let adapters = fleet.adapters().all();
    report["lora_adapters"] =
        worker.map_or_else(|| json!([]), |worker| adapters_report(worker, &adapters));
    let arena = worker.and_then(|worker| worker.backend.memory());
    report["arena"] = arena.map_or(Value::Null, |usage| {
        json!({
            "reserved_bytes": usage.reserved,
            "used_bytes": usage.used,
            "slots": usage.slots,
        })
    });
}

fn router_report(worker: &WorkerSnapshot) -> Value {
    json!({
        "id": worker.id.to_string(),
        "role": worker.info.role.name(),
        "knowledge": worker.knowledge.name(),
        "block_size": worker.info.block_size.get(),
        "total_blocks": worker.info.total_blocks,
        "known_blocks": worker.index.blocks,
        "requests": worker.requests,
        "blocks_in_use": worker.blocks_in_use,
        "pending_tokens": worker.pending_tokens,
        "promised_blocks": worker.promised_blocks,
        "engine": worker.engine.map(|engine| json!({
            "running": engine.running,
            "waiting": engine.waiting,
            "kv_usage": engine.kv_usage,
        })),
        "index": {
            "events": worker.index.events,
            "ignored_events": worker.index.ignored_events,
            "unkeyed_blocks": worker.index.unkeyed_blocks,
            "unknown_parents": worker.index.unknown_parents,
            "unreadable_extra_keys": worker.index.unreadable_extra_keys,
            "unknown_removals": worker.index.unknown_removals,
            "shed_blocks": worker.index.shed_blocks,
        },
    })
}

/// Returns the media work that is queued on a worker's machine.
fn media_report(load: MediaLoad) -> Value {
    json!({"threads": load.threads, "pending_seconds": load.total().as_secs_f64()})
}

/// Returns which adapters a worker has loaded, and the errors of those it could not load.
fn adapters_report(worker: &Worker, adapters: &[Arc<ServedAdapter>]) -> Value {
    let report = |adapter: &Arc<ServedAdapter>| {
        let error = worker.adapter_error(adapter).map(|error| error.to_string());
        json!({"name": adapter.name, "loaded": worker.has_adapter(adapter), "error": error})
    };
    adapters.iter().map(report).collect()
}

fn events_report(counts: KvEventCounts) -> Value {
    let KvEventCounts { applied, subscriber, lag } = counts;
    json!({
        "applied": applied,
        "gaps": subscriber.gaps,
        "replays": subscriber.replays,
        "failed_replays": subscriber.failed_replays,
        "dropped": subscriber.lost,
        "resets": subscriber.resets,
        "lag_seconds": lag.as_secs_f64(),
    })
}
