"""That limits and refusals are read as vLLM's classes have them. Run by ``cargo xtask models-page`` before it trusts them."""

import sys
import tempfile
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

from limits import Limit, limits_of
from refusals import needs_mistral, tokenizer_modes, writes_conversations
from registered import reason, says_media


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
    def test_a_class_that_needs_no_files_is_asked(self) -> None:
        self.assertEqual(limits_of(Plain), {"image": Limit(None), "video": Limit(1)})

    def test_what_depends_on_files_is_read_in_the_source(self) -> None:
        self.assertEqual(limits_of(More), {"audio": Limit(None, False), "image": Limit(None), "video": Limit(1)})
        self.assertEqual(limits_of(OneByOne), {"image": Limit(None), "audio": Limit(2, False), "video": Limit(None)})
        self.assertEqual(limits_of(Early), {"image": Limit(None, False)})

    def test_what_is_not_written_there_is_not_guessed(self) -> None:
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

    def test_tokenizer_modes_are_those_of_a_chain_of_comparisons(self) -> None:
        chain = (
            "class C:\n  def f(self, arch):\n"
            "    if self.impl == 'x':\n      self.tokenizer_mode = 'not'\n"
            "    elif arch == 'A':\n      self.tokenizer_mode = 'a'\n"
            "    elif arch in ('B', 'C'):\n      self.tokenizer_mode = 'bc'\n"
        )
        self.assertEqual(tokenizer_modes(self.module("modes_there", chain)), {"A": "a", "B": "bc", "C": "bc"})
        with self.assertRaisesRegex(ValueError, "tokenizer_modes"):
            tokenizer_modes(self.module("modes_gone", "x = 1\n"))

    def test_a_mode_is_there_for_its_renderer_or_its_tokenizer(self) -> None:
        self.assertTrue(writes_conversations("deepseek_v32"))
        self.assertFalse(writes_conversations("kimi_audio"))

    def test_mistral_is_known_by_what_a_module_imports(self) -> None:
        of_mistral = self.module("of_mistral", "from mistral_common.protocol.instruct.chunk import TextChunk\nclass P: pass\n")
        self.assertTrue(needs_mistral(of_mistral.P))
        self.assertFalse(needs_mistral(Plain))

    def test_a_class_that_can_t_be_imported_is_known_by_its_bases(self) -> None:
        package = self.folder / "broken_models"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "model.py").write_text(
            "import no_such\nclass A(\n    Module, SupportsMultiModal\n): ...\nclass B(Module): ...\n"
        )
        self.assertTrue(says_media("broken_models", "A"))
        self.assertFalse(says_media("broken_models", "B"))

    def test_a_reason_is_one_sentence_without_paths(self) -> None:
        self.assertEqual(reason(ImportError("it needs x. Get\nit (/a/b.py)")), "ImportError: it needs x")
        self.assertEqual(reason(OSError("no '/a/b' here (/c.so)")), "OSError: no here")
        self.assertEqual(reason(RuntimeError()), "RuntimeError:")


if __name__ == "__main__":
    unittest.main()
