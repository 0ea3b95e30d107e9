"""Tests of the embedding folder, which need neither vLLM nor torch."""

import json
import os
import tempfile
import threading
import time
import unittest
from pathlib import Path

from chiasm_vllm.embedding_folder import EmbeddingFolder, StoredFile


def embeddings(rows: int, width: int = 8, byte: int = 0) -> bytes:
    """Returns a file as safetensors writes it."""
    length = rows * width * 2
    entry = {"dtype": "BF16", "shape": [rows, width], "data_offsets": [0, length]}
    header = json.dumps({"embeddings": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes([byte]) * length


FILE_BYTES = len(embeddings(1, 2000))


class FolderTest(unittest.TestCase):
    def setUp(self) -> None:
        parent = tempfile.TemporaryDirectory()
        self.addCleanup(parent.cleanup)
        self.path = Path(parent.name) / "made" / "here"

    def folder(self, files: int = 16) -> EmbeddingFolder:
        """Returns a folder with room for ``files`` files of 4000 bytes of data.

        It frees an eighth of this at a time.
        """
        return EmbeddingFolder(str(self.path), files * FILE_BYTES)

    def names(self, subfolder: str = ".") -> set[str]:
        files = (path for path in (self.path / subfolder).iterdir() if path.is_file())
        return {path.name.removesuffix(".safetensors") for path in files}

    def write(self, folder: EmbeddingFolder, identifier: str, age: float = 0.0) -> None:
        folder.write(identifier, embeddings(1, 2000))
        self.age(identifier, age)

    def age(self, name: str, seconds: float) -> None:
        mtime = time.time() - seconds
        os.utime(self.path / f"{name}.safetensors", (mtime, mtime))

    def test_folder_is_created_for_this_user_only(self) -> None:
        self.folder()
        modes = [os.stat(self.path / name).st_mode & 0o777 for name in (".", "retired")]
        self.assertEqual(modes, [0o700, 0o700])

    def test_folder_writable_by_others_is_refused(self) -> None:
        self.path.mkdir(parents=True)
        for mode in (0o770, 0o702):
            self.path.chmod(mode)
            with self.assertRaisesRegex(ValueError, "others than this user"):
                self.folder()
        self.path.chmod(0o755)
        self.folder()

    def test_file_with_absurd_header_is_not_found(self) -> None:
        folder = self.folder()
        good = {"dtype": "BF16", "shape": [1, 4], "data_offsets": [0, 8]}

        def find(header: str | bytes, length: int | None = None) -> StoredFile | None:
            text = header if isinstance(header, bytes) else header.encode()
            length = len(text) if length is None else length
            content = length.to_bytes(8, "little") + text + bytes(8)
            (self.path / "a.safetensors").write_bytes(content)
            return folder.find("a")

        def find_changed(**changes: object) -> StoredFile | None:
            return find(json.dumps({"embeddings": good | changes}))

        file_length = 8 + len(json.dumps({"embeddings": good})) + 8
        self.assertEqual(find_changed(), StoredFile((1, 4), file_length))
        inf = float("inf")
        nan = float("nan")
        huge = 10**4000
        for shape in (
            [inf, 1],
            [nan, 4],
            [1.0, 4],
            [1e308, 1e308],
            [huge, 1],
            [huge, 0],
            [-1, -4],
            [0, 4],
            [True, 4],
            [1],
            [1, 2, 2],
            ["x", 10**15],
            [[1], 10**15],
            [10**15, "x"],
            [None, 4],
            {},
            "14",
            None,
        ):
            self.assertIsNone(find_changed(shape=shape), shape)
        for offsets in ([0, inf], [0, huge], [-8, 0], [8, 16], [0], "08", None, [0, 9], [0, 7]):
            self.assertIsNone(find_changed(data_offsets=offsets), offsets)
        others = ('{"embeddings": []}', '{"embeddings": null}')
        for dtype in ("BF17", "", None, [], {}, 2):
            self.assertIsNone(find_changed(dtype=dtype), dtype)
        for header in (b"", b"\xff" * 100, "[" * 4000, "9" * 4000, "{}", "[]", "1", *others):
            self.assertIsNone(find(header), header[:20])
        for length in (0, 1, 2**63, 2**64 - 1):
            self.assertIsNone(find(json.dumps({"embeddings": good}), length), length)

    def test_irregular_files_are_not_found(self) -> None:
        folder = self.folder()
        os.mkfifo(self.path / "pipe.safetensors")
        (self.path / "folder.safetensors").mkdir()
        self.write(folder, "good")
        (self.path / "link.safetensors").symlink_to(self.path / "good.safetensors")
        descriptors = os.listdir("/proc/self/fd")
        for name in ("pipe", "folder", "link"):
            self.assertIsNone(folder.find(name), name)
            folder.remove_damaged(name, 1)
        self.assertEqual(os.listdir("/proc/self/fd"), descriptors, "a file is still open")
        self.assertIsNotNone(folder.find("good"))

    def test_good_file_is_not_removed_as_damaged(self) -> None:
        folder = self.folder()
        self.write(folder, "good")
        folder.remove_damaged("good", 1)
        self.assertEqual(self.names(), {"good"})
        folder.remove_damaged("good", 2)
        self.assertEqual(self.names(), set())
        (self.path / "broken.safetensors").write_bytes(b"?")
        folder.remove_damaged("broken", 1)
        folder.remove_damaged("missing", 1)
        folder.remove_damaged("../good", 1)
        self.assertEqual(self.names(), set())

    def test_written_file_is_found_by_its_identifier_only(self) -> None:
        folder = self.folder()
        folder.write("ab-_09", embeddings(3, 5))
        self.assertEqual(folder.find("ab-_09"), StoredFile((3, 5), len(embeddings(3, 5))))
        self.assertIsNone(folder.find("ab-_0"))
        self.assertEqual(os.stat(self.path / "ab-_09.safetensors").st_mode & 0o777, 0o600)

    def test_invalid_identifier_never_reaches_file_system(self) -> None:
        folder = self.folder()
        self.path.with_name("outside.safetensors").write_bytes(embeddings(1))
        for identifier in (
            "../outside",
            "a/b",
            "",
            ".",
            "a.b",
            "a\n",
            "ä",
            "lora:ab",
            "a" * 129,
            "a\0",
        ):
            folder.write(identifier, embeddings(1))
            folder.touch(identifier)
            self.assertIsNone(folder.find(identifier), identifier)
            self.assertEqual(folder.candidate_paths(identifier), [], identifier)
        self.assertEqual(self.names(), set())

    def test_damaged_file_is_not_found(self) -> None:
        folder = self.folder()
        whole = embeddings(3)
        for damaged in (
            b"",
            whole[:7],
            whole[:40],
            whole[:-1],
            whole + b"\0",
            b"\xff" * len(whole),
            (4000).to_bytes(8, "little") + b"[" * 5000,
            whole.replace(b'"embeddings"', b'"embedding!"'),
            whole.replace(b"[3, 8]", b"[3,8,]"),
            whole.replace(b"[3, 8]", b"[3 ]  "),
            whole.replace(b"[3, 8]", b"[4, 8]"),
            whole.replace(b"[0, 48]", b"[1, 48]"),
            whole.replace(b"BF16", b"BF17"),
            whole.replace(b"BF16", b"F32 "),
        ):
            self.assertNotEqual(damaged, whole)
            (self.path / "a.safetensors").write_bytes(damaged)
            self.assertIsNone(folder.find("a"), damaged[:100])

    def test_reader_never_sees_partial_file(self) -> None:
        folder = self.folder()
        partial_reads: list[object] = []
        written = threading.Event()

        def read() -> None:
            while not written.is_set():
                exists = (self.path / "a.safetensors").exists()
                partial_reads.append(exists and folder.find("a") is None)

        reader = threading.Thread(target=read)
        reader.start()
        for byte in range(50):
            folder.write("a", embeddings(1, 2000, byte))
        written.set()
        reader.join()
        self.assertNotIn(True, partial_reads)

    def test_failed_write_raises_without_leftovers(self) -> None:
        folder = self.folder()
        (self.path / "a.safetensors").mkdir()
        with self.assertRaises(OSError):
            folder.write("a", embeddings(1))
        with self.assertRaisesRegex(OSError, "no room for others"):
            folder.write("b", embeddings(15, 2000))
        self.assertEqual(self.names(), set())

    def test_oldest_files_are_retired_but_still_available(self) -> None:
        folder = self.folder()
        for number in range(14):
            self.write(folder, f"f{number}", age=1000 - number)
        folder.touch("f0")
        for number in range(14, 17):
            self.write(folder, f"f{number}", age=1000 - number)
        self.assertEqual(self.names("retired"), {"f1", "f2", "f3"})
        self.assertEqual(self.names(), {"f0", *(f"f{number}" for number in range(4, 17))})
        self.assertIsNone(folder.find("f1"))
        self.assertEqual([path.exists() for path in folder.candidate_paths("f1")], [False, True])

    def test_limit_holds_without_scan_for_each_file(self) -> None:
        folder = self.folder(files=80)
        scans = 0
        clean_up = folder.clean_up

        def counted() -> None:
            nonlocal scans
            scans += 1
            clean_up()

        folder.clean_up = counted
        for number in range(400):
            self.write(folder, f"f{number}", age=1000 - number)
            self.assertLessEqual(len(self.names()), 80)
        # One for the first file, and one for every tenth.
        self.assertLessEqual(scans, 41)

    def test_second_writer_exceeds_limit_by_one_step_at_most(self) -> None:
        writers = [self.folder(files=80), self.folder(files=80)]
        for number in range(400):
            self.write(writers[number % 2], f"f{number}", age=1000 - number)
            self.assertLessEqual(len(self.names()), 80 + 10)

    def test_retired_files_are_deleted_after_two_minutes(self) -> None:
        folder = self.folder()
        self.write(folder, "a")
        self.write(folder, "b")
        for name, age in (("a", 125.0), ("b", 115.0)):
            file = f"{name}.safetensors"
            os.rename(self.path / file, self.path / "retired" / file)
            self.age(f"retired/{name}", age)
        folder.clean_up()
        self.assertEqual(self.names("retired"), {"b"})

    def test_full_folder_deletes_retired_files_sooner_not_at_once(self) -> None:
        folder = self.folder()
        for number, age in enumerate((60.0, 50.0, 15.0, 5.0, 1.0)):
            self.write(folder, f"r{number}")
            file = f"r{number}.safetensors"
            os.rename(self.path / file, self.path / "retired" / file)
            self.age(f"retired/r{number}", age)
        for number in range(11):
            self.write(folder, f"f{number}")
        folder.clean_up()
        # 14 fit.
        self.assertEqual(self.names("retired"), {"r2", "r3", "r4"})
        for number in range(11, 14):
            self.write(folder, f"f{number}")
        folder.clean_up()
        self.assertEqual(self.names("retired"), {"r3", "r4"})

    def test_retirement_age_is_independent_of_last_use(self) -> None:
        folder = self.folder()
        for number in range(15):
            self.write(folder, f"f{number}", age=5000 - number)
        folder.clean_up()
        self.assertEqual(self.names("retired"), {"f0"})
        folder.clean_up()
        self.assertEqual(self.names("retired"), {"f0"})

    def test_temporary_files_of_dead_writers_are_removed(self) -> None:
        folder = self.folder()
        for name, age in ((".tmp-1-a", 400.0), (".tmp-1-b", 200.0)):
            (self.path / name).write_bytes(b"half")
            mtime = time.time() - age
            os.utime(self.path / name, (mtime, mtime))
        self.write(folder, "a")
        self.assertEqual(self.names(), {"a", ".tmp-1-b"})
