"""A process that makes items: forked off a warm server, it locks itself before the first foreign byte and then answers calls."""

import ctypes
import os
import resource
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from . import fields, messages, sandbox
from .messages import Call, Chat, Item, Made, Prompt, Refused, Reply
from .processor import Processor
from .updates import to_plain

# A refusal is for people.
MOST_CHARACTERS = 1000
LENGTH = struct.Struct("<I")
# Beyond any prompt that a model takes.
MOST_BYTES = 64 << 20
# Bytes that glibc keeps of what an item took: to have pages given and cleared again for each image takes milliseconds.
KEPT_BYTES, LARGEST_KEPT = 128 << 20, 32 << 20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class Message(NamedTuple):
    """What was said, and the open file that came with it, which is the receiver's to close."""

    content: bytes
    file: int | None


def run(processor: Processor, connection: socket.socket, address_space: int, locked: bool) -> None:
    """Answers until the frontend hangs up."""
    keep_memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if address_space:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + address_space,) * 2)
    if locked:
        # Settings of a request make some processors read their files again.
        sandbox.lock(sandbox.libraries() + processor.folders())
    send(connection, b'{"ready":%d}' % os.getpid())
    while (message := receive(connection)) is not None:
        send(connection, messages.encode(answer(processor, messages.decode(message.content), message.file)))


def keep_memory() -> None:
    """Has the allocator use an item's memory again for the next one. Other C libraries than glibc have no such settings."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def answer(processor: Processor, call: Call, file: int | None) -> Reply:
    """What becomes of a call. An item that vLLM does not take is refused in its words, whatever it fails of."""
    try:
        match call:
            case Item():
                return _item(processor, call, file)
            case Prompt():
                return processor.prompt(call.token_ids, call.items, call.processor_kwargs)
            case Chat():
                return processor.chat(call.messages, call.items, call.settings, call.processor_kwargs)
    except Exception as error:
        return Refused(f"{type(error).__name__}: {error}"[:MOST_CHARACTERS])
    finally:
        if file is not None:
            os.close(file)


def _item(processor: Processor, call: Item, file: int | None) -> Made:
    if file is None:
        raise ValueError("there is no memory with the item")
    data = os.pread(file, call.length, 0)
    if len(data) != call.length:
        raise ValueError(f"there are no {call.length} bytes in the memory with the item")
    item, updates = processor.item(call.modality, data, call.processor_kwargs, call.io_kwargs)
    return Made(list(fields.write(item, file, call.length)), [to_plain(update) for update in updates])


def send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(LENGTH.pack(len(message)) + message)


def receive(connection: socket.socket) -> Message | None:
    """The next message; None if there is none any more."""
    header, files, _, _ = socket.recv_fds(connection, LENGTH.size, 1)
    rest = _exactly(connection, LENGTH.size - len(header)) if header else None
    if rest is None:
        return None
    (length,) = LENGTH.unpack(header + rest)
    if length > MOST_BYTES:
        raise ValueError(f"a message of {length} bytes")
    content = _exactly(connection, length)
    return None if content is None else Message(content, next(iter(files), None))


def _exactly(connection: socket.socket, length: int) -> bytes | None:
    buffer = bytearray(length)
    view = memoryview(buffer)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            return None
        view = view[count:]
    return bytes(buffer)
