"""Images in shared memory as Dynamo passes them between its processes: each in a segment of its own, made for it, read
once and removed.

The steps are those of `MmKwargsShmSender` and `MmKwargsShmReceiver` (dynamo/common/multimodal/mm_kwargs_transfer.py of the
package ai-dynamo), in their order and with their copies. Two ways to turn an item into bytes and back:

- `pickle`: as in 1.5.1.
- `msgpack`: as in 1.6.1. vLLM's encoder, its buffers joined behind their lengths; on the other side the same back.
"""

import os
import pickle
import struct
import uuid
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

COUNT = struct.Struct("<I")
LENGTH = struct.Struct("<Q")


def _joined(item):
    buffers = MsgpackEncoder().encode(item)
    joined = bytearray(COUNT.pack(len(buffers)))
    for buffer in buffers:
        view = memoryview(buffer)
        joined += LENGTH.pack(view.nbytes)
        joined += view
    return bytes(joined)


def _parted(joined):
    view = memoryview(joined)
    (count,) = COUNT.unpack_from(view)
    at = COUNT.size
    buffers = []
    for _ in range(count):
        (length,) = LENGTH.unpack_from(view, at)
        at += LENGTH.size
        buffers.append(view[at : at + length])
        at += length
    return MsgpackDecoder(MultiModalKwargsItem).decode(buffers)


# To bytes, the type of the reader's copy, from bytes.
FORMS = {
    "pickle": (pickle.dumps, bytes, pickle.loads),
    "msgpack": (_joined, bytearray, _parted),
}


def write(form, item):
    """A new segment with the item in it, and how many of its bytes are used."""
    to_bytes, _, _ = FORMS[form]
    data = to_bytes(item)
    segment = SharedMemory(name=f"mm_kwargs_{os.getpid()}_{uuid.uuid4().hex[:12]}_0", create=True, size=len(data))
    segment.buf[: len(data)] = data
    return segment, len(data)


def read(form, name, size):
    """The item in a segment, copied out of it."""
    _, copy, from_bytes = FORMS[form]
    segment = SharedMemory(name=name, create=False)
    data = copy(segment.buf[:size])
    segment.close()
    return from_bytes(data)


def forget(name):
    """The segment is its writer's to remove. Python 3.11 and 3.12 would try so again when its reader ends, and complain."""
    resource_tracker.unregister(f"/{name}", "shared_memory")


def remove(segment):
    segment.close()
    segment.unlink()
