//! The results of our decoders, in the form of vLLM's types.

use std::collections::BTreeMap;

use bytes::Bytes;
use chiasm_engine::wire::handshake::KvEventsConfig;
use chiasm_engine::wire::{
    EngineCoreOutput, EngineMessage, EngineReady, FinishReason, Hello, Logprobs, PrefillStats,
    SchedulerStats, StopReason, UtilityOutput, Value as Packed, output,
};
use chiasm_kv::event::{self, ExternalHash, ExtraKey, KvEvent};
use chiasm_types::TokenId;
use serde_json::{Value, json};

/// Decodes a message of this kind.
pub(crate) fn read(kind: &str, frames: &[Bytes]) -> Result<Value, String> {
    match kind {
        "outputs" => output::decode(frames)
            .map(|message| outputs(&message))
            .map_err(|error| error.to_string()),
        "kv_events" => event::decode(&frames[0])
            .map(|batch| kv_event_batch(&batch))
            .map_err(|error| error.to_string()),
        "ready" => EngineReady::decode(&frames[0])
            .map(|engine_ready| ready(&engine_ready))
            .map_err(|error| error.to_string()),
        "hello" => Hello::decode(&frames[0])
            .map(|Hello { status, local, headless, parallel_config_hash: _ }| {
                json!({"status": status, "local": local, "headless": headless})
            })
            .map_err(|error| error.to_string()),
        other => Err(format!("no kind of message: {other}")),
    }
}

fn outputs(message: &EngineMessage) -> Value {
    let outputs = match message {
        EngineMessage::Dead => return json!("dead"),
        EngineMessage::Outputs(outputs) => outputs,
    };
    let mut finished = outputs.finished_requests.clone();
    finished.sort();
    json!({
        "engine_index": outputs.engine_index,
        "outputs": outputs.outputs.iter().map(engine_output).collect::<Vec<_>>(),
        "scheduler_stats": outputs.scheduler_stats.as_ref().map(stats),
        "timestamp": outputs.timestamp,
        "utility_output": outputs.utility_output.as_ref().map(utility),
        "finished_requests": finished,
        "wave_complete": outputs.wave_complete,
        "start_wave": outputs.start_wave,
        "weight_version": outputs.weight_version,
    })
}

fn engine_output(output: &EngineCoreOutput) -> Value {
    let events: Vec<_> =
        output.events.iter().map(|event| json!([event.kind, event.timestamp])).collect();
    let error = output.error.as_ref().map(
        |error| json!({"code": error.code, "message": error.message, "retryable": error.retryable}),
    );
    json!({
        "request_id": output.request_id,
        "new_token_ids": ids(&output.new_token_ids),
        "new_logprobs": output.new_logprobs.as_ref().map(logprobs),
        "new_prompt_logprobs_tensors": output.prompt_logprobs.as_ref().map(logprobs),
        "finish_reason": output.finish_reason.map(finish_reason),
        "stop_reason": output.stop_reason.as_ref().map(|reason| match reason {
            StopReason::Token(token) => json!(token.0),
            StopReason::Text(text) => json!(text),
        }),
        "events": events,
        "kv_transfer_params": output.kv_transfer_params.as_ref().map(unpack),
        "prefill_stats": output.prefill_stats.as_ref().map(prefill),
        "num_nans_in_logits": output.num_nans_in_logits,
        "mm_cache_miss_hashes": output.mm_cache_miss_hashes,
        "error": error,
    })
}

fn ids(tokens: &[TokenId]) -> Vec<u32> {
    tokens.iter().map(|token| token.0).collect()
}

fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "STOP",
        FinishReason::Length => "LENGTH",
        FinishReason::Abort => "ABORT",
        FinishReason::Error => "ERROR",
        FinishReason::Repetition => "REPETITION",
        FinishReason::Other(_) => "an unknown reason",
    }
}

fn logprobs(logprobs: &Logprobs) -> Value {
    let positions = logprobs
        .positions()
        .map(|position| json!([ids(position.token_ids), position.logprobs, position.rank]));
    positions.collect()
}

fn prefill(stats: &PrefillStats) -> Value {
    json!({
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_computed_tokens": stats.num_computed_tokens,
        "num_cached_tokens": stats.num_cached_tokens,
        "num_local_cached_tokens": stats.num_local_cached_tokens,
        "num_external_cached_tokens": stats.num_external_cached_tokens,
        "num_cache_creation_tokens": stats.num_cache_creation_tokens,
    })
}

fn stats(stats: &SchedulerStats) -> Value {
    let prefix = &stats.prefix_cache_stats;
    let fetches: BTreeMap<_, _> = stats.num_kv_fetch_reqs_by_stage.iter().cloned().collect();
    json!({
        "num_running_reqs": stats.num_running_reqs,
        "num_waiting_reqs": stats.num_waiting_reqs,
        "num_skipped_waiting_reqs": stats.num_skipped_waiting_reqs,
        "num_kv_fetch_reqs_by_stage": fetches,
        "step_counter": stats.step_counter,
        "current_wave": stats.current_wave,
        "kv_cache_usage": stats.kv_cache_usage,
        "prefix_cache_stats": {
            "reset": prefix.reset,
            "requests": prefix.requests,
            "queries": prefix.queries,
            "hits": prefix.hits,
            "preempted_requests": prefix.preempted_requests,
            "preempted_queries": prefix.preempted_queries,
            "preempted_hits": prefix.preempted_hits,
        },
    })
}

fn utility(output: &UtilityOutput) -> Value {
    match &output.result {
        Ok(result) => json!({"call_id": output.call_id, "result": unpack(result)}),
        Err(failure) => json!({"call_id": output.call_id, "failure_message": failure.0}),
    }
}

fn unpack(value: &Packed) -> Value {
    match value {
        Packed::Nil => Value::Null,
        Packed::Boolean(value) => json!(value),
        Packed::Integer(value) => json!(value.as_i64()),
        Packed::F32(value) => json!(value),
        Packed::F64(value) => json!(value),
        Packed::String(text) => json!(text.as_str()),
        Packed::Array(list) => list.iter().map(unpack).collect(),
        Packed::Map(map) => Value::Object(
            map.iter()
                .map(|(key, value)| (key.as_str().unwrap().to_owned(), unpack(value)))
                .collect(),
        ),
        other => json!(other.to_string()),
    }
}

fn kv_event_batch(batch: &event::KvEventBatch) -> Value {
    json!({
        "ts": batch.timestamp,
        "events": batch.events.iter().map(kv_event).collect::<Vec<_>>(),
        "data_parallel_rank": batch.data_parallel_rank,
    })
}

fn kv_event(event: &KvEvent) -> Value {
    let block_keys = |keys: &Option<Vec<ExtraKey>>| -> Option<Value> {
        Some(keys.as_ref()?.iter().map(extra_key).collect())
    };
    match event {
        KvEvent::BlockStored(stored) => json!({
            "type": "BlockStored",
            "block_hashes": stored.block_hashes.iter().map(hash).collect::<Vec<_>>(),
            "parent_block_hash": stored.parent_block_hash.as_ref().map(hash),
            "token_ids": ids(&stored.token_ids),
            "block_size": stored.block_size,
            "lora_id": stored.lora_id,
            "medium": stored.medium,
            "lora_name": stored.lora_name,
            "extra_keys": stored.extra_keys.as_ref().map(|blocks| {
                blocks.iter().map(block_keys).collect::<Vec<Option<Value>>>()
            }),
            "group_idx": stored.group_idx,
            "kv_cache_spec_kind": stored.kv_cache_spec_kind,
            "kv_cache_spec_sliding_window": stored.kv_cache_spec_sliding_window,
            "locality": stored.locality,
            "ownership": stored.ownership,
            "session_id": stored.session_id,
            "lookahead_token_ids": stored.lookahead_token_ids.as_ref().map(|blocks| {
                blocks.iter().map(|tokens| ids(tokens)).collect::<Vec<_>>()
            }),
        }),
        KvEvent::BlockRemoved(removed) => json!({
            "type": "BlockRemoved",
            "block_hashes": removed.block_hashes.iter().map(hash).collect::<Vec<_>>(),
            "medium": removed.medium,
            "group_idx": removed.group_idx,
            "locality": removed.locality,
            "ownership": removed.ownership,
        }),
        KvEvent::AllBlocksCleared => json!({"type": "AllBlocksCleared"}),
        KvEvent::Unknown(name) => json!({"type": format!("unknown: {name}")}),
        _ => json!({"type": "an event that is unknown to this test"}),
    }
}

fn hash(hash: &ExternalHash) -> Value {
    match hash {
        ExternalHash::U64(hash) => json!(hash),
        ExternalHash::Bytes(bytes) => {
            bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into()
        }
    }
}

fn extra_key(key: &ExtraKey) -> Value {
    match key {
        ExtraKey::Media { identifier, offset } => json!([identifier, offset]),
        ExtraKey::Text(text) => json!(text),
        ExtraKey::Other(_) => json!("an unknown key"),
    }
}

fn ready(ready: &EngineReady) -> Value {
    json!({
        "max_model_len": ready.max_model_len,
        "num_gpu_blocks": ready.num_gpu_blocks,
        "block_size": ready.block_size,
        "dp_stats_address": ready.dp_stats_address,
        "dtype": ready.dtype,
        "vllm_version": ready.vllm_version,
        "world_size": ready.world_size,
        "data_parallel_size": ready.data_parallel_size,
        "tensor_parallel_size": ready.tensor_parallel_size,
        "pipeline_parallel_size": ready.pipeline_parallel_size,
        "decode_context_parallel_size": ready.decode_context_parallel_size,
        "data_parallel_rank": ready.data_parallel_rank,
        "max_num_seqs": ready.max_num_seqs,
        "max_num_batched_tokens": ready.max_num_batched_tokens,
        "instance_id": ready.instance_id,
        "supports_lora": ready.supports_lora,
        "max_loras": ready.max_loras,
        "mamba_block_size": ready.mamba_block_size,
        "kv_cache_size_tokens": ready.kv_cache_size_tokens,
        "kv_cache_max_concurrency": ready.kv_cache_max_concurrency,
        "kv_events_config": ready.kv_events_config.as_ref().map(kv_events_config),
        "weight_transfer_backend": ready.weight_transfer_backend,
        "enable_sleep_mode": ready.enable_sleep_mode,
        "supports_draft_weight_updates": ready.supports_draft_weight_updates,
        "effective_attention_block_size": ready.effective_attention_block_size,
    })
}

fn kv_events_config(config: &KvEventsConfig) -> Value {
    json!({
        "enable_kv_cache_events": config.enable_kv_cache_events,
        "publisher": config.publisher,
        "endpoint": config.endpoint,
        "replay_endpoint": config.replay_endpoint,
        "buffer_steps": config.buffer_steps,
        "hwm": config.hwm,
        "max_queue_size": config.max_queue_size,
        "topic": config.topic,
    })
}
