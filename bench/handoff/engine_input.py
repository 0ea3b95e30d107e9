"""The input side of vLLM's engine core, without a model.

    engine_input.py HANDSHAKE PEER_INPUT CACHE_GB

The threads of the sockets, the decoder, the receiver cache and the plugin `chiasm_vllm` are the
real ones. A request ends as soon as the engine has its tensors. The clock is read at that moment:
after the decoder and the receiver cache, or after the decoder for a request without images.
`handoff_report(request_id, keep)` returns this time and a checksum of the patches. Without `keep`
it drops the item from the receiver cache, because later requests would pay for releasing its
memory.

HANDSHAKE is the address at which a frontend waits for an engine. PEER_INPUT is the input socket of
a second frontend, which gets no outputs. Each frontend relies on a receiver cache of its own, so
keys that begin with `peer` have a separate cache.
"""

import queue
import sys
import threading
import time
from types import SimpleNamespace

import zmq

import chiasm_vllm

chiasm_vllm.register()

from vllm.multimodal.cache import LruKeyReplicatedReceiverCache
from vllm.v1.engine import EngineCoreReadyResponse, FinishReason
from vllm.v1.engine.core import VLLM_VERSION, EngineCoreProc, EngineShutdownState

from images import checksum
from parent import end_with_parent, run

IDENTITY = (0).to_bytes(2, "little")
TIMEOUT_S = 20


class ReceiverCache(LruKeyReplicatedReceiverCache):
    def drop(self, key):
        self._cache.pop(key, None)


class TimedCaches:
    """The receiver caches of both frontends, and the time of their last use."""

    def __init__(self, capacity_gb):
        config = SimpleNamespace(
            get_multimodal_config=lambda: SimpleNamespace(mm_processor_cache_gb=capacity_gb)
        )
        self._ours = ReceiverCache(config)
        self._peers = ReceiverCache(config)
        self.done_at = 0

    def get_and_update_features(self, features):
        features = self._cache(features[0].mm_hash).get_and_update_features(features)
        self.done_at = time.monotonic_ns()
        return features

    def drop(self, key):
        self._cache(key).drop(key)

    def _cache(self, key):
        return self._peers if key.startswith("peer") else self._ours


class EngineInput(EngineCoreProc):
    """The part of an engine core between its sockets and its scheduler."""

    def __init__(self, capacity_gb):
        self.mm_receiver_cache = TimedCaches(capacity_gb)
        self.request_block_hasher = None
        self.tensor_ipc_receiver = None
        self.shutdown_state = EngineShutdownState.RUNNING
        self.input_queue = queue.Queue()
        self.output_queue = queue.Queue()
        self.aborts_queue = queue.Queue()
        self._arrived = threading.Condition()
        self._last = None

    def preprocess_add_request(self, request):
        done_at = time.monotonic_ns()
        preprocessed = super().preprocess_add_request(request)
        feature = None
        if request.mm_features:
            done_at = self.mm_receiver_cache.done_at
            feature = request.mm_features[0]
        with self._arrived:
            self._last = (request.request_id, done_at, feature)
            self._arrived.notify()
        return preprocessed

    def add_request(self, request, request_wave=0):
        self._send_finish_outputs_to_client(
            [request.request_id], request.client_index, FinishReason.LENGTH
        )

    def abort_requests(self, request_ids):
        """Does nothing: the requests have ended."""

    def handoff_report(self, request_id, keep):
        """Waits for the request. Returns the time at which its tensors were complete, and their
        checksum."""

        def has_arrived():
            return self._last and self._last[0] == request_id

        with self._arrived:
            if not self._arrived.wait_for(has_arrived, TIMEOUT_S):
                raise TimeoutError(f"no request {request_id} has arrived")
            _, done_at, feature = self._last
        if feature is None:
            return [done_at, 0]
        # The input thread is idle: the next request is sent after this report.
        if not keep:
            self.mm_receiver_cache.drop(feature.mm_hash)
        return [done_at, checksum(feature.data)]

    def _make_ready_response(self):
        return EngineCoreReadyResponse(
            max_model_len=1 << 20,
            num_gpu_blocks=1,
            block_size=16,
            dp_stats_address=None,
            dtype="bfloat16",
            vllm_version=VLLM_VERSION,
            world_size=1,
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_rank=0,
            max_num_seqs=1,
            max_num_batched_tokens=1 << 20,
            instance_id="handoff",
            supports_lora=False,
            max_loras=0,
        )


def main(handshake, peer_input, capacity_gb):
    end_with_parent()
    engine = EngineInput(float(capacity_gb))
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, IDENTITY)
    socket.connect(handshake)
    addresses = engine.startup_handshake(socket, local_client=False, headless=True)
    connected = threading.Event()
    inputs = ([*addresses.inputs, peer_input], None, IDENTITY, connected)
    outputs = (addresses.outputs, None, 0)
    for loop, arguments in (
        (engine.process_input_sockets, inputs),
        (engine.process_output_sockets, outputs),
    ):
        threading.Thread(target=loop, args=arguments, daemon=True).start()
    connected.wait()
    socket.send(b"\x83\xa6status\xa5READY\xa5local\xc2\xa8headless\xc3")
    while True:
        engine._handle_client_request(*engine.input_queue.get())


if __name__ == "__main__":
    run(main, *sys.argv[1:])
