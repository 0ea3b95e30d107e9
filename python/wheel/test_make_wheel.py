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
    def test_newest_glibc_is_found_by_number(self) -> None:
        names = ("GLIBC_2.9", "GLIBC_2.34", "GLIBC_2.2.5", "GCC_4.2.0")
        version_info = "".join(NEEDS.format(name) for name in names)
        self.assertEqual(make_wheel.newest_glibc(version_info), (2, 34))

    def test_glibc_is_not_older_than_oldest_policy(self) -> None:
        self.assertEqual(make_wheel.newest_glibc(NEEDS.format("GLIBC_2.2.5")), (2, 17))

    def test_libgcc_newer_than_policies_is_refused(self) -> None:
        with self.assertRaisesRegex(NotPortable, "GCC_4.8"):
            make_wheel.newest_glibc(NEEDS.format("GCC_7.0.0"))

    def test_library_outside_policy_is_not_allowed(self) -> None:
        dynamic = (
            " 0x01 (NEEDED)  Shared library: [libssl.so.3]\n"
            " 0x01 (NEEDED)  Shared library: [libc.so.6]\n"
        )
        names = list(make_wheel.needed_libraries(dynamic))
        allowed = [bool(make_wheel.ALLOWED_LIBRARIES.fullmatch(name)) for name in names]
        self.assertEqual(allowed, [False, True])

    def test_non_linux_binary_is_refused(self) -> None:
        with (
            tempfile.NamedTemporaryFile() as file,
            self.assertRaisesRegex(NotPortable, "x86_64 or aarch64"),
        ):
            make_wheel.platform_tag(Path(file.name))


class TestWheel(unittest.TestCase):
    def test_wheel_is_reproducible_with_executable_binary(self) -> None:
        init = (make_wheel.PLUGIN / "chiasm_vllm/__init__.py").read_text()
        version = make_wheel.re.search('__version__ = "(.+)"', init)[1]
        with tempfile.TemporaryDirectory() as folder:
            # Any program of this machine can stand for the binary.
            binary = Path(sys.executable).resolve()
            files = {
                f"chiasm-{version}.data/scripts/chiasm": binary.read_bytes(),
                "chiasm_vllm/__init__.py": b"x",
            }
            record = make_wheel.record(files, "i.dist-info")
            self.assertIn("i.dist-info/RECORD,,\n", record)
            first = Path(folder, "first.whl")
            second = Path(folder, "second.whl")
            make_wheel.write(files, first)
            make_wheel.write(files, second)
            digests = {hashlib.sha256(wheel.read_bytes()).digest() for wheel in (first, second)}
            self.assertEqual(len(digests), 1)
            with zipfile.ZipFile(first) as archive:
                modes = {
                    entry.filename.split("/")[-1]: entry.external_attr >> 16
                    for entry in archive.infolist()
                }
            self.assertEqual(modes, {"chiasm": 0o100755, "__init__.py": 0o100644})

    def test_plugin_entry_point_is_in_vllms_group(self) -> None:
        project = make_wheel.tomllib.loads((make_wheel.PLUGIN / "pyproject.toml").read_text())[
            "project"
        ]
        points = make_wheel.entry_points(project["entry-points"])
        self.assertEqual(points, "[vllm.general_plugins]\nchiasm = chiasm_vllm:register\n")

    def test_plugin_with_other_version_is_refused(self) -> None:
        with self.assertRaisesRegex(NotPortable, "same version"):
            make_wheel.make(Path("/nowhere"), "99.0.0", None, None, Path("/nowhere"))


if __name__ == "__main__":
    unittest.main()
