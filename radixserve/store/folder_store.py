"""`FolderStore`: a file for each run, in folders by model and namespace.

    DIR / model / namespace / NAME.kv

A file is written under a temporary name and renamed, so that no reader sees a part of one. A name
says what the file holds and never who wrote it: several processes may share a folder.

Why files and not a database: a file is read at 2.3 to 7 GB/s where LMDB gives 4, it can be checked
and dropped alone, and a damaged one costs itself. A damaged page of a memory-mapped database can
end the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from radixserve.store.run_file import WRITE_BYTES, Buffer
from radixserve.store.run_store import RunStore, StoredFile

_SUFFIX = ".kv"
_ROOM_AFTER = 0.9  # of max_bytes: the fill after files were removed
_FOLDERS = r"[0-9a-f]{32}/[0-9a-f]{32}/"  # of a model and a namespace
_NAME = re.compile(_FOLDERS + r"[0-9a-f]{32}-[0-9a-f]{8}\.kv")
_TEMPORARY = re.compile(_FOLDERS + r"\.[0-9]+-[0-9]+\.tmp")
_MAX_PARTS = 512  # that one call writes; Linux takes 1024
_STALE_S = 3600.0  # a temporary file of that age has no writer
_numbers = itertools.count()


class FolderStore(RunStore):
    """A `RunStore` on a disk. The files that were not used for longest go when the store would grow
    beyond `max_bytes`."""

    num_bytes = 0
    num_dropped = 0

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        """Makes the folder, readable by its owner alone. O(files)."""
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = threading.Lock()
        self._users = self._lock_shared()
        self.num_bytes = sum(file.num_bytes for file in self.list())

    def put(self, name: str, parts: Iterable[Buffer]) -> int:
        """Write a file, in place of one of that name; returns its bytes. Raises OSError, and
        leaves nothing behind, where it cannot be written."""
        path = self._path(name)
        temporary = f"{path.rpartition('/')[0]}/.{os.getpid()}-{next(_numbers)}.tmp"
        try:
            file = _create(temporary)
            try:
                num_bytes = _write(file, parts)
            finally:
                os.close(file)
            if num_bytes > self.max_bytes:
                raise OSError(f"{num_bytes} bytes are more than the store may hold")
            with self._lock:
                replaced = _size_of(path)
                os.replace(temporary, path)
                self.num_bytes += num_bytes - replaced
                if self.num_bytes > self.max_bytes:
                    self._make_room()
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return num_bytes

    def get(
        self, name: str, num_bytes: int | None = None, into: memoryview | None = None
    ) -> memoryview | None:
        """A file's content, or its first bytes; None if the file does not exist.

        `into`: memory to read into, where it is large enough. Memory that was used before is read
        into several times as fast as new memory, whose pages the system has to map.
        """
        try:
            file = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            if into is not None and num_bytes is None:
                count = _read_into(file, into)
                if count < len(into):
                    return into[:count]
                os.lseek(file, 0, os.SEEK_SET)
            size = os.fstat(file).st_size
            size = size if num_bytes is None else min(size, num_bytes)
            data = np.empty(size, np.uint8).data if into is None or len(into) < size else into
            return data[: _read_into(file, data[:size])]
        finally:
            os.close(file)

    def has(self, name: str) -> bool:
        return Path(self._path(name)).exists()

    def touch(self, name: str) -> None:
        """It was used now."""
        with contextlib.suppress(OSError):
            os.utime(self._path(name))

    def drop(self, name: str) -> None:
        """Remove a file, if there is one."""
        path = Path(self._path(name))
        with contextlib.suppress(OSError), self._lock:
            size = path.stat().st_size
            path.unlink()
            self.num_bytes -= size

    def drop_folder(self, prefix: str) -> None:
        """Remove all files whose names begin with the folder `prefix`; all of them for ""."""
        with self._lock:
            for file in list(self.list(prefix)):
                with contextlib.suppress(OSError):
                    self.path_of(file.name).unlink()
            self.num_bytes = sum(file.num_bytes for file in self.list())

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """The files, in no order. Others in the folder, and those that another process removes
        meanwhile, are left out."""
        for path in self._paths(prefix, _NAME):
            with contextlib.suppress(OSError):
                status = path.stat()
                name = path.relative_to(self.folder).as_posix()[: -len(_SUFFIX)]
                yield StoredFile(name, status.st_size, status.st_mtime)

    def path_of(self, name: str) -> Path:
        """Where the file of that name lies."""
        return Path(self._path(name))

    def prune(self, max_bytes: int) -> int:
        """Remove the files that were not used for longest, down to `max_bytes`. Returns how many
        went."""
        with self._lock:
            return self._shrink(max_bytes)

    def _make_room(self) -> None:
        self.num_bytes = sum(file.num_bytes for file in self.list())  # others write and drop, too
        if self.num_bytes > self.max_bytes:
            self.num_dropped += self._shrink(int(self.max_bytes * _ROOM_AFTER))

    def _shrink(self, max_bytes: int) -> int:
        files = sorted(self.list(), key=lambda file: file.used_at)
        self.num_bytes, num_dropped = sum(file.num_bytes for file in files), 0
        for file in files:
            if self.num_bytes <= max_bytes:
                break
            with contextlib.suppress(OSError):
                self.path_of(file.name).unlink()
                self.num_bytes -= file.num_bytes
                num_dropped += 1
        return num_dropped

    def check(self) -> None:
        """Audit the bytes counted against those on disk, if no other `FolderStore` uses the folder.
        O(files). Raises AssertionError."""
        with self._lock:
            if not self._is_sole_user():
                return
            on_disk = sum(file.num_bytes for file in self.list())
            assert self.num_bytes == on_disk, f"{self.num_bytes} bytes counted, {on_disk} on disk"
            assert on_disk <= self.max_bytes, f"{on_disk} bytes on disk, more than may be"

    def _lock_shared(self) -> int | None:
        """The folder, open and with a shared lock, for as long as this object lives; None where the
        file system has no locks."""
        try:
            folder = os.open(self.folder, os.O_RDONLY)
        except OSError:
            return None
        weakref.finalize(self, os.close, folder)
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_SH)
            return folder
        return None

    def _is_sole_user(self) -> bool:
        if self._users is None:
            return False
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(self._users, fcntl.LOCK_SH)
        return True

    def drop_temporary(self) -> None:
        """Remove the temporary files of writers that were killed: those that are an hour old."""
        for path in self._paths("", _TEMPORARY):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink()

    def _paths(self, prefix: str, pattern: re.Pattern[str]) -> Iterator[Path]:
        """The files of the store's own folders whose path in it matches: nothing else is read or
        removed, whatever lies beside them."""
        for folder, _, names in os.walk(self.folder / prefix):
            for name in names:
                path = Path(folder, name)
                if pattern.fullmatch(path.relative_to(self.folder).as_posix()):
                    yield path

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}{_SUFFIX}"


def _create(path: str) -> int:
    """Open a new file to be written, and make its folder if there is none."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.open(path, flags, 0o666)


def _read_into(file: int, into: memoryview) -> int:
    """Read until `into` is full or the file ends. Returns the bytes read."""
    count = 0
    while count < len(into) and (num_read := os.readv(file, [into[count:]])):
        count += num_read
    return count


def _write(file: int, parts: Iterable[Buffer]) -> int:
    """Write the parts one after the other, and return their bytes.

    They are written together up to each multiple of WRITE_BYTES: Linux keeps a file in memory in
    pages as large as the writes that made it, and reads large pages nearly twice as fast.
    """
    waiting: list[memoryview] = []
    num_bytes = 0
    for part in parts:
        waiting.append(memoryview(part))
        num_bytes += len(part)
        if num_bytes % WRITE_BYTES == 0 or len(waiting) == _MAX_PARTS:
            _write_all(file, waiting)
            waiting = []
    _write_all(file, waiting)
    return num_bytes


def _write_all(file: int, parts: list[memoryview]) -> None:
    """As os.writev, which may write less than all."""
    while parts:
        count = os.writev(file, parts)
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][count:]


def _size_of(path: str) -> int:
    """Bytes of a file; 0 where there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
