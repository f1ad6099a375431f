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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from radixserve.store.run_file import CHUNK_BYTES

_SUFFIX = ".kv"
_ROOM_AFTER = 0.9  # of max_bytes: the fill after files were removed
_FOLDERS = r"[0-9a-f]{32}/[0-9a-f]{32}/"  # of a model and a namespace
_NAME = re.compile(_FOLDERS + r"[0-9a-f]{32}-[0-9a-f]{8}\.kv")
_TEMPORARY = re.compile(_FOLDERS + r"\.[0-9]+-[0-9]+\.tmp")
_STALE_S = 3600.0  # a temporary file of that age has no writer
_numbers = itertools.count()


class StoredFile(NamedTuple):
    """A file of the store."""

    path: Path
    num_bytes: int
    used_at: float  # time.time() of its last use


class FolderStore:
    """Bytes by name. Any thread may call; OSError means that the disk refused.

    The files that were not used for longest go when the store would grow beyond `max_bytes`.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        """Makes the folder, readable by its owner alone. O(files)."""
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = threading.Lock()
        self._users = self._lock_shared()
        self.num_bytes = sum(file.num_bytes for file in self.list())
        self.num_dropped = 0  # files removed because the store was full

    def put(self, name: str, parts: Iterable[bytes | bytearray | memoryview]) -> int:
        """Write a file, in place of one of that name; returns its bytes. Raises OSError, and
        leaves nothing behind, where it cannot be written."""
        path = self._path(name)
        temporary = path.with_name(f".{os.getpid()}-{next(_numbers)}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with open(temporary, "wb") as file:  # buffered: it writes large parts at once
                for part in parts:
                    file.write(part)
                num_bytes = file.tell()
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
                temporary.unlink()
            raise
        return num_bytes

    def get(
        self,
        name: str,
        num_bytes: int | None = None,
        into: memoryview | None = None,
        on_read: Callable[[memoryview, int], None] | None = None,
    ) -> memoryview | None:
        """A file's content, or its first bytes; None if the file does not exist.

        `into`: memory to read into, where it is large enough. Memory that was used before is read
        into several times as fast as new memory, whose pages the system has to map. `on_read` is
        called after each part with memory of the file's size and the bytes read so far.
        """
        try:
            with open(self._path(name), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                size = size if num_bytes is None else min(size, num_bytes)
                data = np.empty(size, np.uint8).data if into is None else into
                if len(data) < size:
                    data = np.empty(size, np.uint8).data
                data, count = data[:size], 0
                while count < size:
                    num_read = file.readinto(data[count : count + CHUNK_BYTES])
                    if not num_read:
                        break
                    count += num_read
                    if on_read is not None:
                        on_read(data, count)
                return data[:count]
        except FileNotFoundError:
            return None

    def has(self, name: str) -> bool:
        return self._path(name).exists()

    def touch(self, name: str) -> None:
        """It was used now."""
        with contextlib.suppress(OSError):
            os.utime(self._path(name))

    def drop(self, name: str) -> None:
        """Remove a file, if there is one."""
        path = self._path(name)
        with contextlib.suppress(OSError), self._lock:
            size = path.stat().st_size
            path.unlink()
            self.num_bytes -= size

    def drop_folder(self, prefix: str) -> None:
        """Remove all files whose names begin with the folder `prefix`; all of them for ""."""
        with self._lock:
            for file in list(self.list(prefix)):
                with contextlib.suppress(OSError):
                    file.path.unlink()
            self.num_bytes = sum(file.num_bytes for file in self.list())

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """The files, in no order. Others in the folder, and those that another process removes
        meanwhile, are left out."""
        for path in self._paths(prefix, _NAME):
            with contextlib.suppress(OSError):
                status = path.stat()
                yield StoredFile(path, status.st_size, status.st_mtime)

    def name_of(self, file: StoredFile) -> str:
        """The name by which `get` finds it."""
        return str(file.path.relative_to(self.folder))[: -len(_SUFFIX)]

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
                file.path.unlink()
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

    def _path(self, name: str) -> Path:
        return self.folder / (name + _SUFFIX)


def _size_of(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
