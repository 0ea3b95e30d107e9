"""Tests that facts change with changes that have an effect, and only with those.

``cargo xtask vllm-drift`` runs them before it uses the facts.
"""

import tempfile
import unittest
from pathlib import Path

from differences import difference
from facts import MISSING, read_kind, read
from kinds import Code, AllFlags, Fields, Flags, Group, Keys, Requirements, Values, Variables
from relied_on import GROUPS
from source import Package

PLAIN = """
class Engine:
    LIMIT = 256

    def step(self, count: int = 3) -> int:
        if count > 1:
            return count * 2
        return 0
"""


class FactsTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.count = 0

    def package(self, **files: str) -> Package:
        """Creates a vLLM with these modules; ``__`` in a name separates folders."""
        self.count += 1
        root = self.folder / str(self.count)
        for name, text in files.items():
            path = root / "vllm" / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Package(root)

    def facts(self, kind, requirements=(), **files: str) -> dict[str, str]:
        return dict(read_kind(self.package(**files), list(requirements), kind))

    def step(self, text: str) -> str:
        return self.facts(Code("core.py", "Engine.step"), core=text)["core.py:Engine.step"]

    def test_comments_or_format_keep_digest(self) -> None:
        words = '        """Docs."""\n        # Why.\n        logger.info("step %d", count)\n\n'
        worded = PLAIN.replace("        if count", f"{words}        if  count")
        worded = worded.replace("count * 2", "(\n                count * 2\n            )")
        self.assertNotEqual(worded, PLAIN)
        self.assertEqual(self.step(worded), self.step(PLAIN))
        self.assertIn("(self, count: int=3) -> int #", self.step(PLAIN))

    def test_code_change_changes_digest(self) -> None:
        for old, new in [
            ("* 2", "* 3"),
            ("> 1", ">= 1"),
            ("return 0", "return None"),
            ("= 3", "= 4"),
        ]:
            self.assertNotEqual(self.step(PLAIN.replace(old, new)), self.step(PLAIN), new)
        self.assertNotEqual(
            self.step(PLAIN.replace("    def step", "    @cached\n    def step")), self.step(PLAIN)
        )

    def test_class_with_star_lists_all_members(self) -> None:
        facts = self.facts(Code("core.py", "Engine.*"), core=PLAIN)
        self.assertEqual(
            list(facts), ["core.py:Engine", "core.py:Engine.LIMIT", "core.py:Engine.step"]
        )
        self.assertEqual(facts["core.py:Engine.LIMIT"], "256")

    def test_digest_covers_getter_with_setter_but_no_overloads(self) -> None:
        getter = "class Engine:\n    @property\n    def step(self): return 1\n"
        text = getter + "    @step.setter\n    def step(self, value): self.a = value\n"
        self.assertNotEqual(self.step(text), self.step(text.replace("return 1", "return 2")))
        self.assertNotEqual(self.step(text), self.step(text.replace("self.a", "self.b")))
        overload = (
            "class Engine:\n    @overload\n    def step(self, count: str): ...\n"
            + PLAIN.partition("LIMIT = 256")[2]
        )
        self.assertEqual(self.step(overload), self.step(PLAIN))

    def test_fields_by_position_include_position(self) -> None:
        text = (
            "class S(Struct, array_like=True):\n    a: int\n    b: str | None = None\n"
            "    def f(self): ...\n"
        )
        by_position = self.facts(Fields("s.py", "S"), s=text)
        self.assertEqual(
            by_position,
            {
                "s.py:S": "class(Struct, array_like=True)",
                "s.py:S.a": "[0] int",
                "s.py:S.b": "[1] str | None = None",
            },
        )
        described = self.facts(
            Fields("s.py", "S"), s='class S(M):\n    a: int = Field(3, ge=1, description="words")\n'
        )
        self.assertEqual(described["s.py:S.a"], "int = Field(3, ge=1)")
        by_name = self.facts(
            Fields("s.py", "S"), s="@dataclass\nclass S:\n    a: int = 0\n\n    b = 1\n"
        )
        self.assertEqual(
            by_name, {"s.py:S": "@dataclass class()", "s.py:S.a": "int = 0", "s.py:S.b": "1"}
        )

    def test_absent_is_missing_while_moved_is_found(self) -> None:
        kinds = [
            Code("core.py", "Engine.step"),
            Values("core.py", "X"),
            Fields("no.py", "S"),
            Keys("no.py", "D"),
        ]
        for kind in [*kinds, Variables(("V",)), Flags(("--f",)), Requirements(("p",))]:
            self.assertEqual(set(self.facts(kind, other="pass\n").values()), {MISSING}, kind)
        moved = self.facts(Code("core.py", "Engine.step"), engine__new=PLAIN)["core.py:Engine.step"]
        self.assertEqual(moved, f"{self.step(PLAIN)} (in engine/new.py)")
        renamed = self.facts(
            Code("core.py", "Core.step was Engine.step", "Core.* was Engine"), core=PLAIN
        )
        self.assertEqual(renamed["core.py:Core.step"], self.step(PLAIN))
        self.assertEqual(list(renamed), ["core.py:Core.step", "core.py:Core", "core.py:Core.LIMIT"])
        twice = self.facts(Code("core.py", "Engine.step"), a=PLAIN, b=PLAIN)
        self.assertEqual(twice["core.py:Engine.step"], MISSING)
        broken = self.facts(Code("core.py", "Engine.step"), core="class Engine(:\n")
        self.assertEqual(broken["core.py:Engine.step"], MISSING)

    def test_definitions_under_conditions_are_found(self) -> None:
        text = (
            "if TYPE_CHECKING:\n    X = 1\nelse:\n    X = 2\ntry:\n    import a\n"
            "except ImportError:\n    Y = 3\n"
        )
        facts = self.facts(Values("m.py", "X", "Y"), m=text)
        self.assertEqual(facts, {"m.py:X": "2", "m.py:Y": "3"})

    def test_keys_variables_flags_requirements_are_read(self) -> None:
        registry = 'R = {"b": ("f", "B"), "a": ("g", "A")}\n'
        self.assertEqual(
            self.facts(Keys("m.py", "R"), m=registry),
            {"m.py:R[a]": "('g', 'A')", "m.py:R[b]": "('f', 'B')"},
        )
        self.assertEqual(
            self.facts(Keys("m.py", "R", ("b", "c")), m=registry),
            {"m.py:R[b]": "('f', 'B')", "m.py:R[c]": MISSING},
        )
        envs = 'V: int = 256\nenvironment_variables = {"V": lambda: int(os.getenv("V", "256"))}\n'
        self.assertEqual(
            self.facts(Variables(("V",)), envs=envs),
            {"envs.py:V": "int = 256; lambda: int(os.getenv('V', '256'))"},
        )
        parser = 'def add(p):\n    p.add_argument("--f", "-f", type=int, default=3, help="words")\n'
        self.assertEqual(
            self.facts(Flags(("--f",)), engine__arg_utils=parser),
            {"--f": "--f, -f, type=int, default=3"},
        )
        fields = "class BaseFrontendArgs:\n    max_log_len: int = 0\n"
        every = self.facts(
            AllFlags(), engine__arg_utils=parser, entrypoints__common__cli_args=fields
        )
        self.assertEqual(
            list(every), ["every flag: --f", "every flag: --max-log-len", "every flag: -f"]
        )
        found = self.facts(
            Requirements(("Pillow", "torch")), ["pillow>=1", "torch==2", "torchvision==3"]
        )
        self.assertEqual(found, {"Pillow": "pillow>=1", "torch": "torch==2"})

    def test_difference_shows_only_code(self) -> None:
        old, new = self.package(core=PLAIN), self.package(core=PLAIN.replace("* 2", "* 3  # three"))
        lines = difference(old, new, "core.py:Engine.step")
        self.assertIn("-        return count * 2", lines)
        self.assertIn("+        return count * 3", lines)
        self.assertEqual(difference(old, new, "core.py:Engine.LIMIT"), [])
        self.assertEqual(difference(old, new, "core.py:no"), [])

    def test_table_without_sources_reads_all_missing(self) -> None:
        groups = read(self.package(other="pass\n"), [])
        self.assertEqual(len(groups), len(GROUPS))
        self.assertTrue(all(set(group["facts"].values()) == {MISSING} for group in groups))
        self.assertEqual(len({group.name for group in GROUPS}), len(GROUPS))
        one = Group("n", "w", ("a.rs",), (Values("m.py", "X"),))
        self.assertEqual(read(self.package(m="X = 1\n"), [], (one,))[0]["facts"], {"m.py:X": "1"})


if __name__ == "__main__":
    unittest.main()
