//! `GET /workers`: every worker and what is known of it, as JSON.

use std::collections::BTreeMap;
use std::sync::Arc;

use chiasm_backend::MediaLoad;
use chiasm_fleet::adapters::ServedAdapter;
use chiasm_fleet::{Fleet, KvEventCounts, Worker};
use chiasm_router::WorkerSnapshot;
use serde_json::{Value, json};

/// The workers that can take requests, in the order of their ids. `docs/serving.md` names the
/// fields.
pub(crate) fn report(fleet: &Fleet) -> Value {
    let counts: BTreeMap<_, _> = fleet.kv_events().into_iter().collect();
    let unnamed = fleet.unnamed();
    let workers: Vec<Value> = fleet
        .router()
        .workers()
        .iter()
        .map(|worker| {
            let mut report = of_router(worker);
            report["kv_events"] = of_events(counts.get(&worker.id).copied().unwrap_or_default());
            report["named"] = (!unnamed.contains(&worker.id)).into();
            let present = fleet.worker(worker.id);
            report["runs"] =
                present.as_ref().map_or(Value::Null, |worker| worker.backend.capabilities().engine.clone().into());
            let network = present.as_ref().and_then(|worker| worker.backend.capabilities().private_network);
            report["private_network"] = network.map_or(Value::Null, |network| network.to_string().into());
            report["condition"] = present.as_ref().map_or(Value::Null, |worker| worker.condition().name().into());
            report["breaker"] = present.as_ref().map_or(Value::Null, |worker| worker.breaker_report());
            report["media"] = present.as_ref().and_then(|worker| worker.load().media).map_or(Value::Null, of_media);
            let adapters = fleet.adapters().all();
            let of_worker = present.as_deref().map(|worker| of_adapters(worker, &adapters));
            report["lora_adapters"] = of_worker.unwrap_or_else(|| json!([]));
            let arena = present.and_then(|worker| worker.backend.memory());
            report["arena"] = arena.map_or(
                Value::Null,
                |usage| json!({"reserved_bytes": usage.reserved, "used_bytes": usage.used, "slots": usage.slots}),
            );
            report
        })
        .collect();
    json!({"workers": workers})
}

fn of_router(worker: &WorkerSnapshot) -> Value {
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

/// Returns the media work that waits on a worker's machine.
fn of_media(load: MediaLoad) -> Value {
    json!({"threads": load.threads, "pending_seconds": load.all().as_secs_f64()})
}

/// Which adapters a worker has, and why it has not the others.
fn of_adapters(worker: &Worker, adapters: &[Arc<ServedAdapter>]) -> Value {
    let of = |adapter: &Arc<ServedAdapter>| {
        let error = worker.lacks_adapter(adapter).map(|error| error.to_string());
        json!({"name": adapter.name, "loaded": worker.has_adapter(adapter), "error": error})
    };
    adapters.iter().map(of).collect()
}

fn of_events(counts: KvEventCounts) -> Value {
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
