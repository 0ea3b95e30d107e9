"""All sides of a run: started at once, asked by turns, ended together."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import servers
from chat import Chats
from outcome import Outcome
from programs import Program
from servers import Server

HERE = Path(__file__).parent
# Asks a side about items, with these questions.
Ask = Callable[[str, list[int], list[int]], Outcome]


class Told:
    """A side that is told over pipes."""

    def __init__(self, name: str, command: list[str], scratch: Path) -> None:
        self._program = Program(name, command, scratch, speaks=True)

    def wait(self) -> None:
        self._program.answer()

    def ask(self, kind: str, items: list[int], questions: list[int]) -> Outcome:
        answer = self._program.tell({"kind": kind, "items": items, "questions": questions})
        return Outcome(answer["ms"], sum(answer["ms"]) / 1e3, answer.get("cpu"), answer["said"])

    def stop(self) -> None:
        self._program.stop()


class Sides:
    def __init__(self, chats: Chats, server: Server, render: tuple[Server, Server], told: dict[str, Told]) -> None:
        self._chats, self._server, self._render, self._told = chats, server, render, told
        # Frontends, which are asked one request after the other.
        self.frontends: dict[str, Ask] = {
            "chiasm": partial(self._over_http, server),
            "render": partial(self._over_http, render[0]),
            "render, no tensors": partial(self._over_http, render[1]),
            "in one process": told["in one process"].ask,
        }
        self.alone, self.item = told["alone"].ask, told["item"].ask

    def serve(self, kind: str, items: list[int], questions: list[int], clients: int) -> Outcome:
        return self._over_http(self._server, kind, items, questions, clients)

    def _over_http(self, server: Server, kind: str, items: list[int], questions: list[int], clients: int = 1) -> Outcome:
        bodies = [self._chats.chat(kind, item, question) for item, question in zip(items, questions, strict=True)]
        return server.ask(bodies, clients)

    def wait(self) -> None:
        self._server.wait("/ready")
        self._render[0].wait("/health")
        for side in self._told.values():
            side.wait()


@contextmanager
def started(chiasm: str, vllm: str, item: str, model: Path, media: Path, scratch: Path, helpers: int, clients: int) -> Iterator[Sides]:
    with ExitStack() as ends:
        render = servers.render(vllm, model, scratch)
        ends.callback(render[0].stop)
        server = servers.chiasm(chiasm, vllm, model, helpers, clients, scratch)
        ends.callback(server.stop)
        python = [sys.executable, "-s", "-B"]
        commands = {
            "in one process": [*python, str(HERE / "in_one_process.py"), str(model), str(media)],
            "alone": [*python, str(HERE / "alone.py"), str(model), str(media)],
            "item": [item, "--python", sys.executable, "--model", str(model), "--media", str(media)],
        }
        told = {}
        for name, command in commands.items():
            told[name] = Told(name, command, scratch)
            ends.callback(told[name].stop)
        sides = Sides(Chats(media), server, render, told)
        start = time.monotonic()
        sides.wait()
        print(f"all sides are ready after {time.monotonic() - start:.0f} s", file=sys.stderr)
        yield sides
