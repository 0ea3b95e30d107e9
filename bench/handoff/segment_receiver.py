"""The receiver of segments: connects to an address and answers each item with the time at which it was there.

    in   [form, name of the segment, bytes used], msgpack
    out  [clock in ns, checksum of the patches], msgpack
"""

import time

import msgspec
import zmq

import segments
from images import checksum


def receive(address):
    """Does not return."""
    socket = zmq.Context().socket(zmq.PAIR)
    socket.connect(address)
    while True:
        form, name, size = msgspec.msgpack.decode(socket.recv())
        item = segments.read(form, name, size)
        done_at = time.monotonic_ns()
        segments.forget(name)
        socket.send(msgspec.msgpack.encode([done_at, checksum(item)]))
