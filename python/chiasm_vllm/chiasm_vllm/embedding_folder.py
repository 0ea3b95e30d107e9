"""A folder in which engines of one machine share embeddings: complete files, with a size limit.

Each item has one file, ``<identifier>.safetensors``. A file appears complete and is never written
again, so readers need no lock. Files that exceed the limit are *retired*: moved to ``retired/``
and deleted later. Lookups ignore that folder, but a reader that has just found a file can still
load it from there.

This module uses neither vLLM nor torch.
"""

import errno
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Identifiers come with requests. Anything beyond a plain file name must not reach the file system.
IDENTIFIER = re.compile(r"[0-9a-zA-Z_-]{1,128}")
TENSOR = "embeddings"
SUFFIX = ".safetensors"
TEMPORARY_PREFIX = ".tmp-"

# The time until a retired file is deleted, and the minimum time if the folder is too full.
RETIRED_S = 120.0
MIN_RETIRED_S = 10.0
# The age at which a temporary file belongs to a dead writer. Writing a file takes milliseconds.
MAX_TEMPORARY_AGE_S = 300.0

# The header of a single tensor takes a few hundred bytes.
_MAX_HEADER_BYTES = 4096
# The maximum number of rows or columns, far beyond those of any item.
_MAX_DIMENSION = 1 << 31
# The size in bytes of the element types of embeddings, by safetensors' names.
_DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}


@dataclass(frozen=True)
class StoredFile:
    """A complete file: the shape of its tensor, and the file's size."""

    shape: tuple[int, int]
    bytes: int


@dataclass(frozen=True)
class _ListedFile:
    path: Path
    bytes: int
    mtime: float


class EmbeddingFolder:
    """A folder of embeddings. Several processes may use a folder, each with its own object."""

    def __init__(self, path: str, max_bytes: int = 0) -> None:
        """Creates the folder unless it exists. ``max_bytes`` only matters to writers.

        Raises OSError if the folder cannot be created, and ValueError if other users can write to
        it: readers trust the names of its files.
        """
        self._path = Path(path)
        self._retired = self._path / "retired"
        self._max_bytes = max_bytes
        # The free space that a cleanup leaves, and the number of bytes written between two
        # cleanups. Each further writer may exceed the limit by as much. In return, no writer reads
        # the whole folder for every file.
        self._step_bytes = max_bytes // 8
        self._bytes_until_cleanup = 0
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_if_others_write(self._path)
        self._retired.mkdir(mode=0o700, exist_ok=True)

    def find(self, identifier: str) -> StoredFile | None:
        """Returns the file of ``identifier``; None unless it is a complete file of embeddings."""
        path = self._file(identifier)
        try:
            return None if path is None else _read_header(path)
        except OSError:
            return None

    def touch(self, identifier: str) -> None:
        """Makes ``identifier`` the last to be retired. Has no effect if it does not exist."""
        path = self._file(identifier)
        if path is not None:
            try:
                os.utime(path)
            except OSError:
                pass

    def candidate_paths(self, identifier: str) -> list[Path]:
        """Returns the possible paths of a file that was just found, in the order to try."""
        path = self._file(identifier)
        return [] if path is None else [path, self._retired / path.name]

    def remove_damaged(self, identifier: str, rows: int) -> None:
        """Removes the file of ``identifier`` if it is damaged or does not have ``rows`` rows.

        A good file stays: loading failed for another reason, or the file has been replaced since.
        """
        path = self._file(identifier)
        if path is None:
            return
        try:
            status = os.lstat(path)
            stored = _read_header(path)
            is_damaged = stored is None or stored.shape[0] != rows
            if is_damaged and os.path.samestat(status, os.lstat(path)):
                path.unlink()
        except OSError:
            # The file does not exist any more, or cannot be read now.
            pass

    def write(self, identifier: str, data: bytes) -> None:
        """Stores a file, which replaces an existing one, and retires others if necessary.

        Raises OSError, and then leaves no part of the file. Has no effect for an invalid
        identifier.
        """
        path = self._file(identifier)
        if path is None:
            return
        if len(data) > self._max_bytes - self._step_bytes:
            raise OSError(errno.EFBIG, "it would leave no room for others within max_bytes")
        temporary = self._path / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            _write_new(temporary, data)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._bytes_until_cleanup -= len(data)
        if self._bytes_until_cleanup <= 0:
            self.clean_up()

    def clean_up(self) -> None:
        """Removes and retires files of the whole folder.

        Removes the temporary files of dead writers, retires the oldest files until the others fit,
        and deletes files that were retired long enough ago. Raises OSError if the folder cannot be
        read.
        """
        now = time.time()
        for file in _list(self._path, TEMPORARY_PREFIX):
            if now - file.mtime > MAX_TEMPORARY_AGE_S:
                file.path.unlink(missing_ok=True)
        live = _list(self._path)
        live_bytes = self._retire_oldest(live, sum(file.bytes for file in live))
        max_retired_bytes = self._max_bytes - self._step_bytes - live_bytes
        _delete_oldest(_list(self._retired), now, max_retired_bytes)
        self._bytes_until_cleanup = self._step_bytes

    def _retire_oldest(self, live: list[_ListedFile], live_bytes: int) -> int:
        """Retires the oldest files until the others fit.

        Returns how many of ``live_bytes`` are left.
        """
        for file in _oldest_first(live):
            if live_bytes <= self._max_bytes - self._step_bytes:
                break
            live_bytes -= file.bytes
            try:
                # From now on, the time is that of the retirement. It is set before the move,
                # because a file in retired/ with the time of its last use would be deleted at
                # once.
                os.utime(file.path)
                os.replace(file.path, self._retired / file.path.name)
            except FileNotFoundError:
                # Another process has retired it.
                pass
        return live_bytes

    def _file(self, identifier: str) -> Path | None:
        if IDENTIFIER.fullmatch(identifier) is None:
            return None
        return self._path / (identifier + SUFFIX)


def _delete_oldest(retired: list[_ListedFile], now: float, max_bytes: int) -> None:
    """Deletes the files that have expired.

    While the rest takes more than ``max_bytes``, also deletes the oldest files that have reached
    the minimum age.
    """
    bytes_left = sum(file.bytes for file in retired)
    for file in _oldest_first(retired):
        if now - file.mtime > (MIN_RETIRED_S if bytes_left > max_bytes else RETIRED_S):
            file.path.unlink(missing_ok=True)
            bytes_left -= file.bytes


def _oldest_first(files: Iterable[_ListedFile]) -> list[_ListedFile]:
    return sorted(files, key=lambda file: file.mtime)


def _list(folder: Path, prefix: str | None = None) -> list[_ListedFile]:
    """Returns the files whose names begin with ``prefix``; without a prefix, the embeddings."""
    return list(_iterate(folder, prefix))


def _iterate(folder: Path, prefix: str | None) -> Iterator[_ListedFile]:
    with os.scandir(folder) as entries:
        for entry in entries:
            is_match = entry.name.startswith(prefix) if prefix else entry.name.endswith(SUFFIX)
            if not is_match:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield _ListedFile(Path(entry.path), status.st_size, status.st_mtime)


def _read_header(path: Path) -> StoredFile | None:
    """Reads the header of a file; None unless it fits the file's length, so it can be loaded.

    Raises OSError for a file that exists and cannot be read.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            return None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        start = os.read(descriptor, _MAX_HEADER_BYTES)
    finally:
        os.close(descriptor)
    header_length = int.from_bytes(start[:8], "little")
    shape = _parse_shape(start[8 : 8 + header_length], status.st_size - 8 - header_length)
    return None if shape is None else StoredFile(shape, status.st_size)


def _parse_shape(header: bytes, data_length: int) -> tuple[int, int] | None:
    """Returns the shape of the tensor in a header, if ``data_length`` fits it."""
    try:
        tensors = json.loads(header)
    except (ValueError, RecursionError):
        return None
    match tensors:
        # Sizes are checked to be small numbers before they are multiplied.
        case {
            "embeddings": {
                "dtype": str(dtype),
                "shape": [int(rows), int(width)],
                "data_offsets": [int(begin), int(end)],
            }
        }:
            are_sizes = all(
                type(size) is int and 0 < size <= _MAX_DIMENSION for size in (rows, width)
            )
            if (
                are_sizes
                and begin == 0
                and rows * width * _DTYPE_BYTES.get(dtype, 0) == end == data_length
            ):
                return rows, width
    return None


def _write_new(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]


def _refuse_if_others_write(folder: Path) -> None:
    status = os.stat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{folder} is no folder")
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"{folder} can be written to by others than this user; give a folder of its own"
        )
