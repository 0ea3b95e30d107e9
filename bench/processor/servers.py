"""The sides with HTTP: `chiasm serve` and `vllm launch render`."""

import http.client
import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from media import MODEL
from programs import Program

START_TIMEOUT_S = 300.0
TIMEOUT_S = 600.0
# The pause after the last answer, in which a frontend finishes its work on the requests.
SETTLE_S = 0.05
# The maximum number of bytes of a refusal in an error.
MAX_SHOWN_BYTES = 500
GIB = 1 << 30
# The maximum number of pixels of a frame. With it, 32 frames are the 8,192 tokens that an engine
# with vLLM's defaults encodes at once, instead of a third more.
FRAME_PIXELS = 512 * 28 * 28


class Outcome(NamedTuple):
    """The results of some requests or items."""

    # The milliseconds of each.
    times: list[float]
    # The wall-clock seconds and CPU seconds of all. There is no CPU time of the side `item`.
    wall: float
    cpu: float | None
    # The prompt tokens of each, the sum of the tensors' bytes, or a digest of the pixels.
    results: list[int]


class Server:
    """A frontend at a port of this machine, and its engines."""

    def __init__(
        self,
        programs: list[Program],
        port: int,
        path: str,
        fields: dict[str, Any] | None = None,
        result: Callable[[bytes], int] | None = None,
    ) -> None:
        self._programs, self._frontend = programs, programs[0]
        self._port, self._path, self._fields = port, path, fields or {}
        self._result = result or prompt_tokens

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)

    def wait(self, path: str) -> None:
        """Waits until the response for this path is 200."""
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            for program in self._programs:
                program.check()
            try:
                connection = self._connect()
                connection.request("GET", path)
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            if time.monotonic() > end:
                raise RuntimeError(self._frontend.failed("is not ready"))
            time.sleep(0.1)

    def send_all(self, bodies: list[dict[str, Any]], clients: int) -> Outcome:
        """Sends all requests with concurrent clients."""
        texts = [json.dumps(body | self._fields).encode() for body in bodies]
        connections = [self._connect() for _ in range(clients)]
        for connection in connections:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        free = list(connections)

        def send(text: bytes) -> tuple[float, int]:
            connection = free.pop()
            start = time.perf_counter()
            answer = self._send(connection, text)
            ms = (time.perf_counter() - start) * 1e3
            free.append(connection)
            return ms, self._result(answer)

        cpu, start = self._frontend.cpu(), time.perf_counter()
        with ThreadPoolExecutor(clients) as threads:
            answers = list(threads.map(send, texts))
        wall = time.perf_counter() - start
        time.sleep(SETTLE_S)
        cpu = self._frontend.cpu() - cpu
        for connection in connections:
            connection.close()
        return Outcome([ms for ms, _ in answers], wall, cpu, [result for _, result in answers])

    def _send(self, connection: http.client.HTTPConnection, text: bytes) -> bytes:
        connection.request("POST", self._path, text, {"content-type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            shown = content[:MAX_SHOWN_BYTES].decode(errors="replace")
            raise RuntimeError(self._frontend.failed(f"answered {response.status}: {shown}"))
        return content

    def stop(self) -> None:
        for program in self._programs:
            program.stop()


def prompt_tokens(answer: bytes) -> int:
    """Returns the number of prompt tokens. A rendered prompt is in front of its tensors, which are
    not parsed."""
    head = answer[: answer.find(b"]") + 1]
    if b'"token_ids":[' in head:
        return head.count(b",", head.find(b"[")) + 1
    return int(json.loads(answer)["usage"]["prompt_tokens"])


def chiasm(
    program: str,
    vllm: str,
    model: Path,
    helpers: int,
    clients: int,
    scratch: Path,
    flags: list[str],
    result: Callable[[bytes], int] | None = None,
) -> Server:
    """Returns a frontend with these additional flags, and its simulated engine."""
    port, handshake = free_port(), f"tcp://127.0.0.1:{free_port()}"
    # As in an engine that has run for a while, the cache holds a repeated item and is soon full of
    # new ones.
    cache = ["--receiver-cache-gb", "0.5"]
    engine = [program, "sim-engine", "--model", str(model), "--handshake", handshake, *cache]
    engine += ["--sim-speedup", "1000000", "--sim-max-model-len", "32768", "--sim-blocks", "65536"]
    frontend = [program, "serve", str(model), "--served-model-name", MODEL, "--port", str(port)]
    frontend += ["--attach", handshake, "--vllm", vllm, *flags]
    frontend += ["--processors", str(helpers), "--processor-queue", str(2 * clients)]
    frontend += ["--processor-timeout", str(int(TIMEOUT_S)), "--mm-arena-gb", "1.5", *cache]
    frontend += ["--max-bytes-in-flight", str(8 * GIB)]
    variables = {"CHIASM_STATE_DIR": str(scratch / "state")}
    engines = Program("simulated engine", engine, scratch)
    server = Program("chiasm", frontend, scratch, variables=variables)
    return Server([server, engines], port, "/v1/chat/completions", result=result)


def render(vllm: str, model: Path, scratch: Path) -> tuple[Server, Server]:
    """Returns the server with its defaults, and with requests that leave out the tensors."""
    port, path = free_port(), "/v1/chat/completions/render"
    command = [vllm, "launch", "render", str(model), "--served-model-name", MODEL]
    command += ["--port", str(port), "--host", "127.0.0.1"]
    programs = [Program("render", command, scratch)]
    without_tensors = Server(programs, port, path, {"mm_payload": "none"})
    return Server(programs, port, path), without_tensors


def free_port() -> int:
    """Returns a port on which no process listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def copy_model(model: Path, target: Path) -> None:
    """Copies a tiny model, with the type and the prompt length of a model that is served."""
    shutil.copytree(model, target)
    file = target / "config.json"
    config = json.loads(file.read_text())
    config["dtype"] = config["text_config"]["dtype"] = "bfloat16"
    config["text_config"]["max_position_embeddings"] = 32_768
    file.write_text(json.dumps(config))


def limit_frames(model: Path) -> None:
    """Sets the maximum number of pixels of a frame in the copy of a Qwen2.5-VL."""
    file = model / "processor_config.json"
    config = json.loads(file.read_text())
    config["video_processor"]["size"].update(longest_edge=FRAME_PIXELS)
    file.write_text(json.dumps(config))


def cores() -> int:
    return len(os.sched_getaffinity(0))
