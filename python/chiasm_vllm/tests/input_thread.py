"""The input thread of a vLLM engine without a model: only the engine's own code and sockets."""

import queue
import tempfile
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec
import torch
import zmq
from vllm.multimodal.cache import LruKeyReplicatedReceiverCache
from vllm.multimodal.cache.base import MultiModalCache
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.serial_utils import MsgpackEncoder

TIMEOUT_S = 30
ADD = b"\x00"
UTILITY = b"\x03"
IDENTITY = b"\x00\x00"


class InputThread:
    """Runs ``process_input_sockets`` of a bare ``EngineCoreProc`` against a ROUTER socket."""

    def __init__(
        self,
        core: ModuleType,
        receiver_cache_bytes: int = 1 << 20,
        tensor_ipc_receiver: Any = None,
    ) -> None:
        self.core = core
        engine = core.EngineCoreProc.__new__(core.EngineCoreProc)
        engine.engine_index = 0
        engine.shutdown_state = core.EngineShutdownState.RUNNING
        engine.tensor_ipc_receiver = tensor_ipc_receiver
        engine.request_block_hasher = None
        engine.input_queue = queue.Queue()
        engine.output_queue = queue.Queue()
        engine.aborts_queue = queue.Queue()
        engine.mm_receiver_cache = receiver_cache(receiver_cache_bytes)
        engine._make_ready_response = Ready
        self.engine = engine
        self.sockets = tempfile.TemporaryDirectory(prefix="chiasm-vllm-test")
        self.router = zmq.Context.instance().socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.setsockopt(zmq.RCVTIMEO, TIMEOUT_S * 1000)
        address = f"ipc://{self.sockets.name}/input"
        self.router.bind(address)
        self.ready = threading.Event()
        arguments = ([address], None, IDENTITY, self.ready)
        self.thread = threading.Thread(
            target=engine.process_input_sockets, args=arguments, daemon=True
        )
        self.thread.start()
        assert self.router.recv_multipart()[0] == IDENTITY
        assert self.ready.wait(TIMEOUT_S)

    def send(self, kind: bytes, frames: list) -> None:
        self.router.send_multipart([IDENTITY, kind, *frames])

    def add(self, request_id: str, features: list[dict], encoder: Any = None) -> None:
        fields = [
            request_id,
            [1, 2, 3, 4],
            features,
            {"max_tokens": 1},
            None,
            0.0,
            None,
            None,
            None,
        ]
        self.send(ADD, (encoder or MsgpackEncoder()).encode(fields))

    def accepted(self) -> Any:
        """Returns the next request that passed the input thread."""
        kind, (request, _) = self.engine.input_queue.get(timeout=TIMEOUT_S)
        assert kind == self.core.EngineCoreRequestType.ADD
        return request

    def refused(self) -> tuple[str, int]:
        """Returns the id and finish reason of the next request that the input thread has ended."""
        _, outputs = self.engine.output_queue.get(timeout=TIMEOUT_S)
        (output,) = outputs.outputs
        return output.request_id, output.finish_reason

    def call(self, method: str, *arguments: object) -> Any:
        """Makes a utility call, handled as in the engine's main loop."""
        self.send(UTILITY, [msgspec.msgpack.encode([0, 17, method, arguments])])
        self.engine._handle_client_request(*self.engine.input_queue.get(timeout=TIMEOUT_S))
        client, outputs = self.engine.output_queue.get(timeout=TIMEOUT_S)
        output = outputs.utility_output
        assert (client, output.call_id) == (0, 17)
        return output

    def close(self) -> None:
        # The thread never ends. It is a daemon that waits for a message that never arrives.
        self.router.close()
        self.sockets.cleanup()


@dataclass
class Ready:
    """A replacement for EngineCoreReadyResponse, which needs a model."""

    ready: bool = True


def receiver_cache(capacity: int) -> LruKeyReplicatedReceiverCache:
    cache = LruKeyReplicatedReceiverCache.__new__(LruKeyReplicatedReceiverCache)
    cache._cache = MultiModalCache.get_lru_cache(capacity / (1 << 30), MultiModalKwargsItem)
    return cache


def feature(mm_hash: str, pixels: object) -> dict:
    """Returns the feature of an image.

    ``pixels`` is a tensor in any of its wire formats, or None if the engine has it cached.
    """
    data = None
    if pixels is not None:
        data = {"pixel_values": {"data": pixels, "field": ["batched", {"keep_on_cpu": False}]}}
    return {
        "data": data,
        "modality": "image",
        "identifier": mm_hash,
        "mm_position": {"offset": 1, "length": 2, "is_embed": None},
        "mm_hash": mm_hash,
    }


def request_pixels(request: Any, index: int = 0) -> torch.Tensor:
    return request.mm_features[index].data["pixel_values"].data
