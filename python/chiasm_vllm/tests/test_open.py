"""Tests of opening arenas."""

import os
import struct
import unittest

from chiasm_vllm.arena import Arena
from tests.frontend_arena import SHM_FOLDER, FrontendArena, own_start_time


class OpenTest(unittest.TestCase):
    """Files that are opened or refused before their content is used."""

    def setUp(self) -> None:
        self.frontend = FrontendArena()
        self.addCleanup(self.frontend.close)

    def assert_refused(self, reason: str) -> None:
        with self.assertRaisesRegex(ValueError, reason):
            Arena(self.frontend.name)
        self.assertEqual(self.frontend.mappings(), 1)

    def test_valid_arena_opens(self) -> None:
        arena = Arena(self.frontend.name)
        self.assertEqual((arena.leases, arena.length), (8, self.frontend.length))
        self.assertEqual(arena.number, f"{self.frontend.number:016x}")

    def test_invalid_arena_name_is_refused(self) -> None:
        name = self.frontend.name
        for other in (
            "",
            "chiasm.1.2.3",
            name.replace("chiasm", "other"),
            f"{name}0",
            f"{name}\n",
            f"./{name}",
            f"{SHM_FOLDER}/{name}",
            f"../shm/{name}",
            name.upper(),
            f"chiasm.١.2.{'0' * 16}",
            name.encode(),
            None,
            7,
            [name],
        ):
            with self.subTest(other), self.assertRaisesRegex(ValueError, "an arena is named"):
                Arena(other)

    def test_missing_arena_is_os_error(self) -> None:
        self.frontend.remove_name()
        with self.assertRaises(FileNotFoundError):
            Arena(self.frontend.name)

    def test_symbolic_link_is_refused(self) -> None:
        target = f"{self.frontend.path}.target"
        os.rename(self.frontend.path, target)
        self.addCleanup(os.unlink, target)
        os.symlink(target, self.frontend.path)
        with self.assertRaisesRegex(OSError, "symbolic links"):
            Arena(self.frontend.name)

    def test_folder_is_refused(self) -> None:
        self.frontend.remove_name()
        os.mkdir(self.frontend.path, 0o600)
        self.addCleanup(os.rmdir, self.frontend.path)
        with self.assertRaises(OSError):
            Arena(self.frontend.name)
        self.frontend.path = ""

    def test_pipe_is_refused(self) -> None:
        self.frontend.remove_name()
        os.mkfifo(self.frontend.path, 0o600)
        self.assert_refused("not a regular file")

    def test_file_with_other_mode_is_refused(self) -> None:
        for mode in (0o644, 0o660, 0o606, 0o700, 0o4600):
            with self.subTest(oct(mode)):
                os.fchmod(self.frontend.fd, mode)
                self.assert_refused(f"mode {mode:04o}")

    @unittest.skipUnless(os.geteuid() == 0, "only root can give a file away")
    def test_file_of_another_user_is_refused(self) -> None:
        os.fchown(self.frontend.fd, 4242, -1)
        self.assert_refused("belongs to user 4242")

    def test_invalid_header_word_is_refused(self) -> None:
        length = self.frontend.length
        slots_offset = self.frontend.slots_offset
        for offset, form, value, reason in (
            (0, "8s", b"CHIASMSN", "is not an arena"),
            (8, "I", 2, "layout 2"),
            (8, "I", 0, "layout 0"),
            (12, "I", 0xFFFF_FFFF, "leases"),
            (12, "I", (slots_offset - 4096) // 32 + 1, "leases"),
            (16, "Q", length - 1, "bytes long"),
            (16, "Q", length + 4096, "bytes long"),
            (24, "Q", slots_offset + 64, "has its slots at"),
            (24, "Q", 0, "has its slots at"),
            (24, "Q", 4096, "has its slots at"),
            (24, "Q", -(-length // 4096) * 4096 + 4096, "has its slots at"),
            (24, "Q", 1 << 63, "has its slots at"),
            (32, "I", os.getpid() + 1, "another owner"),
            (40, "Q", own_start_time() + 1, "another owner"),
            (48, "Q", self.frontend.number ^ 1, "another owner or number"),
        ):
            with self.subTest(offset=offset, value=value):
                (correct,) = struct.unpack_from(f"<{form}", self.frontend.memory, offset)
                struct.pack_into(f"<{form}", self.frontend.memory, offset, value)
                self.assert_refused(reason)
                struct.pack_into(f"<{form}", self.frontend.memory, offset, correct)
        Arena(self.frontend.name)

    def test_file_shorter_than_header_says_is_refused(self) -> None:
        for length in (self.frontend.length - 4096, 4096, 4095, 56, 55, 0):
            with self.subTest(length):
                os.ftruncate(self.frontend.fd, length)
                self.assert_refused("too short|bytes long")


if __name__ == "__main__":
    unittest.main()
