"""A minimal frontend: starts a fork server and uses its children."""

import json
import mmap
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from chiasm_processor import child

PACKAGE = Path(__file__).parents[1]
MEMORY_BYTES = 32 << 20
TIMEOUT_S = 120


class Child:
    """A child, and the memory of its last item."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        self.memory: mmap.mmap | None = None

    def call(self, call: dict[str, Any], *files: int) -> dict[str, Any] | None:
        send(self.connection, call, *files)
        message = child.receive(self.connection)
        return None if message is None else json.loads(message.content)

    def item(self, modality: str, data: bytes, **settings: Any) -> dict[str, Any] | None:
        file = os.memfd_create("item")
        try:
            os.truncate(file, MEMORY_BYTES)
            self.memory = mmap.mmap(file, 0)
            self.memory[: len(data)] = data
            call = {"call": "item", "modality": modality, "length": len(data), **settings}
            return self.call(call, file)
        finally:
            os.close(file)

    def tensor(self, data: dict[str, Any]) -> torch.Tensor:
        content = bytearray(self.memory[data["offset"] : data["offset"] + data["length"]])
        return torch.frombuffer(content, dtype=getattr(torch, data["dtype"])).reshape(data["shape"])

    def wait_for_exit(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                if "\nState:\tZ" in Path(f"/proc/{self.pid}/status").read_text():
                    return
            except (FileNotFoundError, ProcessLookupError):
                return
            assert time.monotonic() < deadline, f"{self.pid} does not exit"
            time.sleep(0.01)


class ForkServer:
    """A fork server of a model. It exits when its connection is closed."""

    def __init__(self, *arguments: str) -> None:
        self.connection, server_socket = pair()
        self.process = subprocess.Popen(
            [sys.executable, "-B", "-m", "chiasm_processor", *arguments],
            cwd=PACKAGE,
            stdin=server_socket,
            stdout=subprocess.DEVNULL,
        )
        server_socket.close()
        self.greeting = json.loads(child.receive(self.connection).content)

    def request(self, request: dict[str, Any], *files: int) -> None:
        send(self.connection, request, *files)

    def child(self) -> Child:
        connection, child_socket = pair()
        self.request({"fork": True}, child_socket.fileno())
        child_socket.close()
        return Child(connection, json.loads(child.receive(connection).content)["ready"])

    def close(self) -> int:
        """Disconnects and returns the server's exit status."""
        self.connection.close()
        return self.process.wait(TIMEOUT_S)


def pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.settimeout(TIMEOUT_S)
    return ours, theirs


def send(connection: socket.socket, message: dict[str, Any], *files: int) -> None:
    content = json.dumps(message).encode()
    socket.send_fds(connection, [child.LENGTH_PREFIX.pack(len(content)) + content], files)
