"""Images in shared memory as Dynamo passes them between its processes: each in a new segment, which
is read once and removed.

The steps are those of `MmKwargsShmSender` and `MmKwargsShmReceiver`
(dynamo/common/multimodal/mm_kwargs_transfer.py of the package ai-dynamo), in their order and with
their copies. There are two forms of an item:

- `pickle`: as in 1.5.1.
- `msgpack`: as in 1.6.1. The buffers of vLLM's encoder are joined, each after its length.
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


def _join(item):
    buffers = MsgpackEncoder().encode(item)
    joined = bytearray(COUNT.pack(len(buffers)))
    for buffer in buffers:
        view = memoryview(buffer)
        joined += LENGTH.pack(view.nbytes)
        joined += view
    return bytes(joined)


def _split(joined):
    view = memoryview(joined)
    (count,) = COUNT.unpack_from(view)
    offset = COUNT.size
    buffers = []
    for _ in range(count):
        (length,) = LENGTH.unpack_from(view, offset)
        offset += LENGTH.size
        buffers.append(view[offset : offset + length])
        offset += length
    return MsgpackDecoder(MultiModalKwargsItem).decode(buffers)


# The encoder, the type of the reader's copy, and the decoder.
FORMS = {
    "pickle": (pickle.dumps, bytes, pickle.loads),
    "msgpack": (_join, bytearray, _split),
}


def write(form, item):
    """Returns a new segment with the item, and the number of used bytes."""
    encode, _, _ = FORMS[form]
    data = encode(item)
    name = f"mm_kwargs_{os.getpid()}_{uuid.uuid4().hex[:12]}_0"
    segment = SharedMemory(name=name, create=True, size=len(data))
    segment.buf[: len(data)] = data
    return segment, len(data)


def read(form, name, size):
    """Returns the item of a segment, from a copy of its bytes."""
    _, copy, decode = FORMS[form]
    segment = SharedMemory(name=name, create=False)
    data = copy(segment.buf[:size])
    segment.close()
    return decode(data)


def forget(name):
    """Leaves the removal to the writer. Python 3.11 and 3.12 would also remove the segment when
    the reader ends, and complain."""
    resource_tracker.unregister(f"/{name}", "shared_memory")


def remove(segment):
    segment.close()
    segment.unlink()
