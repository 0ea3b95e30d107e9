"""The receiver of segments. It answers each item with the time at which it has the item.

    in   [form, name of the segment, number of used bytes], msgpack
    out  [clock in ns, checksum of the patches], msgpack
"""

import time

import msgspec
import zmq

import segments
from images import checksum


def receive(address):
    """Connects to an address and answers until the process ends."""
    socket = zmq.Context().socket(zmq.PAIR)
    socket.connect(address)
    while True:
        form, name, size = msgspec.msgpack.decode(socket.recv())
        item = segments.read(form, name, size)
        done_at = time.monotonic_ns()
        segments.forget(name)
        socket.send(msgspec.msgpack.encode([done_at, checksum(item)]))
