"""Sides that are asked over HTTP: `chiasm serve` and `vllm launch render`."""

import http.client
import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from chat import MODEL
from outcome import Outcome
from programs import Program

START = 300.0
PATIENCE = 600.0
# How long a frontend gets, after its last answer, for what it does behind them.
SETTLE = 0.05
# Most of a refusal that goes into an error.
SHOWN = 500
GIB = 1 << 30
# Of a frame, at most: 32 frames are then what an engine with vLLM's defaults encodes at once, 8,192 tokens, and not a third more.
FRAME_PIXELS = 512 * 28 * 28


class Server:
    """A frontend that is measured, at a port of this machine."""

    def __init__(self, name: str, frontend: Program, engines: list[Program], port: int, path: str, more: dict[str, Any]) -> None:
        self.name = name
        self._frontend, self._engines = frontend, engines
        self._port, self._path, self._more = port, path, more

    def wait(self, ready: str) -> None:
        end = time.monotonic() + START
        while True:
            for program in (self._frontend, *self._engines):
                program.check()
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
                connection.request("GET", ready)
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            if time.monotonic() > end:
                raise RuntimeError(self._frontend.failed("is not ready"))
            time.sleep(0.1)

    def ask(self, bodies: list[dict[str, Any]], clients: int) -> Outcome:
        """Asks all, so many at once."""
        texts = [json.dumps(body | self._more).encode() for body in bodies]
        connections = [http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE) for _ in range(clients)]
        for connection in connections:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        free = list(connections)

        def one(text: bytes) -> tuple[float, int]:
            connection = free.pop()
            start = time.perf_counter()
            answer = self._one(connection, text)
            taken = (time.perf_counter() - start) * 1e3
            free.append(connection)
            return taken, prompt_tokens(answer)

        cpu, start = self._frontend.cpu(), time.perf_counter()
        with ThreadPoolExecutor(clients) as threads:
            answers = list(threads.map(one, texts))
        wall = time.perf_counter() - start
        time.sleep(SETTLE)
        cpu = self._frontend.cpu() - cpu
        for connection in connections:
            connection.close()
        return Outcome([taken for taken, _ in answers], wall, cpu, [tokens for _, tokens in answers])

    def _one(self, connection: http.client.HTTPConnection, text: bytes) -> bytes:
        connection.request("POST", self._path, text, {"content-type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(self._frontend.failed(f"answered {answer.status}: {content[:SHOWN].decode(errors='replace')}"))
        return content

    def stop(self) -> None:
        for program in (self._frontend, *self._engines):
            program.stop()


def prompt_tokens(answer: bytes) -> int:
    """How many tokens the prompt had. A rendered one is there as a whole, before its tensors, which are not looked at."""
    head = answer[: answer.find(b"]") + 1]
    if b'"token_ids":[' in head:
        return head.count(b",", head.find(b"[")) + 1
    return int(json.loads(answer)["usage"]["prompt_tokens"])


def chiasm(program: str, vllm: str, model: Path, helpers: int, clients: int, scratch: Path) -> Server:
    port, handshake = free_port(), f"tcp://127.0.0.1:{free_port()}"
    # Holds a repeated item, and is soon full of new ones, as it is in an engine that has run for a while.
    cache = ["--receiver-cache-gb", "0.5"]
    engine = [program, "sim-engine", "--model", str(model), "--handshake", handshake, "--sim-speedup", "1000000"]
    engine += ["--sim-max-model-len", "32768", "--sim-blocks", "65536", *cache]
    frontend = [program, "serve", str(model), "--served-model-name", MODEL, "--port", str(port), "--attach", handshake]
    frontend += ["--processor", "vllm", "--vllm", vllm, "--processors", str(helpers), "--mm-arena-gb", "1.5", *cache]
    frontend += ["--processor-queue", str(2 * clients), "--max-bytes-in-flight", str(8 * GIB), "--processor-timeout", str(int(PATIENCE))]
    more = {"CHIASM_STATE_DIR": str(scratch / "state")}
    engines = [Program("simulated engine", engine, scratch)]
    return Server("chiasm", Program("chiasm", frontend, scratch, more=more), engines, port, "/v1/chat/completions", {})


def render(vllm: str, model: Path, scratch: Path) -> tuple[Server, Server]:
    """As it comes, and asked to leave out the tensors."""
    port = free_port()
    command = [vllm, "launch", "render", str(model), "--served-model-name", MODEL, "--port", str(port), "--host", "127.0.0.1"]
    program = Program("render", command, scratch)
    path = "/v1/chat/completions/render"
    return Server("render", program, [], port, path, {}), Server("render, no tensors", program, [], port, path, {"mm_payload": "none"})


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def copy_of_model(model: Path, target: Path) -> None:
    """The tiny model with the type and the length of prompts of one that is served."""
    shutil.copytree(model, target)

    def change(name: str, changes: Callable[[dict[str, Any]], None]) -> None:
        settings = json.loads((target / name).read_text())
        changes(settings)
        (target / name).write_text(json.dumps(settings))

    def of_model(settings: dict[str, Any]) -> None:
        settings["dtype"] = settings["text_config"]["dtype"] = "bfloat16"
        settings["text_config"]["max_position_embeddings"] = 32_768

    change("config.json", of_model)
    change("processor_config.json", lambda settings: settings["video_processor"]["size"].update(longest_edge=FRAME_PIXELS))


def cores() -> int:
    return len(os.sched_getaffinity(0))
