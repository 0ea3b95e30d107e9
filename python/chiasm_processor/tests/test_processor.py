"""A helper with a tiny model, from end to end. CHIASM_TEST_MODELS is the folder of the models (``cargo xtask models``)."""

import io
import os
import signal
import socket
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers
from PIL import Image
from vllm.model_executor.models import registry
from vllm.multimodal.processing import ProcessorInputs

from chiasm_processor import server
from chiasm_processor.child import receive
from chiasm_processor.messages import KnownItem, Update
from chiasm_processor.processor import UNTIMED, NotSupported, Processor
from chiasm_processor.updates import to_plain

from .frontend import Helper, pair, send

# vLLM looks at each class of models in a process that ends after that, which takes seconds, and remembers it for one version.
registry._run_in_subprocess = lambda look: look()

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
    # Numbers its images.
    "minicpmv46": ("--dtype", "bfloat16"),
}


def flags(model: str) -> list[str]:
    return ["--model", str(MODELS / model), *FLAGS[model]]


def picture(width: int, height: int, kind: str = "PNG") -> bytes:
    """Noise: every pixel counts."""
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


PICTURES = [picture(300, 200), picture(120, 340, "JPEG"), picture(64, 64, "TIFF")]


class ProcessorTest(unittest.TestCase):
    def test_items_by_themselves_and_a_prompt_without_data_are_what_vllm_makes_of_all_together(self) -> None:
        for model in FLAGS:
            with self.subTest(model):
                processor = Processor(flags(model))
                vllm = processor.vllm
                text = vllm.dummy_inputs.get_dummy_text({"image": len(PICTURES)})
                prompt = [5, 6, *vllm.info.get_tokenizer().encode(text, add_special_tokens=False), 7]
                media = [processor.load("image", data, {}) for data in PICTURES]
                together = vllm.apply(ProcessorInputs(prompt, vllm.info.parse_mm_data({"image": media})), UNTIMED)

                items = [processor.item("image", data, {}, {}) for data in PICTURES]
                for (item, _), expected in zip(items, together["mm_kwargs"]["image"], strict=True):
                    self.assertEqual(set(item), set(expected))
                    for name, element in item.items():
                        self.assertTrue(torch.equal(element.data, expected[name].data), name)
                known = [KnownItem("image", [to_plain(update) for update in updates]) for _, updates in items]
                expanded = processor.prompt(prompt, known, {})
                self.assertEqual(expanded.token_ids, together["prompt_token_ids"])
                self.assertNotEqual(expanded.token_ids, prompt)
                places = together["mm_placeholders"]["image"]
                self.assertEqual([(at.offset, at.length) for at in expanded.placeholders], [(at.offset, at.length) for at in places])

    def test_a_cached_item_is_placed_where_it_comes_in_another_prompt(self) -> None:
        processor = Processor(flags("llava"))
        (token,) = {tuple(update.target) for update in processor.item("image", PICTURES[0], {}, {})[1]}
        known = KnownItem("image", [Update("replace", list(token), [(9, 4), (8, 1)], [(True, 4), (False, 1)])])
        expanded = processor.prompt([1, *token, 2, *token], [known, known], {})
        self.assertEqual(expanded.token_ids, [1, 9, 9, 9, 9, 8, 2, 9, 9, 9, 9, 8])
        self.assertEqual([(at.offset, at.length, at.is_embed) for at in expanded.placeholders], [(1, 5, [(True, 4), (False, 1)]), (7, 5, [(True, 4), (False, 1)])])

    def test_of_a_video_one_rate_replaces_another(self) -> None:
        processor = Processor([*flags("qwen2vl"), "--media-io-kwargs", '{"video": {"num_frames": 4, "x": 1}}'])
        self.assertEqual(processor._io_kwargs({})["video"], {"num_frames": 4, "x": 1})
        self.assertEqual(processor._io_kwargs({"video": {"fps": 2}})["video"], {"fps": 2, "x": 1})


class HelperTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.helper = Helper("--address-space", str(2 << 30), "--", *flags("qwen2vl"))
        cls.processor = Processor(flags("qwen2vl"))

    @classmethod
    def tearDownClass(cls) -> None:
        children = [cls.helper.child() for _ in range(2)]
        status = cls.helper.close()
        for child in children:
            child.wait_for_its_end()
        assert status == 0, status

    def test_the_greeting_says_what_the_model_takes(self) -> None:
        greeting = self.helper.greeting
        self.assertEqual(set(greeting["limits"]), {"image", "video"})
        self.assertEqual(greeting["placeholders"]["image"], ["<|vision_start|><|image_pad|><|vision_end|>"])
        self.assertEqual(greeting["own_prompts"], [])
        self.assertEqual(set(greeting["max_tokens"]), {"image", "video"})
        self.assertEqual(greeting["video_processor"], "Qwen2VLVideoProcessor")
        self.assertEqual((greeting["renderer"], greeting["missing"]), ("hf", []))
        self.assertIs(greeting["sandbox"], os.environ.get("CHIASM_NO_LANDLOCK") is None)

    def test_a_child_makes_the_tensors_that_the_processor_makes(self) -> None:
        child = self.helper.child()
        for data in PICTURES:
            made = child.item("image", data)
            self.assertEqual(made["reply"], "made", made)
            expected, updates = self.processor.item("image", data, {}, {})
            self.assertEqual({field["name"] for field in made["fields"]}, set(expected))
            for field in made["fields"]:
                self.assertGreaterEqual(field["data"]["offset"], len(data))
                self.assertTrue(torch.equal(child.tensor(field["data"]), expected[field["name"]].data))
            grid, pixels = (next(field for field in made["fields"] if field["name"] == name) for name in ("image_grid_thw", "pixel_values"))
            self.assertEqual((grid["kind"], grid["keep_on_cpu"]), ("batched", True))
            self.assertEqual((pixels["kind"], pixels["dim"], pixels["slices"]), ("flat", 0, [[[0, pixels["data"]["shape"][0], None]]]))
            tokens = pixels["data"]["shape"][0] // 4
            (update,) = made["updates"]
            self.assertEqual((update["mode"], update["full"]), ("replace", [[update["target"][0], tokens]]))
            self.assertEqual(len(updates), 1)
            expanded = child.ask({"call": "prompt", "token_ids": [1, *update["target"], 2], "items": [{"modality": "image", "updates": made["updates"]}]})
            self.assertEqual(expanded["token_ids"], [1, *update["target"] * tokens, 2])
            self.assertEqual(expanded["placeholders"], [{"offset": 1, "length": tokens}])

    def test_settings_of_a_request_change_its_tensors(self) -> None:
        child = self.helper.child()
        shapes = [child.item("image", PICTURES[0], processor_kwargs=kwargs)["fields"] for kwargs in ({}, {"max_pixels": 20_000})]
        rows = [next(field["data"]["shape"][0] for field in fields if field["name"] == "pixel_values") for fields in shapes]
        self.assertGreater(rows[0], 2 * rows[1])

    def test_what_is_no_image_is_refused_and_the_next_item_made(self) -> None:
        child = self.helper.child()
        flipped = bytearray(PICTURES[0])
        flipped[20] ^= 0xFF
        for data in (b"", b"no image", PICTURES[0][:100], PICTURES[1][: len(PICTURES[1]) // 2 - 300][:60], bytes(flipped)):
            refused = child.item("image", data)
            self.assertEqual(refused["reply"], "refused", refused)
        self.assertEqual(child.item("audio", PICTURES[0])["reply"], "refused")
        self.assertEqual(child.item("image", PICTURES[0], processor_kwargs={"size": "none"})["reply"], "refused")
        for token_ids in ([1, 2], []):
            missing = child.ask({"call": "prompt", "token_ids": token_ids, "items": [{"modality": "image", "updates": []}]})
            self.assertEqual(missing["reply"], "refused", missing)
        self.assertEqual(child.item("image", PICTURES[0])["reply"], "made")

    def test_tensors_that_do_not_fit_are_refused(self) -> None:
        child = self.helper.child()
        refused = child.item("image", picture(40, 40), processor_kwargs={"min_pixels": 30_000_000, "max_pixels": 40_000_000})
        self.assertEqual(refused["reply"], "refused", refused)
        self.assertIn("bytes", refused["reason"])
        self.assertEqual(child.item("image", PICTURES[0])["reply"], "made")

    def test_a_child_can_be_ended_and_others_go_on(self) -> None:
        first, second = self.helper.child(), self.helper.child()
        os.kill(first.pid, signal.SIGKILL)
        first.wait_for_its_end()
        self.assertIsNone(receive(first.connection))
        self.assertEqual(second.item("image", PICTURES[0])["reply"], "made")
        self.assertEqual(self.helper.child().item("image", PICTURES[0])["reply"], "made")

    def test_nonsense_ends_the_child_that_was_told_it(self) -> None:
        child = self.helper.child()
        self.assertIsNone(child.ask({"call": "dance"}))
        self.assertEqual(self.helper.child().item("image", PICTURES[0])["reply"], "made")


class ForkTest(unittest.TestCase):
    def test_fork_that_fails_costs_that_child_only(self) -> None:
        ours, servers = pair()
        childs = [pair() for _ in range(3)]
        for _, theirs in childs:
            send(ours, {"fork": True}, theirs.fileno())
            theirs.close()
        ours.shutdown(socket.SHUT_WR)
        forks = [OSError(11, "Resource temporarily unavailable"), 4711, OSError(12, "Cannot allocate memory")]
        with (
            mock.patch.object(server.os, "fork", side_effect=forks),
            mock.patch.object(server.os, "waitpid", return_value=(0, 0)),
            mock.patch.object(server.os, "kill") as kill,
        ):
            server.take_orders(None, servers, 0, False)
        kill.assert_called_once_with(4711, signal.SIGKILL)
        # No process has the other ends any more.
        self.assertEqual([receive(connection) for connection, _ in childs], [None] * 3)
        for connection in (ours, servers, *(connection for connection, _ in childs)):
            connection.close()


class FailureTest(unittest.TestCase):
    def test_what_can_t_be_served_is_said(self) -> None:
        helper = Helper("--", "--model", str(MODELS / "no such model"))
        self.assertIn("failed", helper.greeting)
        self.assertEqual(helper.close(), 1)

    def test_kinds_of_models_that_are_not_served_are_named(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            whisper = transformers.WhisperConfig(architectures=["WhisperForConditionalGeneration"])
            whisper.save_pretrained(directory)
            with self.assertRaisesRegex(NotSupported, "WhisperForConditionalGeneration has an encoder"):
                Processor(["--model", directory])
        with self.assertRaisesRegex(NotSupported, "generates no text"):
            Processor([*flags("qwen2vl"), "--runner", "pooling"])


if __name__ == "__main__":
    unittest.main()
