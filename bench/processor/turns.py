"""The measuring half of a side in a process of its own. It takes orders over pipes, one JSON object
per line.

    in   {"kind": kind, "items": [number, …], "questions": [number, …]}
    out  {"ms": [milliseconds of each], "cpu": seconds of all, "results": [result of each]}

The first line out is sent when the process is ready.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "handoff"))
from parent import orders, send  # noqa: E402


def serve(
    prepare: Callable[[str, int, int], Any],
    process: Callable[[Any], Any],
    result: Callable[[Any], int],
) -> None:
    """Executes orders. Only `process` is measured; `prepare` gets kind, item and question."""
    send({"ready": True})
    for order in orders():
        times, cpu, results = [], 0.0, []
        for item, question in zip(order["items"], order["questions"], strict=True):
            prepared = prepare(order["kind"], item, question)
            start, cpu_start = time.perf_counter(), time.process_time()
            processed = process(prepared)
            times.append((time.perf_counter() - start) * 1e3)
            cpu += time.process_time() - cpu_start
            results.append(result(processed))
        send({"ms": times, "cpu": cpu, "results": results})
