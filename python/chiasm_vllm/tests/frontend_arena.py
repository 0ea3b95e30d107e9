"""The frontend's side of an arena, written from docs/shared-memory.md and nothing else."""

import fcntl
import mmap
import os
import secrets
import struct

FOLDER = "/dev/shm"
TABLE_AT = 4096


def own_start_time() -> int:
    """Clock ticks since boot, the 22nd field of /proc/self/stat; the second one may contain spaces."""
    with open("/proc/self/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[19])


class FrontendArena:
    """Makes an arena file, lends its slots, and looks at what was returned."""

    def __init__(self, leases: int = 8, slot_bytes: int = 1 << 20) -> None:
        self.slots_at = -(-(TABLE_AT + 32 * leases) // 4096) * 4096
        self.length = self.slots_at + slot_bytes
        self.number = secrets.randbits(64)
        self.name = f"chiasm.{os.getpid()}.{own_start_time()}.{self.number:016x}"
        self.path = os.path.join(FOLDER, self.name)
        self.fd = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(self.fd, 0, self.length)
        self.memory = mmap.mmap(self.fd, self.length)
        header = (b"CHIASMSM", 1, leases, self.length, self.slots_at, os.getpid(), 0, own_start_time(), self.number)
        struct.pack_into("<8sIIQQIIQQ", self.memory, 0, *header)
        # With a folder's descriptor, because only then os.link follows the symbolic link to the file without a name.
        folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY)
        os.link(f"/proc/self/fd/{self.fd}", self.name, dst_dir_fd=folder, follow_symlinks=True)
        os.close(folder)
        self._free_at = self.slots_at

    def place(self, data: bytes) -> int:
        """Writes ``data`` into a new slot; its offset."""
        alignment = 4096 if len(data) >= 64 << 10 else 64
        offset = -(-self._free_at // alignment) * alignment
        self._free_at = offset + len(data)
        self.memory[offset : self._free_at] = data
        return offset

    def lend(self, lease: int, offset: int, length: int) -> dict:
        """Lends a slot for one sending; the handle."""
        at = TABLE_AT + 32 * lease
        (generation,) = struct.unpack_from("<I", self.memory, at + 4)
        generation = generation % (2**32 - 1) + 1
        struct.pack_into("<IIQQ", self.memory, at, 1, generation, offset, length)
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
        struct.pack_into("<I", self.memory, TABLE_AT + 32 * lease, 2)

    def returned(self, lease: int) -> int:
        return struct.unpack_from("<I", self.memory, TABLE_AT + 32 * lease + 24)[0]

    def is_returned(self, lease: int) -> bool:
        (generation,) = struct.unpack_from("<I", self.memory, TABLE_AT + 32 * lease + 4)
        assert generation != 0, f"lease {lease} was never lent"
        return self.returned(lease) == generation

    def mappings(self) -> int:
        """How often this process maps the file, our own mapping included."""
        about = os.fstat(self.fd)
        # An inode number alone may be a library's on another file system.
        file = [f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}", str(about.st_ino)]
        with open("/proc/self/maps") as maps:
            return sum(line.split()[3:5] == file for line in maps)

    def remove_name(self) -> None:
        if os.path.lexists(self.path):
            os.unlink(self.path)

    def close(self) -> None:
        self.remove_name()
        self.memory.close()
        os.close(self.fd)
