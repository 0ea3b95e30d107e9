"""A child of the fork server: locks itself before it reads any foreign byte, then answers calls."""

import ctypes
import os
import resource
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from . import fields, frames, messages, sandbox
from .messages import (
    Call,
    ChatCall,
    Decoded,
    DifferentFrames,
    Frame,
    FramesCall,
    ItemCall,
    MadeItem,
    PromptCall,
    Refusal,
    Reply,
)
from .processor import Processor
from .updates import to_plain

# Reasons are read by people.
MAX_REASON_CHARS = 1000
# The prefix of a message: the length of its content.
LENGTH_PREFIX = struct.Struct("<I")
# Larger than the message of any prompt that a model accepts.
MAX_MESSAGE_BYTES = 64 << 20
# The freed memory of items that glibc keeps for the next items. Otherwise the kernel would map and
# clear the pages again for each image, which takes milliseconds.
RETAINED_BYTES = 128 << 20
# The size from which glibc maps an allocation separately and unmaps it when freed.
MMAP_THRESHOLD_BYTES = 32 << 20
# Parameters of mallopt (malloc.h).
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


class Message(NamedTuple):
    """A message, and the open file sent with it, which the receiver must close."""

    content: bytes
    file: int | None


def run(processor: Processor, connection: socket.socket, address_space: int, locked: bool) -> None:
    """Answers calls until the frontend disconnects.

    ``address_space`` is the number of bytes that this process may map beyond the current ones; 0
    for no limit.
    """
    retain_freed_memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if address_space:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + address_space,) * 2)
    if locked:
        # With some settings of a request, processors read the model's files again.
        sandbox.lock(sandbox.library_paths() + processor.model_folders())
    send(connection, b'{"ready":%d}' % os.getpid())
    while (message := receive(connection)) is not None:
        call = messages.decode(message.content)
        reply = answer(processor, connection, call, message.file)
        send(connection, messages.encode(reply))


def retain_freed_memory() -> None:
    """Configures the allocator to reuse an item's memory for the next item.

    Only glibc has these settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, RETAINED_BYTES)


def answer(
    processor: Processor, connection: socket.socket, call: Call, file: int | None
) -> Reply:
    """Returns the reply to a call. Any error becomes a refusal with vLLM's message.

    Frames are sent before the reply, over the connection.
    """
    try:
        match call:
            case ItemCall():
                return _make_item(processor, call, file)
            case PromptCall():
                return processor.expand_prompt(call.token_ids, call.items, call.processor_kwargs)
            case ChatCall():
                return processor.expand_chat(
                    call.messages, call.items, call.settings, call.processor_kwargs
                )
            case FramesCall():
                return _send_frames(processor, connection, call, file)
    except frames.Mismatch as error:
        return DifferentFrames(str(error)[:MAX_REASON_CHARS])
    except Exception as error:
        return Refusal(f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS])
    finally:
        if file is not None:
            os.close(file)


def _make_item(processor: Processor, call: ItemCall, file: int | None) -> MadeItem:
    data = _read_file(file, call.length)
    item, updates = processor.make_item(call.modality, data, call.processor_kwargs, call.io_kwargs)
    return MadeItem(
        list(fields.write(item, file, call.length)), [to_plain(update) for update in updates]
    )


def _send_frames(
    processor: Processor, connection: socket.socket, call: FramesCall, file: int | None
) -> Decoded:
    """Sends each wanted frame as soon as it is decoded and a slot is free."""
    data = _read_file(file, call.length)
    ring = frames.Ring(file, call)
    for number, (position, frame) in enumerate(frames.decode(data, call, processor.limits)):
        if number >= call.slots:
            _wait_for_free_slot(connection)
        offset = ring.write(number, frame)
        send(connection, messages.encode(Frame(position, offset)))
    return Decoded()


def _wait_for_free_slot(connection: socket.socket) -> None:
    message = receive(connection)
    if message is None:
        raise ConnectionError("the frontend has disconnected")
    messages.decode_taken(message.content)


def _read_file(memory: int | None, length: int) -> bytes:
    """Returns the file at the beginning of the memory."""
    if memory is None:
        raise ValueError("there is no memory with the call")
    data = os.pread(memory, length, 0)
    if len(data) != length:
        raise ValueError(f"there are no {length} bytes in the memory with the call")
    return data


def send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(LENGTH_PREFIX.pack(len(message)) + message)


def receive(connection: socket.socket) -> Message | None:
    """Returns the next message; None if the peer has disconnected."""
    header, files, _, _ = socket.recv_fds(connection, LENGTH_PREFIX.size, 1)
    rest = _receive_exactly(connection, LENGTH_PREFIX.size - len(header)) if header else None
    if rest is None:
        return None
    (length,) = LENGTH_PREFIX.unpack(header + rest)
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes")
    content = _receive_exactly(connection, length)
    return None if content is None else Message(content, next(iter(files), None))


def _receive_exactly(connection: socket.socket, length: int) -> bytes | None:
    buffer = bytearray(length)
    view = memoryview(buffer)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            return None
        view = view[count:]
    return bytes(buffer)
