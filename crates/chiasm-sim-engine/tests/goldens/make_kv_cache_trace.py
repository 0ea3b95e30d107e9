"""Records the operations of vLLM's own KVCacheManager on random requests, to test the simulator.

    python make_kv_cache_trace.py > kv_cache_trace.json

Needs a Python with vLLM 0.32.0. Starts no engine and no model. The output depends only on the seed
and on vLLM.
"""

import json
import random
import sys

import torch
import vllm
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

SEED = 7
STEPS = 400
BLOCK_SIZE = 4
NUM_BLOCKS = 25


class Trace:
    """A KVCacheManager whose operations are recorded."""

    def __init__(self):
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        config = KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=4096,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            enable_caching=True,
            enable_kv_cache_events=True,
        )
        self.live = {}
        self.numbers = {}
        self.operations = []

    def number_of(self, block_hash):
        """Returns the number of a hash. Hashes are numbered in the order of their first use."""
        return (
            None if block_hash is None else self.numbers.setdefault(block_hash, len(self.numbers))
        )

    def record(self, operation, result):
        """Records an operation with its result, its events and the cache's usage."""
        events = []
        for event in self.manager.take_events():
            kind = type(event).__name__
            if kind == "BlockStored":
                keys = [
                    None if k is None else [list(x) if isinstance(x, tuple) else x for x in k]
                    for k in event.extra_keys
                ]
                events.append(
                    {
                        "stored": [self.number_of(h) for h in event.block_hashes],
                        "parent": self.number_of(event.parent_block_hash),
                        "tokens": event.token_ids,
                        "extra_keys": keys,
                    }
                )
            elif kind == "BlockRemoved":
                events.append({"removed": [self.number_of(h) for h in event.block_hashes]})
            else:
                events.append({"cleared": True})
        self.operations.append(
            operation | {"result": result, "events": events, "usage": self.manager.usage}
        )

    def start(self, request_id, tokens, media, salt, first):
        """Starts a request and computes at most `first` tokens of its prompt."""
        params = SamplingParams(max_tokens=100)
        features = [
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=i,
                mm_position=PlaceholderRange(offset=o, length=n),
                mm_hash=i,
            )
            for i, o, n in media
        ]
        request = Request(
            request_id=request_id,
            prompt_token_ids=tokens,
            sampling_params=params,
            pooling_params=None,
            mm_features=features,
            cache_salt=salt,
            block_hasher=self.hasher,
        )
        blocks, cached, _ = self.manager.get_computed_blocks(request)
        new = min(first, len(tokens) - cached)
        allocated = self.manager.allocate_slots(
            request, new, cached, blocks, full_sequence_must_fit=True
        )
        if allocated is not None:
            request.num_computed_tokens = cached + new
            self.live[request_id] = request
        operation = {
            "op": "start",
            "id": request_id,
            "tokens": tokens,
            "media": media,
            "salt": salt,
            "new": new,
        }
        self.record(operation, cached if allocated is not None else None)

    def grow(self, request_id, generated):
        """Computes the rest of the prompt and then `generated` tokens, like decoding."""
        request = self.live[request_id]
        request.append_output_token_ids(generated)
        new = request.num_tokens - request.num_computed_tokens
        allocated = self.manager.allocate_slots(request, new)
        if allocated is not None:
            request.num_computed_tokens += new
        self.record({"op": "grow", "id": request_id, "tokens": generated}, allocated is not None)
        if allocated is None:
            self.finish(request_id)

    def finish(self, request_id):
        self.manager.free(self.live.pop(request_id))
        self.record({"op": "finish", "id": request_id}, None)

    def reset(self):
        self.record({"op": "reset"}, self.manager.reset_prefix_cache())


def main():
    rng = random.Random(SEED)
    trace = Trace()
    for step in range(STEPS):
        choice = rng.random()
        if choice < 0.45 or not trace.live:
            # A few families of prompts that share prefixes.
            length = rng.randint(1, 50)
            family = 1000 * rng.randint(0, 2)
            tokens = [family + i for i in range(length)]
            media = []
            if length > 12 and rng.random() < 0.5:
                media.append([rng.choice("ab"), rng.randint(0, 4), rng.randint(1, 6)])
                if length > 24 and rng.random() < 0.5:
                    media.append([rng.choice("ab"), rng.randint(11, 14), rng.randint(1, 9)])
            salt = rng.choice([None, None, None, "salty"])
            trace.start(f"r{step}", tokens, media, salt, rng.choice([1000, 8]))
        elif choice < 0.75:
            request_id = rng.choice(sorted(trace.live))
            trace.grow(request_id, [5000 + rng.randint(0, 1) for _ in range(rng.randint(1, 5))])
        elif choice < 0.97:
            trace.finish(rng.choice(sorted(trace.live)))
        else:
            trace.reset()
            if rng.random() < 0.5:
                for request_id in sorted(trace.live):
                    trace.finish(request_id)
                trace.reset()
    trace_data = {
        "vllm": vllm.__version__,
        "seed": SEED,
        "block_size": BLOCK_SIZE,
        "num_blocks": NUM_BLOCKS,
        "operations": trace.operations,
    }
    sys.stdout.write("{\n")
    for key in ("vllm", "seed", "block_size", "num_blocks"):
        sys.stdout.write(f"{json.dumps(key)}: {json.dumps(trace_data[key])},\n")
    lines = ",\n".join(json.dumps(op, separators=(",", ":")) for op in trace.operations)
    sys.stdout.write(f'"operations": [\n{lines}\n]\n}}\n')


if __name__ == "__main__":
    main()
