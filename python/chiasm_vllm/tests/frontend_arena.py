"""The frontend's side of an arena, implemented only from docs/shared-memory.md."""

import fcntl
import mmap
import os
import secrets
import struct

SHM_FOLDER = "/dev/shm"
TABLE_OFFSET = 4096


def own_start_time() -> int:
    """Returns this process's start time in clock ticks since boot.

    It is the 22nd field of /proc/self/stat, whose second field may contain spaces.
    """
    with open("/proc/self/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[19])


class FrontendArena:
    """An arena file that lends its slots and checks which leases were returned."""

    def __init__(self, leases: int = 8, slot_bytes: int = 1 << 20) -> None:
        self.slots_offset = -(-(TABLE_OFFSET + 32 * leases) // 4096) * 4096
        self.length = self.slots_offset + slot_bytes
        self.number = secrets.randbits(64)
        self.name = f"chiasm.{os.getpid()}.{own_start_time()}.{self.number:016x}"
        self.path = os.path.join(SHM_FOLDER, self.name)
        self.fd = os.open(SHM_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(self.fd, 0, self.length)
        self.memory = mmap.mmap(self.fd, self.length)
        header = (
            b"CHIASMSM",
            1,
            leases,
            self.length,
            self.slots_offset,
            os.getpid(),
            0,
            own_start_time(),
            self.number,
        )
        struct.pack_into("<8sIIQQIIQQ", self.memory, 0, *header)
        # os.link follows the symbolic link to the unnamed file only with a folder's descriptor.
        folder = os.open(SHM_FOLDER, os.O_RDONLY | os.O_DIRECTORY)
        os.link(f"/proc/self/fd/{self.fd}", self.name, dst_dir_fd=folder, follow_symlinks=True)
        os.close(folder)
        self._free_offset = self.slots_offset

    def place(self, data: bytes) -> int:
        """Writes ``data`` to a new slot and returns the slot's offset."""
        alignment = 4096 if len(data) >= 64 << 10 else 64
        offset = -(-self._free_offset // alignment) * alignment
        self._free_offset = offset + len(data)
        self.memory[offset : self._free_offset] = data
        return offset

    def lend(self, lease: int, offset: int, length: int) -> dict:
        """Lends a slot for one message and returns the handle."""
        entry = TABLE_OFFSET + 32 * lease
        (generation,) = struct.unpack_from("<I", self.memory, entry + 4)
        generation = generation % (2**32 - 1) + 1
        struct.pack_into("<IIQQ", self.memory, entry, 1, generation, offset, length)
        return {
            "chiasm": 1,
            "arena": f"{self.number:016x}",
            "lease": lease,
            "generation": generation,
            "offset": offset,
            "length": length,
        }

    def take_back(self, lease: int) -> None:
        assert self.is_returned(lease)
        struct.pack_into("<I", self.memory, TABLE_OFFSET + 32 * lease, 2)

    def returned_generation(self, lease: int) -> int:
        return struct.unpack_from("<I", self.memory, TABLE_OFFSET + 32 * lease + 24)[0]

    def is_returned(self, lease: int) -> bool:
        (generation,) = struct.unpack_from("<I", self.memory, TABLE_OFFSET + 32 * lease + 4)
        assert generation != 0, f"lease {lease} was never lent"
        return self.returned_generation(lease) == generation

    def mappings(self) -> int:
        """Returns how often this process maps the file, including this object's mapping."""
        status = os.fstat(self.fd)
        # The inode number alone may also be that of a library on another file system.
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        file = [device, str(status.st_ino)]
        with open("/proc/self/maps") as maps:
            return sum(line.split()[3:5] == file for line in maps)

    def remove_name(self) -> None:
        if os.path.lexists(self.path):
            os.unlink(self.path)

    def close(self) -> None:
        self.remove_name()
        self.memory.close()
        os.close(self.fd)
