"""Tests of ``make_wheel``: `python3 -m unittest discover -s python/wheel -p test_make_wheel.py`."""

import hashlib
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import make_wheel
from make_wheel import NotPortable

NEEDS = "  0x0010:   Name: {}  Flags: none  Version: 3\n"


class TestTag(unittest.TestCase):
    def test_the_newest_glibc_counts_and_by_number(self) -> None:
        info = "".join(NEEDS.format(name) for name in ("GLIBC_2.9", "GLIBC_2.34", "GLIBC_2.2.5", "GCC_4.2.0"))
        self.assertEqual(make_wheel.newest_glibc(info), (2, 34))

    def test_no_tag_is_older_than_the_oldest_policy(self) -> None:
        self.assertEqual(make_wheel.newest_glibc(NEEDS.format("GLIBC_2.2.5")), (2, 17))

    def test_a_newer_libgcc_than_any_policy_has_is_refused(self) -> None:
        with self.assertRaisesRegex(NotPortable, "GCC_4.8"):
            make_wheel.newest_glibc(NEEDS.format("GCC_7.0.0"))

    def test_libraries_of_one_system_are_seen(self) -> None:
        dynamic = " 0x01 (NEEDED)  Shared library: [libssl.so.3]\n 0x01 (NEEDED)  Shared library: [libc.so.6]\n"
        names = list(make_wheel.needed(dynamic))
        self.assertEqual([bool(make_wheel.LIBRARIES.fullmatch(name)) for name in names], [False, True])

    def test_what_is_no_program_for_linux_is_refused(self) -> None:
        with tempfile.NamedTemporaryFile() as file, self.assertRaisesRegex(NotPortable, "x86_64 or aarch64"):
            make_wheel.platform_tag(Path(file.name))


class TestWheel(unittest.TestCase):
    def test_it_has_the_binary_the_plugin_and_its_entry_point_and_the_record_of_all(self) -> None:
        version = make_wheel.re.search('__version__ = "(.+)"', (make_wheel.PLUGIN / "chiasm_vllm/__init__.py").read_text())[1]
        with tempfile.TemporaryDirectory() as folder:
            # Any program of this machine does for a binary.
            binary = Path(sys.executable).resolve()
            files = {f"chiasm-{version}.data/scripts/chiasm": binary.read_bytes(), "chiasm_vllm/__init__.py": b"x"}
            record = make_wheel.record(files, "i.dist-info")
            self.assertIn("i.dist-info/RECORD,,\n", record)
            make_wheel.write(files, first := Path(folder, "first.whl"))
            make_wheel.write(files, second := Path(folder, "second.whl"))
            digests = {hashlib.sha256(wheel.read_bytes()).digest() for wheel in (first, second)}
            self.assertEqual(len(digests), 1)
            with zipfile.ZipFile(first) as archive:
                modes = {entry.filename.split("/")[-1]: entry.external_attr >> 16 for entry in archive.infolist()}
            self.assertEqual(modes, {"chiasm": 0o100755, "__init__.py": 0o100644})

    def test_the_plugin_is_where_vllm_looks(self) -> None:
        project = make_wheel.tomllib.loads((make_wheel.PLUGIN / "pyproject.toml").read_text())["project"]
        points = make_wheel.entry_points(project["entry-points"])
        self.assertEqual(points, "[vllm.general_plugins]\nchiasm = chiasm_vllm:register\n")

    def test_another_version_of_the_plugin_is_refused(self) -> None:
        with self.assertRaisesRegex(NotPortable, "same version"):
            make_wheel.make(Path("/nowhere"), "99.0.0", None, None, Path("/nowhere"))


if __name__ == "__main__":
    unittest.main()
