"""A frontend as small as can be: starts a helper, and has children of it."""

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
MEMORY = 32 << 20
PATIENCE = 120


class Child:
    """One child, and the memory that its last item came in."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection, self.pid = connection, pid
        self.memory: mmap.mmap | None = None

    def ask(self, call: dict[str, Any], *files: int) -> dict[str, Any] | None:
        send(self.connection, call, *files)
        message = child.receive(self.connection)
        return None if message is None else json.loads(message.content)

    def item(self, modality: str, data: bytes, **more: Any) -> dict[str, Any] | None:
        file = os.memfd_create("item")
        try:
            os.truncate(file, MEMORY)
            self.memory = mmap.mmap(file, 0)
            self.memory[: len(data)] = data
            return self.ask({"call": "item", "modality": modality, "length": len(data), **more}, file)
        finally:
            os.close(file)

    def tensor(self, data: dict[str, Any]) -> torch.Tensor:
        part = bytearray(self.memory[data["offset"] : data["offset"] + data["length"]])
        return torch.frombuffer(part, dtype=getattr(torch, data["dtype"])).reshape(data["shape"])

    def wait_for_its_end(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                if "\nState:\tZ" in Path(f"/proc/{self.pid}/status").read_text():
                    return
            except (FileNotFoundError, ProcessLookupError):
                return
            assert time.monotonic() < deadline, f"{self.pid} does not end"
            time.sleep(0.01)


class Helper:
    """A fork server of a model. Ends with its connection."""

    def __init__(self, *arguments: str) -> None:
        self.connection, servers = pair()
        self.process = subprocess.Popen(
            [sys.executable, "-B", "-m", "chiasm_processor", *arguments], cwd=PACKAGE, stdin=servers, stdout=subprocess.DEVNULL
        )
        servers.close()
        self.greeting = json.loads(child.receive(self.connection).content)

    def order(self, order: dict[str, Any], *files: int) -> None:
        send(self.connection, order, *files)

    def child(self) -> Child:
        ours, childs = pair()
        self.order({"fork": True}, childs.fileno())
        childs.close()
        return Child(ours, json.loads(child.receive(ours).content)["ready"])

    def close(self) -> int:
        """Hangs up; how the server ends."""
        self.connection.close()
        return self.process.wait(PATIENCE)


def pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE)
    return ours, theirs


def send(connection: socket.socket, message: dict[str, Any], *files: int) -> None:
    content = json.dumps(message).encode()
    socket.send_fds(connection, [child.LENGTH.pack(len(content)) + content], files)
