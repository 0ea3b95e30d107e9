"""The folder in which engines of one machine leave embeddings for each other: whole files only, within a bound.

One file for each item, ``<identifier>.safetensors``. A file appears there complete and is never written to again, so
who reads one needs no lock. Files that have to go because of the bound are *retired*: moved to ``retired/``, where
nobody looks for something new and who has found one a moment ago still gets it, and deleted a while later.

Knows neither vLLM nor torch.
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

# Identifiers come with requests: what could be more than a file's name must not get near the file system.
IDENTIFIER = re.compile(r"[0-9a-zA-Z_-]{1,128}")
TENSOR = "embeddings"
SUFFIX = ".safetensors"
TEMPORARY = ".tmp-"

# Seconds until a retired file is deleted, and how soon it may be if the folder is too full.
RETIRED_FOR = 120.0
RETIRED_AT_LEAST = 10.0
# Seconds after which a file that was begun belongs to a writer that died. Writing one takes milliseconds.
BEGUN_FOR = 300.0

# A header of one tensor has some hundred bytes.
_HEADER_AT_MOST = 4096
# Rows or columns, far beyond those of any item.
_SIZE_AT_MOST = 1 << 31
# What embeddings are made of, in safetensors' words, and its bytes.
_DTYPES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}


@dataclass(frozen=True)
class Stored:
    """A whole file: its tensor's shape, and the bytes of all of it."""

    shape: tuple[int, int]
    bytes: int


@dataclass(frozen=True)
class _Listed:
    path: Path
    bytes: int
    mtime: float


class EmbeddingFolder:
    """May be used by several processes at once, each with an object of its own."""

    def __init__(self, path: str, max_bytes: int = 0) -> None:
        """Makes the folder if it is not there. ``max_bytes`` concerns those that write.

        Raises OSError if it can't be made, ValueError if others than this user can write into it: embeddings are
        taken for what their names say.
        """
        self._path = Path(path)
        self._retired = self._path / "retired"
        self._max_bytes = max_bytes
        # What is kept free when the folder is tidied, and how much is written between two times: each of several
        # writers may pass the bound by as much, and none reads the whole folder with every file.
        self._step = max_bytes // 8
        self._until_tidied = 0
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_if_others_write(self._path)
        self._retired.mkdir(mode=0o700, exist_ok=True)

    def find(self, identifier: str) -> Stored | None:
        """What is stored for ``identifier``; None if nothing is, or something that is no whole file of embeddings."""
        path = self._file(identifier)
        try:
            return None if path is None else _read_header(path)
        except OSError:
            return None

    def touch(self, identifier: str) -> None:
        """Makes ``identifier`` the last that will be retired. Without effect if it is not there."""
        path = self._file(identifier)
        if path is not None:
            try:
                os.utime(path)
            except OSError:
                pass

    def places(self, identifier: str) -> list[Path]:
        """Where a file may be that was found a moment ago, in the order to look."""
        path = self._file(identifier)
        return [] if path is None else [path, self._retired / path.name]

    def remove_damaged(self, identifier: str, rows: int) -> None:
        """Removes the file of ``identifier`` if it is damaged or does not have ``rows`` embeddings. A good file stays:
        loading failed for another reason, or the file has been replaced meanwhile."""
        path = self._file(identifier)
        if path is None:
            return
        try:
            seen = os.lstat(path)
            stored = _read_header(path)
            if (stored is None or stored.shape[0] != rows) and os.path.samestat(seen, os.lstat(path)):
                path.unlink()
        except OSError:
            # It is gone, or can't be read now.
            pass

    def write(self, identifier: str, data: bytes) -> None:
        """Stores a file, in place of one that is there, and retires others if that needs to be.

        Raises OSError, after which nothing of it is left. Without effect for what is no identifier.
        """
        path = self._file(identifier)
        if path is None:
            return
        if len(data) > self._max_bytes - self._step:
            raise OSError(errno.EFBIG, "it would leave no room for others within max_bytes")
        begun = self._path / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            _write_new(begun, data)
            os.replace(begun, path)
        except BaseException:
            begun.unlink(missing_ok=True)
            raise
        self._until_tidied -= len(data)
        if self._until_tidied <= 0:
            self.tidy()

    def tidy(self) -> None:
        """Looks at the whole folder: removes what dead writers have begun, retires the oldest files until the others
        fit, deletes what was retired long enough ago. Raises OSError if the folder can't be read."""
        now = time.time()
        for file in _list(self._path, TEMPORARY):
            if now - file.mtime > BEGUN_FOR:
                file.path.unlink(missing_ok=True)
        live = _list(self._path)
        live_bytes = self._retire_oldest(live, sum(file.bytes for file in live))
        _delete_oldest(_list(self._retired), now, self._max_bytes - self._step - live_bytes)
        self._until_tidied = self._step

    def _retire_oldest(self, live: list[_Listed], live_bytes: int) -> int:
        """How many bytes of ``live_bytes`` are not retired."""
        for file in _oldest_first(live):
            if live_bytes <= self._max_bytes - self._step:
                break
            live_bytes -= file.bytes
            try:
                # From now on the time says when it was retired. Before the move: a file in retired/ with the time of
                # its last use would be deleted at once.
                os.utime(file.path)
                os.replace(file.path, self._retired / file.path.name)
            except FileNotFoundError:
                # Another process has.
                pass
        return live_bytes

    def _file(self, identifier: str) -> Path | None:
        if IDENTIFIER.fullmatch(identifier) is None:
            return None
        return self._path / (identifier + SUFFIX)


def _delete_oldest(retired: list[_Listed], now: float, fit: int) -> None:
    """Deletes those that are due, and of the others that may go the oldest, until at most ``fit`` bytes are left."""
    left = sum(file.bytes for file in retired)
    for file in _oldest_first(retired):
        if now - file.mtime > (RETIRED_AT_LEAST if left > fit else RETIRED_FOR):
            file.path.unlink(missing_ok=True)
            left -= file.bytes


def _oldest_first(files: Iterable[_Listed]) -> list[_Listed]:
    return sorted(files, key=lambda file: file.mtime)


def _list(folder: Path, prefix: str | None = None) -> list[_Listed]:
    """The files whose names begin with ``prefix``, or without one those of embeddings."""
    return list(_listed(folder, prefix))


def _listed(folder: Path, prefix: str | None) -> Iterator[_Listed]:
    with os.scandir(folder) as entries:
        for entry in entries:
            wanted = entry.name.startswith(prefix) if prefix else entry.name.endswith(SUFFIX)
            if not wanted:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield _Listed(Path(entry.path), status.st_size, status.st_mtime)


def _read_header(path: Path) -> Stored | None:
    """Reads the header of a file; None unless it fits the file's length, so that the file can be loaded. Raises OSError
    for a file that is there and can't be read."""
    try:
        # Opening a pipe would wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            return None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        start = os.read(descriptor, _HEADER_AT_MOST)
    finally:
        os.close(descriptor)
    header_length = int.from_bytes(start[:8], "little")
    shape = _shape(start[8 : 8 + header_length], status.st_size - 8 - header_length)
    return None if shape is None else Stored(shape, status.st_size)


def _shape(header: bytes, data_length: int) -> tuple[int, int] | None:
    """Returns the shape of the tensor in a header, if ``data_length`` fits it."""
    try:
        tensors = json.loads(header)
    except (ValueError, RecursionError):
        return None
    match tensors:
        # Nothing is multiplied before it is known to be a small number.
        case {
            "embeddings": {
                "dtype": str(dtype),
                "shape": [int(rows), int(width)],
                "data_offsets": [int(begin), int(end)],
            }
        }:
            are_sizes = all(type(size) is int and 0 < size <= _SIZE_AT_MOST for size in (rows, width))
            if are_sizes and begin == 0 and rows * width * _DTYPES.get(dtype, 0) == end == data_length:
                return rows, width
    return None


def _write_new(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(file, "wb", buffering=0) as whole:
        rest = memoryview(data)
        while rest:
            rest = rest[whole.write(rest) :]


def _refuse_if_others_write(folder: Path) -> None:
    status = os.stat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{folder} is no folder")
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"{folder} can be written to by others than this user; give a folder of its own")
