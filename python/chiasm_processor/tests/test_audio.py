"""Tests of the description of recordings.

CHIASM_TEST_MODELS is the folder of the models (``cargo xtask models``).
"""

import os
import unittest
from pathlib import Path
from unittest import mock

import numpy as np
from vllm.model_executor.models import registry

from chiasm_processor import audio
from chiasm_processor.audio import describe_audio, find_loader
from chiasm_processor.processor import Processor

# As in test_processor.py.
registry._run_in_subprocess = lambda inspect: inspect()

MODELS = Path(os.environ["CHIASM_TEST_MODELS"])
FAMILIES = {
    "qwen2audio": "Qwen2AudioMultiModalProcessor",
    "omni": "Qwen2_5OmniThinkerMultiModalProcessor",
}


class DescriptionTest(unittest.TestCase):
    def test_probes_are_results_of_the_processor(self) -> None:
        for model, family in FAMILIES.items():
            with self.subTest(model):
                processor = Processor(["--model", str(MODELS / model)])
                description = describe_audio(processor)
                self.assertEqual(description["processor"], family)
                self.assertEqual(description["extractor"]["max_samples"], 480_000)
                self.assertEqual(description["resampling"]["rate"], 16_000)
                self.assertEqual(len({probe["rate"] for probe in description["probes"]}), 2)
                for probe in description["probes"]:
                    # Sounds of the same length have the same size.
                    sound = np.linspace(-1, 1, probe["samples"], dtype=np.float32)
                    media = {"audio": [(sound, probe["rate"])]}
                    item, (update,) = processor.process_loaded(media, "audio", {})
                    tokens = sum(count for _, count in probe["updates"][0].full)
                    self.assertEqual(tokens, len(update.content.full))
                    sizes = [element.data.numel() for element in item.values()]
                    self.assertEqual(probe["elements"], max(sizes))

    def test_settings_of_the_engine_are_in_effect(self) -> None:
        kwargs = '{"max_length": 160000}'
        flags = ["--model", str(MODELS / "qwen2audio"), "--mm-processor-kwargs", kwargs]
        probes = describe_audio(Processor(flags))["probes"]
        self.assertEqual({probe["elements"] for probe in probes}, {128 * 1000})

    def test_unknown_processing_has_no_description(self) -> None:
        processor = Processor(["--model", str(MODELS / "qwen2audio")])
        info = type(processor.vllm_processor.info)
        for method in ("get_feature_extractor", "get_data_parser"):
            with mock.patch.object(info, method, side_effect=TypeError("another form")):
                self.assertIsNone(describe_audio(processor))


class LoaderTest(unittest.TestCase):
    def test_loader_is_the_first_that_works(self) -> None:
        with mock.patch.object(audio, "_has_torchcodec", return_value=False):
            loader = find_loader({})
            self.assertEqual(loader["name"], "sndfile")
            self.assertIsInstance(loader["avformat"], int)
            # This backend alone does not fall back to PyAV.
            alone = find_loader({"audio_backend": "soundfile"})
            self.assertEqual(alone, loader | {"avformat": None})
            self.assertIsNone(find_loader({"audio_backend": "torchcodec"}))
        with mock.patch.object(audio, "_has_torchcodec", return_value=True):
            self.assertEqual(find_loader({})["name"], "torchcodec")
            self.assertEqual(find_loader({"audio_backend": "soundfile"})["name"], "sndfile")

    def test_other_settings_have_no_known_loader(self) -> None:
        self.assertIsNone(find_loader({"audio_backend": "pyav"}))
        self.assertIsNone(find_loader({"rate": 8_000}))

    def test_torchcodec_without_ffmpeg_is_not_used(self) -> None:
        def load(*_: object, **__: object) -> None:
            raise ImportError("no FFmpeg")

        with mock.patch.object(audio.media_audio, "load_audio_torchcodec", load, create=True):
            self.assertFalse(audio._has_torchcodec())
