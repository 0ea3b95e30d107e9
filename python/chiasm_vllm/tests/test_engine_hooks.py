"""Tests with vLLM's own engine core: input thread, sockets, decoder, receiver cache; no model."""

import gc
import logging
import os
import subprocess
import sys
import textwrap
import types
import unittest

import torch
import vllm.v1.engine.core as core
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem, MultiModalSharedField
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.engine import FinishReason
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, OOBTensorConsumer

import chiasm_vllm
from chiasm_vllm import engine_hooks
from chiasm_vllm.provider import Provider
from tests.frontend_arena import FrontendArena
from tests.input_thread import InputThread, feature, request_pixels

# vLLM prints a stack trace for each refused request, and most tests provoke refusals.
logging.getLogger("vllm").setLevel(logging.CRITICAL)


def setUpModule() -> None:
    chiasm_vllm.register()


class HandlesOnEncode(OOBTensorConsumer):
    """A frontend that lends a slot for each tensor that vLLM's own encoder encodes."""

    def __init__(self, frontend: FrontendArena) -> None:
        self.frontend = frontend
        self.lease = -1

    def new_message(self) -> None:
        pass

    def __call__(self, tensor: torch.Tensor) -> dict:
        self.lease += 1
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        return self.frontend.lend(self.lease, self.frontend.place(data), len(data))


class DecoderTest(unittest.TestCase):
    def test_item_with_handles_decodes_like_item_with_bytes(self) -> None:
        frontend = FrontendArena()
        self.addCleanup(frontend.close)
        provider = Provider(None)
        provider.attach(frontend.name)
        shared = MultiModalSharedField(batch_size=1)
        item = MultiModalKwargsItem(
            pixel_values=MultiModalFieldElem(data=torch.rand(3, 40, 40), field=shared),
            masks=MultiModalFieldElem(
                data=[torch.arange(5), torch.rand(2).to(torch.bfloat16)], field=shared
            ),
            scale=MultiModalFieldElem(data=2.5, field=shared),
        )
        consumer = HandlesOnEncode(frontend)
        frames = MsgpackEncoder(size_threshold=0, oob_tensor_consumer=consumer).encode(item)
        self.assertEqual(len(frames), 1)
        decoded = MsgpackDecoder(MultiModalKwargsItem, oob_tensor_provider=provider).decode(frames)
        self.assertIsNone(provider.take_failure())
        self.assertTrue(torch.equal(decoded["pixel_values"].data, item["pixel_values"].data))
        for ours, theirs in zip(decoded["masks"].data, item["masks"].data, strict=True):
            self.assertTrue(torch.equal(ours, theirs))
        self.assertEqual(decoded["scale"].data, 2.5)
        self.assertEqual([frontend.is_returned(lease) for lease in range(3)], [False] * 3)
        del decoded, ours, theirs
        gc.collect()
        self.assertEqual([frontend.is_returned(lease) for lease in range(3)], [True] * 3)


class InputThreadTest(unittest.TestCase):
    def start(self, **options: object) -> InputThread:
        thread = InputThread(core, **options)
        self.addCleanup(thread.close)
        return thread

    def setUp(self) -> None:
        self.frontend = FrontendArena(slot_bytes=8 << 20)
        self.addCleanup(self.frontend.close)

    def handle(self, lease: int, byte: int, length: int = 4096) -> list:
        """Returns the wire format of a tensor of equal bytes in a slot."""
        offset = self.frontend.place(bytes([byte]) * length)
        return ["uint8", [length], self.frontend.lend(lease, offset, length)]

    def test_attach_succeeds_or_fails_as_utility_method(self) -> None:
        thread = self.start()
        answer = thread.call("chiasm_attach", self.frontend.name)
        self.assertIsNone(answer.failure_message)
        expected = {"plugin": chiasm_vllm.__version__, "layout": 1, "pid": os.getpid()}
        self.assertEqual(answer.result.result, expected)
        # Unlike a real engine, this one has no scheduler yet.
        manager = EncoderCacheManager(cache_size=1234)
        thread.engine.scheduler = types.SimpleNamespace(encoder_cache_manager=manager)
        answer = thread.call("chiasm_attach", self.frontend.name)
        self.assertEqual(answer.result.result, expected | {"encoder_cache_tokens": 1234})
        for arguments, reason in (
            (["chiasm.1.1.0123456789abcdef"], "No such file"),
            (["../chiasm"], "an arena is named"),
            ([7], "an arena is named"),
            ([], "missing 1 required positional argument"),
            (["a", "b"], ""),
        ):
            answer = thread.call("chiasm_attach", *arguments)
            self.assertIn("Call to chiasm_attach method failed: ", answer.failure_message)
            self.assertIn(reason, answer.failure_message)

    def test_handle_arrives_like_bytes(self) -> None:
        thread = self.start()
        thread.call("chiasm_attach", self.frontend.name)
        thread.add("by-handle", [feature("a", self.handle(0, 7))])
        by_handle = thread.accepted()
        thread.add("by-frame", [feature("b", torch.full([4096], 7, dtype=torch.uint8))])
        by_frame = thread.accepted()
        self.assertEqual((by_handle.request_id, by_frame.request_id), ("by-handle", "by-frame"))
        self.assertTrue(torch.equal(request_pixels(by_handle), request_pixels(by_frame)))

    def test_failed_handle_fails_only_its_request(self) -> None:
        thread = self.start()
        thread.call("chiasm_attach", self.frontend.name)
        bad = self.handle(1, 1)
        bad[2]["generation"] += 1
        for round_, features in enumerate(
            (
                [feature("bad", bad)],
                [feature("good", self.handle(2, 2)), feature("bad", bad)],
                [feature("bad", bad), feature("good", self.handle(3, 3))],
            )
        ):
            with self.subTest(round_):
                thread.add(f"bad-{round_}", features)
                thread.add(f"good-{round_}", [feature("x", self.handle(4, round_))])
                self.assertEqual(thread.refused(), (f"bad-{round_}", FinishReason.ERROR))
                request = thread.accepted()
                self.assertEqual(request.request_id, f"good-{round_}")
                self.assertEqual(request_pixels(request)[0], round_)
        self.assertTrue(thread.engine.input_queue.empty() and thread.engine.output_queue.empty())
        self.assertTrue(thread.thread.is_alive())

    def test_failed_request_returns_leases_without_cache_change(self) -> None:
        thread = self.start()
        thread.call("chiasm_attach", self.frontend.name)
        thread.add("first", [feature("kept", self.handle(0, 5))])
        thread.accepted()
        bad = self.handle(1, 1)
        bad[0] = "complex64"
        new = feature("new", self.handle(2, 2))
        kept = feature("kept", self.handle(3, 3))
        thread.add("bad", [new, kept, feature("c", bad)])
        self.assertEqual(thread.refused(), ("bad", FinishReason.ERROR))
        # All leases of the refused request are returned without a further message.
        returned = [self.frontend.is_returned(lease) for lease in range(4)]
        self.assertEqual(returned, [False, True, True, True])
        self.assertNotIn("new", thread.engine.mm_receiver_cache._cache)
        thread.add("from-cache", [feature("kept", None)])
        self.assertEqual(request_pixels(thread.accepted()).unique().tolist(), [5])

    def test_receiver_cache_eviction_returns_lease(self) -> None:
        thread = self.start(receiver_cache_bytes=3 * 4096)
        thread.call("chiasm_attach", self.frontend.name)
        for lease in range(3):
            thread.add(f"r{lease}", [feature(f"h{lease}", self.handle(lease, lease))])
            thread.accepted()
        self.assertEqual([self.frontend.is_returned(lease) for lease in range(3)], [False] * 3)
        thread.add("hit", [feature("h0", None)])
        self.assertEqual(request_pixels(thread.accepted()).unique().tolist(), [0])
        thread.add("evicts-h1", [feature("h3", self.handle(3, 3))])
        thread.accepted()
        returned = [self.frontend.is_returned(lease) for lease in range(4)]
        self.assertEqual(returned, [False, True, False, False])

    def test_second_frontend_replaces_arena_of_first(self) -> None:
        thread = self.start()
        thread.engine.scheduler = types.SimpleNamespace(has_unfinished_requests=lambda: False)
        thread.engine.model_executor = types.SimpleNamespace(reset_mm_cache=lambda: None)
        thread.call("chiasm_attach", self.frontend.name)
        thread.add("former", [feature("kept", self.handle(0, 5))])
        running = thread.accepted()
        self.frontend.remove_name()

        # A frontend resets this cache first when it takes over an engine. A request of the previous
        # frontend is still running.
        self.assertIsNone(thread.call("reset_mm_cache").failure_message)
        second = FrontendArena()
        self.addCleanup(second.close)
        self.assertIsNone(thread.call("chiasm_attach", second.name).failure_message)
        handle = second.lend(0, second.place(b"new!"), 4)
        thread.add("new", [feature("kept", ["uint8", [4], handle])])
        self.assertEqual(bytes(request_pixels(thread.accepted())), b"new!")
        self.assertEqual(request_pixels(running).unique().tolist(), [5])
        self.assertEqual((self.frontend.mappings(), second.mappings()), (2, 2))
        del running
        gc.collect()
        self.assertTrue(self.frontend.is_returned(0))
        # Only this test's own mapping of the first arena is left.
        self.assertEqual((self.frontend.mappings(), second.mappings()), (1, 2))
        thread.add("from-cache", [feature("kept", None)])
        self.assertEqual(bytes(request_pixels(thread.accepted())), b"new!")

    def test_handle_without_arena_fails_but_bytes_work(self) -> None:
        thread = self.start()
        thread.add("too-early", [feature("a", self.handle(0, 7))])
        self.assertEqual(thread.refused(), ("too-early", FinishReason.ERROR))
        thread.add("bytes", [feature("a", torch.zeros(4, dtype=torch.uint8))])
        self.assertEqual(thread.accepted().request_id, "bytes")

    def test_foreign_maps_reach_engines_own_provider(self) -> None:
        thread = self.start(
            tensor_ipc_receiver=lambda dtype, shape, fields: torch.full(shape, fields["value"])
        )
        thread.add("own", [feature("a", ["int64", [3], {"value": 4}])])
        self.assertEqual(request_pixels(thread.accepted()).tolist(), [4, 4, 4])

    def test_failure_of_unpreprocessed_message_is_cleared(self) -> None:
        provider = Provider(None)
        decoder = core.MsgpackDecoder(core.EngineCoreRequest, oob_tensor_provider=provider)
        no_arena = feature("a", self.handle(0, 1))
        params = {"max_tokens": "many"}
        broken = ["id", [1], [no_arena], params, None, 0.0, None, None, None]
        with self.assertRaises(Exception):
            decoder.decode(MsgpackEncoder().encode(broken))
        features = [feature("a", torch.zeros(4))]
        whole = ["id", [1], features, {"max_tokens": 1}, None, 0.0, None, None, None]
        decoder.decode(MsgpackEncoder().encode(whole))
        self.assertIsNone(provider.take_failure())


class PatchTest(unittest.TestCase):
    def test_second_register_has_no_effect(self) -> None:
        names = ("process_input_sockets", "preprocess_add_request", "chiasm_attach")
        before = [getattr(core.EngineCoreProc, name) for name in names] + [core.MsgpackDecoder]
        chiasm_vllm.register()
        after = [getattr(core.EngineCoreProc, name) for name in names] + [core.MsgpackDecoder]
        self.assertEqual(before, after)

    def test_unknown_engine_core_is_not_patched(self) -> None:
        def without(name: str) -> types.SimpleNamespace:
            other = engine_core_like_vllms()
            if hasattr(other, name):
                delattr(other, name)
            else:
                delattr(other.EngineCoreProc, name)
            return other

        def no_decoder_argument() -> types.SimpleNamespace:
            other = engine_core_like_vllms()
            other.MsgpackDecoder.__init__ = lambda self: None
            return other

        def idle_input_thread() -> types.SimpleNamespace:
            other = engine_core_like_vllms()
            other.EngineCoreProc.process_input_sockets = lambda self: None
            return other

        self.assertIsNone(engine_hooks.find_missing(engine_core_like_vllms()))
        for other in (
            types.SimpleNamespace(),
            without("EngineCoreProc"),
            without("MsgpackDecoder"),
            without("process_input_sockets"),
            without("preprocess_add_request"),
            no_decoder_argument(),
            idle_input_thread(),
        ):
            engine = getattr(other, "EngineCoreProc", object)
            before = (dict(vars(other)), dict(vars(engine)))
            with self.assertLogs("vllm.chiasm_vllm.engine_hooks", "WARNING") as logs:
                engine_hooks.patch_or_warn(other)
            self.assertEqual(len(logs.records), 1)
            self.assertEqual((dict(vars(other)), dict(vars(engine))), before)


def engine_core_like_vllms() -> types.SimpleNamespace:
    """Returns the parts of vllm/v1/engine/core.py that the patches use, free to be modified."""

    class MsgpackDecoder:
        def __init__(self, oob_tensor_provider: object = None) -> None:
            pass

        def decode(self, bufs: object) -> None:
            pass

    other = types.SimpleNamespace(MsgpackDecoder=MsgpackDecoder)

    class EngineCoreProc:
        def preprocess_add_request(self, request: object) -> None:
            pass

        def _handle_request_preproc_error(self, request: object) -> None:
            pass

    source = """
    def process_input_sockets(self):
        MsgpackDecoder(oob_tensor_provider=self.tensor_ipc_receiver)
        self.preprocess_add_request(None)
        self._handle_request_preproc_error(None)
    """
    scope: dict = {}
    exec(textwrap.dedent(source), scope)
    EngineCoreProc.process_input_sockets = scope["process_input_sockets"]
    other.EngineCoreProc = EngineCoreProc
    return other


class ProcessTest(unittest.TestCase):
    """Patching in processes with different start methods."""

    def run_python(self, source: str) -> str:
        script = textwrap.dedent(source)
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_engine_core_is_patched_on_import_in_forked_process(self) -> None:
        out = self.run_python(
            """
            import os, sys
            import chiasm_vllm
            chiasm_vllm.register()
            finders = len(sys.meta_path)
            chiasm_vllm.register()
            print(len(sys.meta_path) == finders, "vllm.v1.engine.core" in sys.modules, flush=True)
            if os.fork() == 0:
                import vllm.v1.engine.core as core
                modules = [type(finder).__module__ for finder in sys.meta_path]
                waiting = any(module.startswith("chiasm_vllm") for module in modules)
                print(hasattr(core.EngineCoreProc, "chiasm_attach"), not waiting, flush=True)
                os._exit(0)
            sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
            """
        )
        self.assertEqual(out.split()[-4:], ["True", "False", "True", "True"])

    def test_vllm_without_required_modules_still_starts(self) -> None:
        out = self.run_python(
            """
            import sys, types
            sys.modules["vllm"] = sys.modules["vllm.logger"] = types.ModuleType("vllm")
            import chiasm_vllm
            chiasm_vllm.register()
            print("started")
            """
        )
        self.assertEqual(out.split(), ["started"])


if __name__ == "__main__":
    unittest.main()
