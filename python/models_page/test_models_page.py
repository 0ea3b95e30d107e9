"""Tests of reading limits and refusals from classes like vLLM's.

``cargo xtask models-page`` runs them before it uses the results.
"""

import sys
import tempfile
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

from limits import Limit, limits_of
from refusals import needs_mistral, tokenizer_modes, writes_conversations
from registered import has_media_base, short_reason


class Info:
    ctx: Any

    def get_config(self) -> Any:
        return self.ctx.get_hf_config()


class Plain(Info):
    def get_supported_mm_limits(self) -> dict[str, int | None]:
        return {"image": None, "video": 1}


class More(Plain):
    def get_supported_mm_limits(self) -> dict[str, int | None]:
        videos = {"audio": None} if hasattr(self.get_config(), "audio_token") else {}
        return {**super().get_supported_mm_limits(), **videos}


class OneByOne(Info):
    def get_supported_mm_limits(self) -> dict[str, int | None]:
        limits: dict[str, int | None] = {"image": None}
        if self.get_config().audio:
            limits["audio"] = 2
        limits["video"] = None
        return limits


class Early(Info):
    def get_supported_mm_limits(self) -> dict[str, int | None]:
        if not self.get_config().vision:
            return {}
        return {"image": None}


class Unwritten(Info):
    def get_supported_mm_limits(self) -> dict[str, int | None]:
        return dict.fromkeys(self.get_config().modalities)


class Computed(Info):
    def get_supported_mm_limits(self) -> dict[str, int | None]:
        return {"image": self.get_config().most}


class LimitsTest(unittest.TestCase):
    def test_method_without_files_is_called(self) -> None:
        self.assertEqual(limits_of(Plain), {"image": Limit(None), "video": Limit(1)})

    def test_file_dependent_limits_are_read_from_source(self) -> None:
        self.assertEqual(
            limits_of(More),
            {"audio": Limit(None, False), "image": Limit(None), "video": Limit(1)},
        )
        self.assertEqual(
            limits_of(OneByOne),
            {"image": Limit(None), "audio": Limit(2, False), "video": Limit(None)},
        )
        self.assertEqual(limits_of(Early), {"image": Limit(None, False)})

    def test_limits_absent_from_source_are_not_guessed(self) -> None:
        self.assertEqual(limits_of(Unwritten), {})
        with self.assertRaisesRegex(ValueError, "most"):
            limits_of(Computed)


class SourcesTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        sys.path.insert(0, folder.name)
        self.addCleanup(sys.path.remove, folder.name)

    def module(self, name: str, text: str) -> ModuleType:
        (self.folder / f"{name}.py").write_text(text)
        self.addCleanup(sys.modules.pop, name, None)
        return __import__(name)

    def test_tokenizer_modes_are_read_from_comparisons(self) -> None:
        chain = (
            "class C:\n  def f(self, arch):\n"
            "    if self.impl == 'x':\n      self.tokenizer_mode = 'not'\n"
            "    elif arch == 'A':\n      self.tokenizer_mode = 'a'\n"
            "    elif arch in ('B', 'C'):\n      self.tokenizer_mode = 'bc'\n"
        )
        modes = tokenizer_modes(self.module("modes_there", chain))
        self.assertEqual(modes, {"A": "a", "B": "bc", "C": "bc"})
        with self.assertRaisesRegex(ValueError, "tokenizer_modes"):
            tokenizer_modes(self.module("modes_gone", "x = 1\n"))

    def test_only_mode_with_renderer_writes_conversations(self) -> None:
        self.assertTrue(writes_conversations("deepseek_v32"))
        self.assertFalse(writes_conversations("kimi_audio"))

    def test_mistral_is_recognized_by_imports(self) -> None:
        source = "from mistral_common.protocol.instruct.chunk import TextChunk\nclass P: pass\n"
        mistral_module = self.module("mistral_module", source)
        self.assertTrue(needs_mistral(mistral_module.P))
        self.assertFalse(needs_mistral(Plain))

    def test_unimportable_class_is_recognized_by_bases(self) -> None:
        package = self.folder / "broken_models"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "model.py").write_text(
            "import no_such\n"
            "class A(\n    Module, SupportsMultiModal\n): ...\n"
            "class B(Module): ...\n"
        )
        self.assertTrue(has_media_base("broken_models", "A"))
        self.assertFalse(has_media_base("broken_models", "B"))

    def test_reason_is_one_sentence_without_paths(self) -> None:
        self.assertEqual(
            short_reason(ImportError("it needs x. Get\nit (/a/b.py)")), "ImportError: it needs x"
        )
        self.assertEqual(short_reason(OSError("no '/a/b' here (/c.so)")), "OSError: no here")
        self.assertEqual(short_reason(RuntimeError()), "RuntimeError:")


if __name__ == "__main__":
    unittest.main()
