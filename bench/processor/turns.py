"""The measuring half of a side that works in a process of its own: told over pipes what to do, one JSON object per line in and out.

    in   {"kind": kind, "items": [number, …], "questions": [number, …]}
    out  {"ms": [milliseconds of each], "cpu": seconds of all, "said": what was found of each}

The first line out is said once the process is ready.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "handoff"))
from parent import orders, tell  # noqa: E402

# Made of kind, item and question, outside of the times; then done, within them; then looked at, outside.
Prepare = Callable[[str, int, int], Any]


def take(prepare: Prepare, do: Callable[[Any], Any], look: Callable[[Any], int]) -> None:
    tell({"ready": True})
    for order in orders():
        times, cpu, said = [], 0.0, []
        for item, question in zip(order["items"], order["questions"], strict=True):
            given = prepare(order["kind"], item, question)
            start, cpu_start = time.perf_counter(), time.process_time()
            made = do(given)
            times.append((time.perf_counter() - start) * 1e3)
            cpu += time.process_time() - cpu_start
            said.append(look(made))
        tell({"ms": times, "cpu": cpu, "said": said})
