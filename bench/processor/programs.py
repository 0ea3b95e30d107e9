"""Programs: their start, orders, CPU time and end."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

# The environment variables that affect programs.
SETTINGS = ("CHIASM_", "DYN_", "PYTHON", "TOKIO_", "RUST_")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
GRACE_S = 5.0
# The number of log lines in an error.
TAIL_LINES = 15


class Program:
    """A program that runs until `stop`. With `has_pipes` it takes orders and returns answers
    as lines."""

    def __init__(
        self,
        name: str,
        command: list[str],
        folder: Path,
        *,
        has_pipes: bool = False,
        variables: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        pipe = subprocess.PIPE if has_pipes else None
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or log,
                stderr=log,
                env=environment() | (variables or {}),
                cwd=folder,
            )

    def check(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(self.failed(f"ended with {self._process.returncode}"))

    def failed(self, what: str) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"{self.name} {what}; the end of its log:", *lines])

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self.failed("has ended"))
        return json.loads(line)

    def send(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return self.answer()

    def cpu(self) -> float:
        """Returns the seconds of CPU time, user and system, of all threads of the program and of
        its running descendants."""
        return sum(cpu_time(process) for process in family(self._process.pid))

    def stop(self) -> None:
        processes = family(self._process.pid)
        if self._process.stdin is not None:
            self._process.stdin.close()
        else:
            self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end = time.monotonic() + GRACE_S
        paths = [Path(f"/proc/{process}") for process in processes]
        while any(path.exists() for path in paths) and time.monotonic() < end:
            time.sleep(0.02)


def environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(SETTINGS) and name.lower() not in PROXIES
    }
    return kept | {"HF_HUB_OFFLINE": "1"}


def family(process: int) -> list[int]:
    """Returns a process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The parent is the second field after the name, which may contain spaces.
                parent = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [process]
    for parent in found:
        found += children.get(parent, [])
    return found


def cpu_time(process: int) -> float:
    """Returns the CPU time to the nanosecond, including ended threads. `/proc` has steps of 10
    ms."""
    # MAKE_PROCESS_CPUCLOCK of the kernel, with CPUCLOCK_SCHED.
    clock = (~process << 3) | 2
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0
