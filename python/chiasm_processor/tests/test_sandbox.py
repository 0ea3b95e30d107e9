"""Tests of allowed and forbidden actions inside a locked process."""

import fcntl
import io
import mmap
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
import unittest
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from chiasm_processor import sandbox


def run_locked(act: Callable[[], None], *, readable: list[Path] | None = None) -> str:
    """Runs ``act`` in a locked child and returns the name of its error; empty if it succeeds."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            sandbox.lock(sandbox.library_paths() if readable is None else readable)
            act()
            outcome = ""
        except BaseException as error:
            outcome = type(error).__name__
            if not isinstance(error, OSError):
                traceback.print_exc()
        os.write(write, outcome.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        outcome = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    exit_code = os.waitstatus_to_exitcode(status)
    return outcome if exit_code == 0 else f"ended by {exit_code}"


@unittest.skipUnless(os.environ.get("CHIASM_NO_LANDLOCK") is None, "CHIASM_NO_LANDLOCK is set")
class SandboxTest(unittest.TestCase):
    def test_kernel_supports_sandbox(self) -> None:
        message = "set CHIASM_NO_LANDLOCK if there is no Landlock; no sandbox test runs then"
        self.assertTrue(sandbox.is_available(), message)

    def test_files_outside_libraries_are_unreadable(self) -> None:
        for path in ("/etc/passwd", "/etc/hostname", str(Path.home()), "/proc/1/status", "/"):
            outcome = run_locked(lambda path=path: os.close(os.open(path, os.O_RDONLY)))
            self.assertEqual(outcome, "PermissionError", path)
        self.assertEqual(run_locked(lambda: os.listdir("/home")), "PermissionError")
        self.assertEqual(run_locked(lambda: Path(unittest.__file__).read_bytes() and None), "")

    def test_current_folder_is_unreadable(self) -> None:
        before = os.getcwd()
        with tempfile.TemporaryDirectory() as folder:
            secret = Path(folder).resolve() / "secret"
            secret.write_text("1")
            os.chdir(folder)
            sys.path.insert(0, folder)
            try:
                outcome = run_locked(lambda: secret.read_text() and None)
                self.assertEqual(outcome, "PermissionError")
            finally:
                sys.path.remove(folder)
                os.chdir(before)

    def test_files_cannot_be_changed(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder)
            (here / "old").write_text("1")
            for act in (
                lambda: (here / "new").write_text("1"),
                lambda: (here / "old").write_text("2"),
                lambda: os.truncate(here / "old", 0),
                lambda: os.unlink(here / "old"),
                lambda: os.mkdir(here / "folder"),
                lambda: os.rename(here / "old", here / "other"),
                lambda: os.symlink("/etc/passwd", here / "link"),
                lambda: os.chmod(here / "old", 0o777),
            ):
                outcome = run_locked(act, readable=[*sandbox.library_paths(), here])
                self.assertEqual(outcome, "PermissionError")
            self.assertEqual([path.name for path in here.iterdir()], ["old"])
            self.assertEqual((here / "old").read_text(), "1")

    def test_network_or_other_processes_are_unreachable(self) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        connected = socket.socket()
        for act in (
            lambda: socket.socket(),
            lambda: socket.socket(socket.AF_UNIX),
            lambda: connected.connect(listener.getsockname()),
            lambda: listener.accept(),
            lambda: os.execv("/bin/true", ["true"]),
            lambda: os.fork(),
            lambda: os.kill(os.getppid(), signal.SIGTERM),
            lambda: os.open("/proc/%d/mem" % os.getppid(), os.O_RDONLY),
            lambda: os.memfd_create("code"),
            lambda: os.setuid(0) or os.chroot("/"),
        ):
            self.assertEqual(run_locked(act), "PermissionError")
        listener.close()
        connected.close()

    def test_fcntl_cannot_send_signals(self) -> None:
        ours, theirs = socket.socketpair()
        owner_ex = struct.pack("<ii", 1, os.getpid())
        for command, value in (
            (fcntl.F_SETOWN, os.getpid()),
            (fcntl.F_GETOWN, 0),
            (fcntl.F_SETSIG, signal.SIGTERM),
            (15, owner_ex),
            (fcntl.F_SETLEASE, fcntl.F_RDLCK),
            (fcntl.F_NOTIFY, fcntl.DN_CREATE),
            (fcntl.F_SETFL, os.O_ASYNC),
            (fcntl.F_SETLK, b"\0" * 32),
        ):

            def act(command: int = command, value: int | bytes = value) -> None:
                fcntl.fcntl(ours, command, value)

            self.assertEqual(run_locked(act), "PermissionError", command)

        def work() -> None:
            again = os.dup(ours.fileno())
            assert fcntl.fcntl(again, fcntl.F_GETFD) == fcntl.FD_CLOEXEC
            fcntl.fcntl(again, fcntl.F_SETFD, 0)
            assert fcntl.fcntl(again, fcntl.F_GETFL) & os.O_RDWR
            os.close(fcntl.fcntl(again, fcntl.F_DUPFD, 3))

        self.assertEqual(run_locked(work), "")
        ours.close()
        theirs.close()

    def test_computing_works_in_sandbox(self) -> None:
        buffer = io.BytesIO()
        pixels = np.arange(300 * 200 * 3, dtype=np.uint8).reshape(200, 300, 3)
        Image.fromarray(pixels).save(buffer, "JPEG")

        def work() -> None:
            results: list[int] = []

            def compute() -> None:
                results.append(int(torch.ones(100, 100).sum()))

            threads = [threading.Thread(target=compute) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert results == [10_000] * 4
            picture = Image.open(io.BytesIO(buffer.getvalue())).convert("RGB").resize((60, 40))
            assert np.asarray(picture).shape == (40, 60, 3)
            memory = mmap.mmap(-1, 64 << 20)
            memory[:5] = b"bytes"

        self.assertEqual(run_locked(work), "")

    def test_child_ends_with_its_parent(self) -> None:
        read, write = os.pipe()
        middle = os.fork()
        if middle == 0:
            parent = os.getpid()
            if os.fork() == 0:
                sandbox.die_with_parent(parent)
                os.write(write, b"%d" % os.getpid())
                signal.pause()
            signal.pause()
        pid = int(os.read(read, 20))
        os.kill(middle, signal.SIGKILL)
        os.waitpid(middle, 0)
        os.close(write)
        # The child's end of the pipe closes when the child ends.
        self.assertEqual(os.read(read, 1), b"", pid)
        os.close(read)


if __name__ == "__main__":
    unittest.main()
