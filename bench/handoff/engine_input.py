"""The input side of vLLM's engine core, and no model behind it.

    engine_input.py HANDSHAKE PEER_INPUT CACHE_GB

The threads at the sockets, the decoder, the receiver cache and the plugin `chiasm_vllm` are the real ones. A request is
over as soon as its tensors are there: at that moment, after decoding and after the receiver cache, the clock is read. For
one without images that is after decoding.
`handoff_report(request_id, keep)` returns the clock and a checksum of the patches, and may drop the item from the receiver
cache: else later requests would pay for giving its memory back.

HANDSHAKE is where a frontend waits for an engine. PEER_INPUT is the input socket of a second frontend, which gets no
outputs; as each frontend counts on a receiver cache that is its alone, it gets one of its own, for keys that begin with
`peer`.
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
PATIENCE_S = 20


class ReceiverCache(LruKeyReplicatedReceiverCache):
    def drop(self, key):
        self._cache.pop(key, None)


class TimedCaches:
    """The receiver caches of both frontends, and the moment at which they were last done."""

    def __init__(self, capacity_gb):
        config = SimpleNamespace(
            get_multimodal_config=lambda: SimpleNamespace(mm_processor_cache_gb=capacity_gb)
        )
        self._ours = ReceiverCache(config)
        self._peers = ReceiverCache(config)
        self.done_at = 0

    def get_and_update_features(self, features):
        features = self._of(features[0].mm_hash).get_and_update_features(features)
        self.done_at = time.monotonic_ns()
        return features

    def drop(self, key):
        self._of(key).drop(key)

    def _of(self, key):
        return self._peers if key.startswith("peer") else self._ours


class EngineInput(EngineCoreProc):
    """What of an engine core stands between its sockets and its scheduler."""

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
        decoded_at = time.monotonic_ns()
        preprocessed = super().preprocess_add_request(request)
        if request.mm_features:
            last = (request.request_id, self.mm_receiver_cache.done_at, request.mm_features[0])
        else:
            last = (request.request_id, decoded_at, None)
        with self._arrived:
            self._last = last
            self._arrived.notify()
        return preprocessed

    def add_request(self, request, request_wave=0):
        self._send_finish_outputs_to_client([request.request_id], request.client_index, FinishReason.LENGTH)

    def abort_requests(self, request_ids):
        """They are over already."""

    def handoff_report(self, request_id, keep):
        """When the request's tensors were there, and their checksum. Waits if they are still on their way."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._last and self._last[0] == request_id, PATIENCE_S):
                raise TimeoutError(f"no request {request_id} has arrived")
            _, done_at, feature = self._last
        if feature is None:
            return [done_at, 0]
        # The input thread is at rest: the next request comes after this report.
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
    for loop, arguments in (
        (engine.process_input_sockets, ([*addresses.inputs, peer_input], None, IDENTITY, connected)),
        (engine.process_output_sockets, (addresses.outputs, None, 0)),
    ):
        threading.Thread(target=loop, args=arguments, daemon=True).start()
    connected.wait()
    socket.send(b"\x83\xa6status\xa5READY\xa5local\xc2\xa8headless\xc3")
    while True:
        engine._handle_client_request(*engine.input_queue.get())


if __name__ == "__main__":
    run(main, *sys.argv[1:])
