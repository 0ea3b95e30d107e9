"""Encodes an engine's messages with vLLM's own types.

Fields that are missing in a meaning have the type's default value.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from requests_to_vllm import hello
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed import kv_events
from vllm.v1 import engine
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackEncoder, UtilityResult

try:
    from vllm.outputs import RequestError
except ImportError:
    RequestError = None

# Name, kind, meaning, frames.
Message = tuple[str, str, Any, list[bytes]]


def _logprobs(count: int, width: int) -> list:
    """Returns candidates, their log probabilities and the rank of the first, for each position.

    Multiples of one half are exact in all float types.
    """
    logprobs = [-0.5 * (i + 1) for i in range(width)]
    return [
        [[position * 1000 + i for i in range(width)], logprobs, position + 1]
        for position in range(count)
    ]


FIRST_OUTPUT = {
    "request_id": "first",
    "new_token_ids": [1],
    "new_logprobs": _logprobs(1, 3),
    "new_prompt_logprobs_tensors": _logprobs(2, 2),
    "events": [[1, 10.5], [2, 11.25]],
    "prefill_stats": {
        "num_prompt_tokens": 100,
        "num_computed_tokens": 36,
        "num_cached_tokens": 64,
        "num_local_cached_tokens": 60,
        "num_external_cached_tokens": 4,
        "num_cache_creation_tokens": 32,
    },
    "kv_transfer_params": {
        "do_remote_prefill": True,
        "remote_block_ids": [[7, 300]],
        "remote_host": "h",
        "remote_port": 5600,
    },
    "num_nans_in_logits": 2,
}
STATS = {
    "num_running_reqs": 3,
    "num_waiting_reqs": 2,
    "num_skipped_waiting_reqs": 1,
    "num_kv_fetch_reqs_by_stage": {"lookup": 4},
    "step_counter": 5,
    "current_wave": 6,
    "kv_cache_usage": 0.25,
    "prefix_cache_stats": {
        "reset": True,
        "requests": 7,
        "queries": 8,
        "hits": 9,
        "preempted_requests": 10,
        "preempted_queries": 11,
        "preempted_hits": 12,
    },
}

OUTPUTS: dict[str, dict] = {
    "out_first": {
        "outputs": [FIRST_OUTPUT],
        "timestamp": 12.5,
        "scheduler_stats": STATS,
        "weight_version": "default",
    },
    "out_many_logprobs": {
        "timestamp": 13.5,
        "outputs": [
            {
                "request_id": "many",
                "new_token_ids": [5, 1005],
                "new_logprobs": _logprobs(2, 101),
                "new_prompt_logprobs_tensors": _logprobs(40, 21),
            }
        ],
    },
    "out_ends": {
        "engine_index": 1,
        "timestamp": 14.5,
        "outputs": [
            {"request_id": "eos", "new_token_ids": [2], "finish_reason": "STOP"},
            {
                "request_id": "stop",
                "new_token_ids": [70_000],
                "finish_reason": "STOP",
                "stop_reason": 70_000,
            },
            {
                "request_id": "text",
                "new_token_ids": [7],
                "finish_reason": "STOP",
                "stop_reason": "because",
            },
            {"request_id": "length", "new_token_ids": [151_643, 3], "finish_reason": "LENGTH"},
            {"request_id": "abort", "finish_reason": "ABORT"},
            {"request_id": "loop", "new_token_ids": [1, 1], "finish_reason": "REPETITION"},
            {
                "request_id": "miss",
                "finish_reason": "ERROR",
                "mm_cache_miss_hashes": ["hash-a", "hash-b"],
            },
            {
                "request_id": "paused",
                "finish_reason": "ERROR",
                "error": {
                    "code": "engine_paused",
                    "message": "Generation is paused.",
                    "retryable": True,
                },
            },
        ],
        "finished_requests": ["abort", "eos", "length", "loop", "miss", "paused", "stop", "text"],
    },
    "out_waves": {"timestamp": 15.5, "wave_complete": 3, "start_wave": 4},
    "out_nothing": {"timestamp": 16.5},
    "out_result": {
        "timestamp": 17.5,
        "utility_output": {"call_id": 2**64 - 8, "result": [True, "generate", {"key": 1.5}]},
    },
    "out_no_result": {"timestamp": 18.5, "utility_output": {"call_id": 8}},
    "out_failure": {
        "timestamp": 19.5,
        "utility_output": {"call_id": 9, "failure_message": "Call to nope method failed"},
    },
}

BLOCK_STORED = {
    "type": "BlockStored",
    "block_hashes": [2**64 - 1, 1],
    "parent_block_hash": 2**63,
    "token_ids": [1, 127, 128, 70_000],
    "block_size": 2,
    "lora_id": 3,
    "medium": "GPU",
    "lora_name": "adapter",
    "extra_keys": [["adapter", ["first-identifier", -3], "salt"], None],
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 512,
    "locality": "LOCAL",
    "ownership": "tier",
    "session_id": "session",
    "lookahead_token_ids": [[128], []],
}
EVENTS: dict[str, dict] = {
    "kv_stored": {"ts": 20.5, "data_parallel_rank": 1, "events": [BLOCK_STORED]},
    "kv_all": {
        "ts": 21.5,
        "events": [
            {
                "type": "BlockStored",
                "block_hashes": ["00ff" * 16],
                "token_ids": [5, 6],
                "block_size": 2,
            },
            {
                "type": "BlockRemoved",
                "block_hashes": [7, "0a" * 32],
                "medium": "CPU",
                "group_idx": 2,
                "locality": "REMOTE",
                "ownership": "tier",
            },
            {"type": "BlockRemoved", "block_hashes": [7]},
            {"type": "AllBlocksCleared"},
        ],
    },
}

READY = {
    "max_model_len": 8192,
    "num_gpu_blocks": 100_000,
    "block_size": 16,
    "dp_stats_address": "tcp://127.0.0.1:1",
    "dtype": "bfloat16",
    "vllm_version": "1.2.3",
    "world_size": 2,
    "data_parallel_size": 3,
    "tensor_parallel_size": 4,
    "pipeline_parallel_size": 5,
    "decode_context_parallel_size": 6,
    "data_parallel_rank": 7,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "instance_id": "instance",
    "supports_lora": True,
    "max_loras": 8,
    "mamba_block_size": 9,
    "kv_cache_size_tokens": 1_600_000,
    "kv_cache_max_concurrency": 195.5,
    "kv_events_config": {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
        "buffer_steps": 10_000,
        "hwm": 100_000,
        "max_queue_size": 100_001,
        "topic": "kv",
    },
    "weight_transfer_backend": "nccl",
    "enable_sleep_mode": True,
    "supports_draft_weight_updates": True,
    "effective_attention_block_size": 32,
}


def messages() -> Iterator[Message]:
    """Yields all messages."""
    for name, meaning in OUTPUTS.items():
        meaning, outputs = _build(engine.EngineCoreOutputs, meaning, OUTPUTS_FIELDS)
        yield name, "outputs", meaning, [bytes(frame) for frame in MsgpackEncoder().encode(outputs)]
    yield "out_dead", "outputs", "dead", [EngineCoreProc.ENGINE_CORE_DEAD]
    for name, meaning in EVENTS.items():
        meaning, batch = _build(kv_events.KVEventBatch, meaning, {"events": _list_builder(_event)})
        yield name, "kv_events", meaning, [msgspec.msgpack.Encoder().encode(batch)]
    meaning, ready = _build(
        engine.EngineCoreReadyResponse, READY, {"kv_events_config": _builder(KVEventsConfig)}
    )
    yield "ready", "ready", meaning, [msgspec.msgpack.encode(ready)]
    yield "hello", "hello", {"status": "HELLO", "headless": True}, [hello()]


def _build(message_type: type, meaning: dict, fields: dict | None = None) -> tuple[dict, Any]:
    """Returns the meaning without fields that this version lacks, and an object with it."""
    known = (
        message_type.__struct_fields__
        if issubclass(message_type, msgspec.Struct)
        else message_type.__dataclass_fields__
    )
    kept = {}
    arguments = {}
    for name, value in meaning.items():
        if name not in known or (name == "error" and RequestError is None):
            print(f"{message_type.__name__} has no {name}")
            continue
        kept[name], arguments[name] = (fields or {}).get(name, lambda value: (value, value))(value)
    return kept, message_type(**arguments)


def _builder(message_type: type, fields: dict | None = None):
    """Returns a builder for objects of a type."""
    return lambda meaning: _build(message_type, meaning, fields)


def _list_builder(build):
    """Returns a builder for a list of objects."""

    def build_all(meaning: list) -> tuple[list, list]:
        built = [build(part) for part in meaning]
        return [part for part, _ in built], [value for _, value in built]

    return build_all


def _converted(make):
    """Returns a builder for a field that has the same form in every version."""
    return lambda value: (value, make(value))


def _arrays(positions: list) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids, logprobs, ranks = zip(*positions)
    return np.array(ids, np.int32), np.array(logprobs, np.float32), np.array(ranks, np.int64)


def _tensors(positions: list) -> LogprobsTensors:
    ids, logprobs, ranks = (torch.from_numpy(array) for array in _arrays(positions))
    return LogprobsTensors(ids, logprobs, ranks.to(torch.int32))


def _utility(meaning: dict) -> tuple[dict, Any]:
    result = UtilityResult(meaning.get("result")) if "failure_message" not in meaning else None
    return meaning, engine.UtilityOutput(meaning["call_id"], meaning.get("failure_message"), result)


def _stats(meaning: dict) -> tuple[dict, Any]:
    return _build(SchedulerStats, meaning, {"prefix_cache_stats": _builder(PrefixCacheStats)})


def _hash(meaning: int | str) -> int | bytes:
    return bytes.fromhex(meaning) if isinstance(meaning, str) else meaning


def _extra_keys(meaning: list) -> list:
    return [
        keys and tuple(tuple(key) if isinstance(key, list) else key for key in keys)
        for keys in meaning
    ]


# The fields without defaults that every event of a type must have.
NO_DEFAULT = {
    "BlockStored": ("parent_block_hash", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("medium",),
    "AllBlocksCleared": (),
}
EVENT_FIELDS = {
    "block_hashes": _converted(lambda meaning: [_hash(value) for value in meaning]),
    "parent_block_hash": _converted(lambda meaning: None if meaning is None else _hash(meaning)),
    "extra_keys": _converted(_extra_keys),
}


def _event(meaning: dict) -> tuple[dict, Any]:
    kind = meaning["type"]
    fields = dict.fromkeys(NO_DEFAULT[kind]) | {
        name: value for name, value in meaning.items() if name != "type"
    }
    kept, event = _build(getattr(kv_events, kind), fields, EVENT_FIELDS)
    return {"type": kind, **kept}, event


OUTPUT_FIELDS = {
    "new_logprobs": _converted(lambda meaning: LogprobsLists(*_arrays(meaning))),
    "new_prompt_logprobs_tensors": _converted(_tensors),
    "finish_reason": _converted(lambda name: engine.FinishReason[name]),
    "events": _converted(
        lambda meaning: [
            engine.EngineCoreEvent(engine.EngineCoreEventType(kind), time) for kind, time in meaning
        ]
    ),
    "prefill_stats": _builder(PrefillStats),
    "error": _converted(lambda meaning: RequestError(**meaning)),
}
OUTPUTS_FIELDS = {
    "outputs": _list_builder(
        lambda meaning: _build(
            engine.EngineCoreOutput, {"new_token_ids": [], **meaning}, OUTPUT_FIELDS
        )
    ),
    "scheduler_stats": _stats,
    "utility_output": _utility,
    "finished_requests": _converted(set),
}
