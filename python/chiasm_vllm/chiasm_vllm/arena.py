"""The engine's side of the frontend's arena: a mapped file, its leases, and views of its slots."""

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

SHM_FOLDER = "/dev/shm"
# The owner's process id, its start time, and the arena's number.
NAME_PATTERN = re.compile(r"chiasm\.([0-9]+)\.([0-9]+)\.([0-9a-f]{16})")

LAYOUT = 1
MAGIC = b"CHIASMSM"
# Magic, layout, leases, file length, offset of the slots, owner's pid, 0, owner's start, number.
HEADER = struct.Struct("<8sIIQQIIQQ")
# State, generation, offset, length, returned, 0.
LEASE_ENTRY = struct.Struct("<IIQQII")
TABLE_OFFSET = 4096
PAGE_BYTES = 4096
SLOT_ALIGNMENT_BYTES = 64
STATE_LENT = 1
# The offset of `returned` in a lease's entry.
RETURNED_OFFSET = 24
WORD_BYTES = 4


class Arena:
    """An arena, mapped for as long as this object or a view of one of its slots exists.

    ``resolve`` must be called from one thread. The thread that drops the last reference to a view
    returns its lease.
    """

    def __init__(self, name: str) -> None:
        """Opens and maps the arena ``name``, a file name without a folder.

        Raises ValueError unless it is an arena of layout 1 that belongs to this user, and OSError
        if it cannot be opened.
        """
        self.name = name
        pid, start, self.number = _parse_name(name)
        if sys.byteorder != "little":
            raise ValueError("arenas are little-endian and this machine is not")
        fd = os.open(os.path.join(SHM_FOLDER, name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self.length = _check_file(name, os.fstat(fd))
            # Not multiprocessing.shared_memory: its tracker removes the name when this process
            # ends.
            self._mapping = mmap.mmap(
                fd, self.length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
            )
        finally:
            os.close(fd)
        owner_and_number = (pid, start, int(self.number, 16))
        self.leases, self._slots_offset = _check_header(name, self._mapping, owner_and_number)
        self._words = memoryview(self._mapping)[: self._slots_offset].cast("I")
        self._pid = os.getpid()
        # The last resolved generation of each lease.
        self._resolved: dict[int, int] = {}

    def resolve(self, dtype: object, shape: object, handle: Handle) -> torch.Tensor:
        """Returns the tensor of ``handle``, a view of its slot.

        Its lease is returned when the last reference to its storage is dropped. The lease of a
        tensor without bytes is returned at once.

        Raises HandleRefused. If this was the handle's first use of a lent lease, the lease is
        returned at once, because no view exists that would return it.
        """
        return_lease = self._claim_lease(handle)
        try:
            tensor_type = TensorType.parse(dtype, shape)
            self._check_slot(handle, tensor_type)
            if handle.length == 0:
                tensor = torch.empty(tensor_type.shape, dtype=tensor_type.dtype)
                return_lease()
                return tensor
            array = np.frombuffer(self._mapping, np.uint8, handle.length, handle.offset)
            finalizer = weakref.finalize(array, return_lease)
        except BaseException:
            return_lease()
            raise
        # At exit other threads may still read the tensor, and the arena ends with this process
        # anyway.
        finalizer.atexit = False
        # All three tensors share a storage, which holds the array. From here on, the lease is
        # returned with the storage.
        return torch.from_numpy(array).view(tensor_type.dtype).view(tensor_type.shape)

    def _claim_lease(self, handle: Handle) -> Callable[[], None]:
        """Checks that the handle's lease is lent to it and was not used before.

        Returns a function that returns the lease. It must be called exactly once.
        """
        if handle.arena != self.number:
            raise HandleRefused(
                "a handle of another arena than the attached one", arena=handle.arena
            )
        if handle.lease >= self.leases:
            raise HandleRefused("a lease that is not in the table", lease=handle.lease)
        state, generation, _, _, returned, _ = self._read_entry(handle)
        if state != STATE_LENT:
            raise HandleRefused("a lease that is not lent", lease=handle.lease)
        if generation != handle.generation:
            raise HandleRefused(
                "a lease of another generation", lease=handle.lease, generation=handle.generation
            )
        # With two views of one lease, the first to end would return it while the other is in use.
        if generation in (returned, self._resolved.get(handle.lease)):
            raise HandleRefused(
                "a lease that was used before", lease=handle.lease, generation=generation
            )
        self._resolved[handle.lease] = generation
        word = (_entry_offset(handle.lease) + RETURNED_OFFSET) // WORD_BYTES
        return partial(_return_lease, self._words, word, generation, self._pid)

    def _check_slot(self, handle: Handle, tensor_type: TensorType) -> None:
        _, _, offset, length, *_ = self._read_entry(handle)
        if (offset, length) != (handle.offset, handle.length):
            raise HandleRefused(
                "a slot that is not the lease's", offset=handle.offset, length=handle.length
            )
        if (
            offset < self._slots_offset
            or offset % SLOT_ALIGNMENT_BYTES
            or offset + length > self.length
        ):
            raise HandleRefused("a slot where none can be", offset=offset, length=length)
        need = tensor_type.nbytes
        if need != length:
            raise HandleRefused(
                "a slot of another length than dtype and shape need", length=length, need=need
            )

    def _read_entry(self, handle: Handle) -> tuple[int, ...]:
        return LEASE_ENTRY.unpack_from(self._mapping, _entry_offset(handle.lease))


def _return_lease(words: memoryview, word: int, generation: int, pid: int) -> None:
    """Marks a lease as returned in the table.

    Runs wherever a reference count drops to zero or a garbage collection starts: at any
    allocation, in any thread, under any lock. It therefore takes no lock and logs nothing.

    No lock is needed: each word `returned` has one writer at a time, the one view of the lease.
    The assignment is a copy of 4 bytes, a length known to the compiler, to an address that is a
    multiple of 4. This is one store, so the frontend never sees a part of it.
    """
    # A child forked from the engine has copies of its views. Their end means nothing while the
    # engine has its own.
    if os.getpid() == pid:
        words[word] = generation


def _entry_offset(lease: int) -> int:
    return TABLE_OFFSET + lease * LEASE_ENTRY.size


def _parse_name(name: object) -> tuple[int, int, str]:
    """Returns the owner's process id, its start time, and the number as 16 hex digits."""
    match = NAME_PATTERN.fullmatch(name) if type(name) is str else None
    if match is None:
        raise ValueError(
            "an arena is named chiasm.<pid>.<start>.<16 hex digits>; send the name without a folder"
        )
    return int(match[1]), int(match[2]), match[3]


def _check_file(name: str, file: os.stat_result) -> int:
    """Returns the file's length in bytes.

    Raises ValueError unless it is a regular file that only this user can open.
    """
    if not stat.S_ISREG(file.st_mode):
        raise ValueError(f"{name} is not a regular file")
    if file.st_uid != os.geteuid():
        raise ValueError(
            f"{name} belongs to user {file.st_uid}; run engine and frontend as the same user"
        )
    if stat.S_IMODE(file.st_mode) != 0o600:
        raise ValueError(f"{name} has mode {stat.S_IMODE(file.st_mode):04o} and not 0600")
    if file.st_size < TABLE_OFFSET:
        raise ValueError(f"{name} is too short for an arena")
    return file.st_size


def _check_header(
    name: str, mapping: mmap.mmap, owner_and_number: tuple[int, int, int]
) -> tuple[int, int]:
    """Checks the header. Returns the number of leases and the offset of the slots."""
    magic, layout, leases, length, slots_offset, pid, _, start, number = HEADER.unpack_from(mapping)
    if magic != MAGIC:
        raise ValueError(f"{name} is not an arena")
    if layout != LAYOUT:
        raise ValueError(
            f"{name} has layout {layout} and this plugin knows {LAYOUT}; "
            "install the two of one version"
        )
    if length != len(mapping):
        raise ValueError(f"{name} says that it is {length} bytes long and is {len(mapping)}")
    if slots_offset % PAGE_BYTES or not _entry_offset(leases) <= slots_offset <= length:
        raise ValueError(
            f"{name} has its slots at {slots_offset}, "
            f"which can't be with {leases} leases in {length} bytes"
        )
    if (pid, start, number) != owner_and_number:
        raise ValueError(f"{name} has another owner or number in its header than in its name")
    return leases, slots_offset
