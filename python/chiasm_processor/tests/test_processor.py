"""End-to-end tests of the processor and the fork server with tiny models.

CHIASM_TEST_MODELS is the folder of the models (``cargo xtask models``).
"""

import io
import os
import signal
import socket
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from PIL import Image
from vllm.model_executor.models import registry
from vllm.multimodal.processing import ProcessorInputs

from chiasm_processor import server
from chiasm_processor.child import receive
from chiasm_processor.messages import KnownItem, PromptUpdate
from chiasm_processor.processor import UNTIMED, NotSupported, Processor
from chiasm_processor.updates import to_plain

from .frontend import ForkServer, pair, send

# vLLM inspects each model class in a process of its own, which takes seconds, and caches the result
# for one version. Here the inspection runs in this process.
registry._run_in_subprocess = lambda inspect: inspect()

MODELS = Path(os.environ["CHIASM_TEST_MODELS"])
FLAGS = {
    "qwen2vl": ("--dtype", "float32"),
    "qwen3vl": ("--dtype", "bfloat16", "--mm-processor-kwargs", '{"max_pixels": 40000}'),
    "llava": ("--dtype", "float16"),
    "gemma3": ("--dtype", "float32"),
    "llama4": ("--dtype", "float32"),
    "pixtral": ("--dtype", "float32"),
    "mistral3": ("--dtype", "float32"),
    "internvl": ("--dtype", "float32"),
    # This model numbers its images.
    "minicpmv46": ("--dtype", "bfloat16"),
}


def flags(model: str) -> list[str]:
    return ["--model", str(MODELS / model), *FLAGS[model]]


def picture(width: int, height: int, kind: str = "PNG") -> bytes:
    """Returns an image file of random pixels."""
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


PICTURES = [picture(300, 200), picture(120, 340, "JPEG"), picture(64, 64, "TIFF")]


def ranges(placeholders: list[Any]) -> list[tuple[int, int]]:
    return [(placeholder.offset, placeholder.length) for placeholder in placeholders]


def find_field(made: dict[str, Any], name: str) -> dict[str, Any]:
    return next(field for field in made["fields"] if field["name"] == name)


class ProcessorTest(unittest.TestCase):
    def test_separate_items_equal_vllms_joint_result(self) -> None:
        for model in FLAGS:
            with self.subTest(model):
                processor = Processor(flags(model))
                vllm_processor = processor.vllm_processor
                info = vllm_processor.info
                text = vllm_processor.dummy_inputs.get_dummy_text({"image": len(PICTURES)})
                tokens = info.get_tokenizer().encode(text, add_special_tokens=False)
                prompt = [5, 6, *tokens, 7]
                media = [processor.load("image", data, {}) for data in PICTURES]
                inputs = ProcessorInputs(prompt, info.parse_mm_data({"image": media}))
                joint = vllm_processor.apply(inputs, UNTIMED)

                items = [processor.make_item("image", data, {}, {}) for data in PICTURES]
                for (item, _), expected in zip(items, joint["mm_kwargs"]["image"], strict=True):
                    self.assertEqual(set(item), set(expected))
                    for name, element in item.items():
                        self.assertTrue(torch.equal(element.data, expected[name].data), name)
                plain_updates = [[to_plain(update) for update in updates] for _, updates in items]
                known = [KnownItem("image", updates) for updates in plain_updates]
                expanded = processor.expand_prompt(prompt, known, {})
                self.assertEqual(expanded.token_ids, joint["prompt_token_ids"])
                self.assertNotEqual(expanded.token_ids, prompt)
                expected_ranges = ranges(joint["mm_placeholders"]["image"])
                self.assertEqual(ranges(expanded.placeholders), expected_ranges)

    def test_known_item_is_expanded_in_another_prompt(self) -> None:
        processor = Processor(flags("llava"))
        _, updates = processor.make_item("image", PICTURES[0], {}, {})
        (target,) = {tuple(update.target) for update in updates}
        mask = [(True, 4), (False, 1)]
        update = PromptUpdate("replace", list(target), [(9, 4), (8, 1)], mask)
        known = KnownItem("image", [update])
        expanded = processor.expand_prompt([1, *target, 2, *target], [known, known], {})
        self.assertEqual(expanded.token_ids, [1, 9, 9, 9, 9, 8, 2, 9, 9, 9, 9, 8])
        self.assertEqual(ranges(expanded.placeholders), [(1, 5), (7, 5)])
        masks = [placeholder.is_embed for placeholder in expanded.placeholders]
        self.assertEqual(masks, [mask, mask])

    def test_request_frame_rate_replaces_engines_frame_count(self) -> None:
        io_kwargs = '{"video": {"num_frames": 4, "x": 1}}'
        processor = Processor([*flags("qwen2vl"), "--media-io-kwargs", io_kwargs])
        self.assertEqual(processor._merge_io_kwargs({})["video"], {"num_frames": 4, "x": 1})
        merged = processor._merge_io_kwargs({"video": {"fps": 2}})
        self.assertEqual(merged["video"], {"fps": 2, "x": 1})


class ForkServerTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.server = ForkServer("--address-space", str(2 << 30), "--", *flags("qwen2vl"))
        cls.processor = Processor(flags("qwen2vl"))

    @classmethod
    def tearDownClass(cls) -> None:
        children = [cls.server.child() for _ in range(2)]
        status = cls.server.close()
        for child in children:
            child.wait_for_exit()
        assert status == 0, status

    def test_greeting_describes_model(self) -> None:
        greeting = self.server.greeting
        self.assertEqual(set(greeting["limits"]), {"image", "video"})
        image = ["<|vision_start|><|image_pad|><|vision_end|>"]
        self.assertEqual(greeting["placeholders"]["image"], image)
        self.assertEqual(greeting["own_prompts"], [])
        self.assertEqual(set(greeting["max_tokens"]), {"image", "video"})
        self.assertEqual(greeting["video_processor"], "Qwen2VLVideoProcessor")
        self.assertEqual((greeting["renderer"], greeting["missing"]), ("hf", []))
        self.assertIs(greeting["sandbox"], os.environ.get("CHIASM_NO_LANDLOCK") is None)

    def test_child_makes_same_tensors_as_processor(self) -> None:
        child = self.server.child()
        for data in PICTURES:
            made = child.item("image", data)
            self.assertEqual(made["reply"], "made", made)
            expected, updates = self.processor.make_item("image", data, {}, {})
            self.assertEqual({field["name"] for field in made["fields"]}, set(expected))
            for field in made["fields"]:
                self.assertGreaterEqual(field["data"]["offset"], len(data))
                tensor = child.tensor(field["data"])
                self.assertTrue(torch.equal(tensor, expected[field["name"]].data))
            grid = find_field(made, "image_grid_thw")
            pixels = find_field(made, "pixel_values")
            self.assertEqual((grid["kind"], grid["keep_on_cpu"]), ("batched", True))
            self.assertEqual((pixels["kind"], pixels["dim"]), ("flat", 0))
            rows = pixels["data"]["shape"][0]
            self.assertEqual(pixels["slices"], [[[0, rows, None]]])
            tokens = rows // 4
            (update,) = made["updates"]
            target = update["target"]
            self.assertEqual((update["mode"], update["full"]), ("replace", [[target[0], tokens]]))
            self.assertEqual(len(updates), 1)
            item = {"modality": "image", "updates": made["updates"]}
            call = {"call": "prompt", "token_ids": [1, *target, 2], "items": [item]}
            expanded = child.call(call)
            self.assertEqual(expanded["token_ids"], [1, *target * tokens, 2])
            self.assertEqual(expanded["placeholders"], [{"offset": 1, "length": tokens}])

    def test_request_settings_change_tensors(self) -> None:
        child = self.server.child()

        def rows(kwargs: dict) -> int:
            made = child.item("image", PICTURES[0], processor_kwargs=kwargs)
            return find_field(made, "pixel_values")["data"]["shape"][0]

        self.assertGreater(rows({}), 2 * rows({"max_pixels": 20_000}))

    def test_child_continues_after_refusing_an_item(self) -> None:
        child = self.server.child()
        flipped = bytearray(PICTURES[0])
        flipped[20] ^= 0xFF
        truncated = PICTURES[1][:60]
        for data in (b"", b"no image", PICTURES[0][:100], truncated, bytes(flipped)):
            refused = child.item("image", data)
            self.assertEqual(refused["reply"], "refused", refused)
        self.assertEqual(child.item("audio", PICTURES[0])["reply"], "refused")
        refused = child.item("image", PICTURES[0], processor_kwargs={"size": "none"})
        self.assertEqual(refused["reply"], "refused")
        for token_ids in ([1, 2], []):
            item = {"modality": "image", "updates": []}
            refused = child.call({"call": "prompt", "token_ids": token_ids, "items": [item]})
            self.assertEqual(refused["reply"], "refused", refused)
        self.assertEqual(child.item("image", PICTURES[0])["reply"], "made")

    def test_item_with_too_large_tensors_is_refused(self) -> None:
        child = self.server.child()
        kwargs = {"min_pixels": 30_000_000, "max_pixels": 40_000_000}
        refused = child.item("image", picture(40, 40), processor_kwargs=kwargs)
        self.assertEqual(refused["reply"], "refused", refused)
        self.assertIn("bytes", refused["reason"])
        self.assertEqual(child.item("image", PICTURES[0])["reply"], "made")

    def test_killed_child_does_not_affect_others(self) -> None:
        first = self.server.child()
        second = self.server.child()
        os.kill(first.pid, signal.SIGKILL)
        first.wait_for_exit()
        self.assertIsNone(receive(first.connection))
        self.assertEqual(second.item("image", PICTURES[0])["reply"], "made")
        self.assertEqual(self.server.child().item("image", PICTURES[0])["reply"], "made")

    def test_unknown_call_ends_only_its_child(self) -> None:
        child = self.server.child()
        self.assertIsNone(child.call({"call": "dance"}))
        self.assertEqual(self.server.child().item("image", PICTURES[0])["reply"], "made")


class ForkTest(unittest.TestCase):
    def test_failed_fork_does_not_affect_other_children(self) -> None:
        connection, server_socket = pair()
        pairs = [pair() for _ in range(3)]
        for _, child_socket in pairs:
            send(connection, {"fork": True}, child_socket.fileno())
            child_socket.close()
        connection.shutdown(socket.SHUT_WR)
        forks = [
            OSError(11, "Resource temporarily unavailable"),
            4711,
            OSError(12, "Cannot allocate memory"),
        ]
        with (
            mock.patch.object(server.os, "fork", side_effect=forks),
            mock.patch.object(server.os, "waitpid", return_value=(0, 0)),
            mock.patch.object(server.os, "kill") as kill,
        ):
            server.serve_forks(None, server_socket, 0, False)
        kill.assert_called_once_with(4711, signal.SIGKILL)
        # No process has the other ends of the pairs any more.
        child_connections = [ours for ours, _ in pairs]
        self.assertEqual([receive(ours) for ours in child_connections], [None] * 3)
        for socket_ in (connection, server_socket, *child_connections):
            socket_.close()


class FailureTest(unittest.TestCase):
    def test_missing_model_is_reported(self) -> None:
        failed_server = ForkServer("--", "--model", str(MODELS / "no such model"))
        self.assertIn("failed", failed_server.greeting)
        self.assertEqual(failed_server.close(), 1)

    def test_unsupported_model_is_refused_with_reason(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            whisper = transformers.WhisperConfig(architectures=["WhisperForConditionalGeneration"])
            whisper.save_pretrained(directory)
            reason = "WhisperForConditionalGeneration has an encoder"
            with self.assertRaisesRegex(NotSupported, reason):
                Processor(["--model", directory])
        with self.assertRaisesRegex(NotSupported, "generates no text"):
            Processor([*flags("qwen2vl"), "--runner", "pooling"])


if __name__ == "__main__":
    unittest.main()
