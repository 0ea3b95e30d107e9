"""All sides of a run, which start and end together."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import servers
from media import Requests
from programs import Program
from servers import Outcome, Server

HERE = Path(__file__).parent
# Measures a side with a kind, items and questions.
Measure = Callable[[str, list[int], list[int]], Outcome]


class Process(Program):
    """A side that takes orders over pipes."""

    def measure(self, kind: str, items: list[int], questions: list[int]) -> Outcome:
        answer = self.send({"kind": kind, "items": items, "questions": questions})
        seconds = sum(answer["ms"]) / 1e3
        return Outcome(answer["ms"], seconds, answer.get("cpu"), answer["results"])


class Sides:
    def __init__(
        self,
        requests: Requests,
        server: Server,
        render: tuple[Server, Server],
        processes: dict[str, Process],
    ) -> None:
        self._requests, self._server, self._render = requests, server, render
        self._processes = processes
        # The frontends get sequential requests.
        self.frontends: dict[str, Measure] = {
            "chiasm": partial(self._measure, server),
            "render": partial(self._measure, render[0]),
            "render, no tensors": partial(self._measure, render[1]),
            "in one process": processes["in one process"].measure,
        }
        self.alone, self.item = processes["alone"].measure, processes["item"].measure

    def serve(self, kind: str, items: list[int], questions: list[int], clients: int) -> Outcome:
        """Measures `chiasm serve` with concurrent clients."""
        return self._measure(self._server, kind, items, questions, clients)

    def _measure(
        self,
        server: Server,
        kind: str,
        items: list[int],
        questions: list[int],
        clients: int = 1,
    ) -> Outcome:
        pairs = zip(items, questions, strict=True)
        return server.send_all([self._requests.chat(kind, *pair) for pair in pairs], clients)

    def wait(self) -> None:
        self._server.wait("/ready")
        self._render[0].wait("/health")
        for process in self._processes.values():
            process.answer()


@contextmanager
def started(
    arguments: argparse.Namespace,
    model: Path,
    media: Path,
    scratch: Path,
    helpers: int,
    clients: int,
) -> Iterator[Sides]:
    vllm, chiasm = arguments.vllm, arguments.chiasm
    with ExitStack() as stack:
        render = servers.render(vllm, model, scratch)
        stack.callback(render[0].stop)
        flags = ["--processor", "vllm"]
        server = servers.chiasm(chiasm, vllm, model, helpers, clients, scratch, flags)
        stack.callback(server.stop)
        python = [sys.executable, "-s", "-B"]
        item = [arguments.item, "--python", sys.executable, "--model", str(model)]
        commands = {
            "in one process": [*python, str(HERE / "in_one_process.py"), str(model), str(media)],
            "alone": [*python, str(HERE / "alone.py"), str(model), str(media)],
            "item": [*item, "--media", str(media)],
        }
        processes = {}
        for name, command in commands.items():
            processes[name] = Process(name, command, scratch, has_pipes=True)
            stack.callback(processes[name].stop)
        sides = Sides(Requests(media), server, render, processes)
        start = time.monotonic()
        sides.wait()
        print(f"all sides are ready after {time.monotonic() - start:.0f} s", file=sys.stderr)
        yield sides
