"""The frontend's arena as the engine sees it: a mapped file, its leases, and tensors that are views of its slots."""

import mmap
import os
import re
import stat
import struct
import sys
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from chiasm_vllm.handle import Handle, HandleRefused, TensorType

FOLDER = "/dev/shm"
NAME = re.compile(r"chiasm\.([0-9]+)\.([0-9]+)\.([0-9a-f]{16})")

LAYOUT = 1
MAGIC = b"CHIASMSM"
# Magic, layout, leases, length of the file, where the slots begin, owner's pid, 0, owner's start, number.
HEADER = struct.Struct("<8sIIQQIIQQ")
# State, generation, offset, length, returned, 0.
LEASE = struct.Struct("<IIQQII")
TABLE_AT = 4096
PAGE = 4096
SLOT_ALIGNMENT = 64
LENT = 1
RETURNED_AT = 24
WORD = 4


class Arena:
    """One arena, mapped for as long as this object or a view of one of its slots lives.

    ``resolve`` is for one thread; leases are returned from whichever thread drops the last reference to a view.
    """

    def __init__(self, name: str) -> None:
        """Opens and maps the arena ``name``, a file name without a folder.

        Raises ValueError if it is not an arena of layout 1 that belongs to this user, OSError if it can't be opened.
        """
        self.name = name
        pid, start, self.number = _parse_name(name)
        if sys.byteorder != "little":
            raise ValueError("arenas are little-endian and this machine is not")
        fd = os.open(os.path.join(FOLDER, name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self.length = _check_file(name, os.fstat(fd))
            # Not multiprocessing.shared_memory: its tracker removes the name when this process ends.
            self._mapping = mmap.mmap(fd, self.length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        self.leases, self._slots_at = _check_header(name, self._mapping, (pid, start, int(self.number, 16)))
        self._words = memoryview(self._mapping)[: self._slots_at].cast("I")
        self._pid = os.getpid()
        self._resolved: dict[int, int] = {}

    def resolve(self, dtype: object, shape: object, handle: Handle) -> torch.Tensor:
        """The tensor that ``handle`` stands for, a view of its slot. Its lease is returned when the last reference
        to its storage is gone, or at once if it has no bytes.

        Raises HandleRefused. If it was the handle's first use of a lease that is lent, the lease is returned at once,
        because no view will ever do it.
        """
        give_back = self._take(handle)
        try:
            tensor_type = TensorType.parse(dtype, shape)
            self._check_slot(handle, tensor_type)
            if handle.length == 0:
                tensor = torch.empty(tensor_type.shape, dtype=tensor_type.dtype)
                give_back()
                return tensor
            array = np.frombuffer(self._mapping, np.uint8, handle.length, handle.offset)
            end = weakref.finalize(array, give_back)
        except BaseException:
            give_back()
            raise
        # At exit other threads may still read the tensor, and the arena goes with this process anyway.
        end.atexit = False
        # The storage of all three holds the array, so from here on the lease is returned with it.
        return torch.from_numpy(array).view(tensor_type.dtype).view(tensor_type.shape)

    def _take(self, handle: Handle) -> Callable[[], None]:
        """Checks that the handle's lease is lent to it and was not used before. What it returns is to be called once,
        and returns the lease."""
        if handle.arena != self.number:
            raise HandleRefused("a handle of another arena than the attached one", arena=handle.arena)
        if handle.lease >= self.leases:
            raise HandleRefused("a lease that is not in the table", lease=handle.lease)
        state, generation, _, _, returned, _ = self._entry(handle)
        if state != LENT:
            raise HandleRefused("a lease that is not lent", lease=handle.lease)
        if generation != handle.generation:
            raise HandleRefused("a lease of another generation", lease=handle.lease, generation=handle.generation)
        # With two views of one lease the first to go would return it under the other.
        if generation in (returned, self._resolved.get(handle.lease)):
            raise HandleRefused("a lease that was used before", lease=handle.lease, generation=generation)
        self._resolved[handle.lease] = generation
        word = (_entry_at(handle.lease) + RETURNED_AT) // WORD
        return partial(_return_lease, self._words, word, generation, self._pid)

    def _check_slot(self, handle: Handle, tensor_type: TensorType) -> None:
        _, _, offset, length, *_ = self._entry(handle)
        if (offset, length) != (handle.offset, handle.length):
            raise HandleRefused("a slot that is not the lease's", offset=handle.offset, length=handle.length)
        if offset < self._slots_at or offset % SLOT_ALIGNMENT or offset + length > self.length:
            raise HandleRefused("a slot where none can be", offset=offset, length=length)
        need = tensor_type.nbytes
        if need != length:
            raise HandleRefused("a slot of another length than dtype and shape need", length=length, need=need)

    def _entry(self, handle: Handle) -> tuple[int, ...]:
        return LEASE.unpack_from(self._mapping, _entry_at(handle.lease))


def _return_lease(words: memoryview, word: int, generation: int, pid: int) -> None:
    """Says in the table that the engine is done with a lease. Runs wherever a reference count happens to drop to zero
    or a garbage collection happens to start: at any allocation, in any thread, under any lock. So it takes no lock and
    logs nothing.

    It needs none: each word `returned` has one writer at a time, the one view of the lease. The assignment is a copy
    of 4 bytes, whose number the compiler knows, to an address that is a multiple of 4: one store, which the frontend
    sees as a whole.
    """
    # A child forked from the engine has copies of its views. Their end means nothing while the engine has its own.
    if os.getpid() == pid:
        words[word] = generation


def _entry_at(lease: int) -> int:
    return TABLE_AT + lease * LEASE.size


def _parse_name(name: object) -> tuple[int, int, str]:
    """Owner's process id, its start time, and the number as 16 hex digits."""
    match = NAME.fullmatch(name) if type(name) is str else None
    if match is None:
        raise ValueError("an arena is named chiasm.<pid>.<start>.<16 hex digits>; send the name without a folder")
    return int(match[1]), int(match[2]), match[3]


def _check_file(name: str, file: os.stat_result) -> int:
    """The file's length in bytes, if it is a regular one that only this user can open."""
    if not stat.S_ISREG(file.st_mode):
        raise ValueError(f"{name} is not a regular file")
    if file.st_uid != os.geteuid():
        raise ValueError(f"{name} belongs to user {file.st_uid}; run engine and frontend as the same user")
    if stat.S_IMODE(file.st_mode) != 0o600:
        raise ValueError(f"{name} has mode {stat.S_IMODE(file.st_mode):04o} and not 0600")
    if file.st_size < TABLE_AT:
        raise ValueError(f"{name} is too short for an arena")
    return file.st_size


def _check_header(name: str, mapping: mmap.mmap, owner_and_number: tuple[int, int, int]) -> tuple[int, int]:
    """The number of leases, and where the slots begin."""
    magic, layout, leases, length, slots_at, pid, _, start, number = HEADER.unpack_from(mapping)
    if magic != MAGIC:
        raise ValueError(f"{name} is not an arena")
    if layout != LAYOUT:
        raise ValueError(f"{name} has layout {layout} and this plugin knows {LAYOUT}; install the two of one version")
    if length != len(mapping):
        raise ValueError(f"{name} says that it is {length} bytes long and is {len(mapping)}")
    if slots_at % PAGE or not _entry_at(leases) <= slots_at <= length:
        raise ValueError(f"{name} has its slots at {slots_at}, which can't be with {leases} leases in {length} bytes")
    if (pid, start, number) != owner_and_number:
        raise ValueError(f"{name} has another owner or number in its header than in its name")
    return leases, slots_at
