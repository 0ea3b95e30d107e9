"""Programs beside this one: started, told, their CPU time read, ended."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

# Those that would have a program do otherwise than it comes.
SETTINGS = ("CHIASM_", "DYN_", "PYTHON", "TOKIO_", "RUST_")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
GRACE = 5.0
# Lines of a log that go into an error.
TAIL = 15


class Program:
    """Ends with `stop`. With `speaks`, it is one that takes orders as lines and answers with lines."""

    def __init__(self, name: str, command: list[str], folder: Path, *, speaks: bool = False, more: dict[str, str] | None = None) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        pipe = subprocess.PIPE if speaks else None
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or log,
                stderr=log,
                env=environment() | (more or {}),
                cwd=folder,
            )

    def check(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(self.failed(f"ended with {self._process.returncode}"))

    def failed(self, what: str) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-TAIL:]
        return "\n".join([f"{self.name} {what}; the end of its log:", *lines])

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self.failed("has ended"))
        return json.loads(line)

    def tell(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return self.answer()

    def cpu(self) -> float:
        """Seconds of CPU time, user and system, of all its threads and those of its processes that run."""
        return sum(spent(process) for process in family(self._process.pid))

    def stop(self) -> None:
        processes = family(self._process.pid)
        if self._process.stdin is not None:
            self._process.stdin.close()
        else:
            self._process.terminate()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        wait_for_the_end(processes)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS) and name.lower() not in PROXIES}
    # Nothing is to be fetched from anywhere.
    return kept | {"HF_HUB_OFFLINE": "1"}


def family(process: int) -> list[int]:
    """A process, its children and theirs."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The parent is the second field after the name, which may hold spaces.
                parent = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found = [process]
    for one in found:
        found += parents.get(one, [])
    return found


def spent(process: int) -> float:
    """To the nanosecond, with threads that have ended. `/proc` tells it in steps of 10 ms."""
    # MAKE_PROCESS_CPUCLOCK of the kernel, with CPUCLOCK_SCHED.
    clock = (~process << 3) | 2
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0


def wait_for_the_end(processes: list[int]) -> None:
    end = time.monotonic() + GRACE
    while any(Path(f"/proc/{process}").exists() for process in processes) and time.monotonic() < end:
        time.sleep(0.02)
