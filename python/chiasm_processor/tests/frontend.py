"""A frontend as small as can be: starts a helper, and has children of it."""

import json
import mmap
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from chiasm_processor import child

PACKAGE = Path(__file__).parents[1]
MEMORY = 32 << 20
PATIENCE = 120


class Child:
    """One child, and the memory that it shares with us."""

    def __init__(self, connection: socket.socket, memory: mmap.mmap, pid: int) -> None:
        self.connection, self.memory, self.pid = connection, memory, pid

    def ask(self, call: dict[str, Any]) -> dict[str, Any] | None:
        child.send(self.connection, json.dumps(call).encode())
        message = child.receive(self.connection)
        return None if message is None else json.loads(message)

    def item(self, modality: str, data: bytes, **more: Any) -> dict[str, Any] | None:
        self.memory[: len(data)] = data
        return self.ask({"call": "item", "modality": modality, "length": len(data), **more})

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
        self.folder = tempfile.TemporaryDirectory()
        self.socket_path = f"{self.folder.name}/helper"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.socket_path)
        self.listener.listen()
        self.listener.settimeout(PATIENCE)
        self.process = subprocess.Popen(
            [sys.executable, "-B", "-m", "chiasm_processor", self.socket_path, *arguments], cwd=PACKAGE, stdout=subprocess.DEVNULL
        )
        self.connection = self.accept()
        self.greeting = json.loads(child.receive(self.connection))
        self.children = 0

    def accept(self) -> socket.socket:
        connection, _ = self.listener.accept()
        connection.settimeout(PATIENCE)
        return connection

    def order(self, order: dict[str, Any]) -> None:
        child.send(self.connection, json.dumps(order).encode())

    def child(self) -> Child:
        path = Path(self.folder.name) / f"memory{self.children}"
        self.children += 1
        with path.open("w+b") as file:
            file.truncate(MEMORY)
            memory = mmap.mmap(file.fileno(), 0)
        self.order({"fork": str(path)})
        connection = self.accept()
        return Child(connection, memory, json.loads(child.receive(connection))["ready"])

    def close(self) -> int:
        """Hangs up; how the server ends."""
        self.connection.close()
        status = self.process.wait(PATIENCE)
        self.listener.close()
        self.folder.cleanup()
        return status
