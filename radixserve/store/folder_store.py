"""`FolderStore`: a file for each run, in folders by model and namespace.

    DIR / model / namespace / NAME.kv
    DIR / damaged / MODEL.NAMESPACE.NAME.kv     the last files that were refused

A file is written under a temporary name and renamed, so that no reader sees a part of one. A name
says what the file holds and never who wrote it: several processes may share a folder. Only regular
files are opened, without following a link and without waiting. All files are their owner's alone
(0600, folders 0700).

Why files and not a database: a file is read at 2.3 to 7 GB/s where LMDB gives 4, it can be checked
and dropped alone, and a damaged one costs itself. A damaged page of a memory-mapped database can
end the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from radixserve.store.run_file import WRITE_BYTES, Buffer
from radixserve.store.run_store import NotAFile, RunStore, StoredFile

_SUFFIX = ".kv"
_DAMAGED = "damaged"  # the folder of files that were refused
_MAX_DAMAGED = 16  # files in it; the oldest go
_ROOM_AFTER = 0.9  # of max_bytes: the fill after files were removed
_RECOUNT_AFTER = 0.1  # of max_bytes: written before the folder's bytes are counted again
_FOLDER = re.compile(r"[0-9a-f]{32}")  # of a model, and in it of a namespace
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}\.kv")
_TEMPORARY = re.compile(r"\.[0-9a-f-]+\.tmp")
_MAX_PARTS = 512  # that one call writes; Linux takes 1024
_STALE_S = 3600.0  # a temporary file of that age has no writer
_MAX_CLOCK_SKEW_S = 60.0  # between the machines that share a folder
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class FolderStore(RunStore):
    """A `RunStore` on a disk. The files that were not used for longest go when the store would grow
    beyond `max_bytes`."""

    medium = "disk"
    num_bytes = 0
    num_dropped = 0
    _opened_at = 0  # see `_changed_at`

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        """Makes the folder, readable by its owner alone; of one that has more than `max_bytes`, the
        oldest files go. O(files)."""
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = threading.Lock()
        self._users = self._lock_shared()
        self._num_uncounted = 0  # bytes written since the folder's were counted
        self._recount()
        if self.num_bytes > max_bytes:
            self._make_room()

    def put(self, name: str, parts: Iterable[Buffer]) -> int:
        """Write a file, in place of one of that name; returns its bytes. Raises OSError, and
        leaves nothing behind, where it cannot be written."""
        path = self._path(name)
        temporary, file = self._create_beside(path)
        try:
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
                self._num_uncounted += num_bytes
                if (
                    self.num_bytes > self.max_bytes
                    or self._num_uncounted > self.max_bytes * _RECOUNT_AFTER
                ):
                    self._make_room()
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return num_bytes

    def get(
        self, name: str, num_bytes: int | None = None, into: memoryview | None = None
    ) -> memoryview | None:
        """A file's content, or its first bytes; None if the file does not exist. Raises NotAFile
        for a link, a pipe or a folder of that name.

        `into`: memory to read into, where it is large enough. Memory that was used before is read
        into several times as fast as new memory, whose pages the system has to map.
        """
        try:
            file = os.open(self._path(name), _READ_FLAGS)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                raise NotAFile(f"{name} is not a regular file") from None
            raise
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise NotAFile(f"{name} is not a regular file")
            size = status.st_size if num_bytes is None else min(status.st_size, num_bytes)
            memory = np.empty(size, np.uint8).data if into is None or len(into) < size else into
            return memory[: _read_into(file, memory[:size])]
        finally:
            os.close(file)

    def has(self, name: str) -> bool:
        return _regular(self._path(name)) is not None

    def touch(self, name: str) -> None:
        """It was used now."""
        with contextlib.suppress(OSError):
            os.utime(self._path(name), follow_symlinks=False)

    def drop(self, name: str) -> None:
        """Remove a file, if there is one."""
        path = self._path(name)
        with contextlib.suppress(OSError), self._lock:
            size = _size_of(path)
            os.unlink(path)
            self.num_bytes -= size

    def set_aside(self, name: str) -> None:
        """Move what has that name into the folder "damaged", which keeps the last few."""
        path, damaged = self._path(name), self.folder / _DAMAGED
        with contextlib.suppress(OSError), self._lock:
            size = _size_of(path)
            with self._own_change():
                damaged.mkdir(exist_ok=True, mode=0o700)
            os.replace(path, damaged / f"{name.replace('/', '.')}{_SUFFIX}")
            self.num_bytes -= size
            by_age = sorted(damaged.iterdir(), key=lambda path: path.lstat().st_ctime)
            for oldest in by_age[:-_MAX_DAMAGED]:
                _remove(oldest)

    def drop_folder(self, prefix: str) -> None:
        """Remove all files whose names begin with the folder `prefix`; all of them for ""."""
        with self._lock:
            for path, _ in self._files(prefix, _NAME):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            begin = f"{prefix.replace('/', '.')}." if prefix else ""
            with contextlib.suppress(OSError):
                for damaged in (self.folder / _DAMAGED).iterdir():
                    if damaged.name.startswith(begin):
                        _remove(damaged)
            self._recount()

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """The files, in no order. Others in the folder, and those that another process removes
        meanwhile, are left out. A file whose time of use lies in the future, as after a clock was
        set back, counts as unused for longest."""
        latest = time.time() + _MAX_CLOCK_SKEW_S
        for path, status in self._files(prefix, _NAME):
            name = path[len(str(self.folder)) + 1 : -len(_SUFFIX)]
            used_at = status.st_mtime if status.st_mtime <= latest else 0.0
            yield StoredFile(name, status.st_size, used_at)

    def path_of(self, name: str) -> Path:
        """Where the file of that name lies."""
        return Path(self._path(name))

    def prune(self, max_bytes: int) -> int:
        """Remove the files that were not used for longest, down to `max_bytes`. Returns how many
        went."""
        with self._lock:
            return self._shrink(max_bytes)

    def _recount(self) -> None:
        self.num_bytes, self._num_uncounted = sum(file.num_bytes for file in self.list()), 0

    def _make_room(self) -> None:
        self._recount()  # others write and drop, too
        if self.num_bytes > self.max_bytes:
            self.num_dropped += self._shrink(int(self.max_bytes * _ROOM_AFTER))

    def _shrink(self, max_bytes: int) -> int:
        files = sorted(self.list(), key=lambda file: file.used_at)
        self.num_bytes, num_dropped = sum(file.num_bytes for file in files), 0
        for file in files:
            if self.num_bytes <= max_bytes:
                break
            with contextlib.suppress(OSError):
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    os.unlink(self._path(file.name))
                self.num_bytes -= file.num_bytes
                num_dropped += 1
        return num_dropped

    def check(self) -> None:
        """Audit the bytes counted against those on disk, if no other `FolderStore` uses the folder
        or has used it since this one was made. O(files). Raises AssertionError."""
        with self._lock:
            if self._opened_at != self._changed_at() or not self._is_sole_user():
                return
            on_disk = sum(file.num_bytes for file in self.list())
            assert self.num_bytes == on_disk, f"{self.num_bytes} bytes counted, {on_disk} on disk"
            assert on_disk <= self.max_bytes, f"{on_disk} bytes on disk, more than may be"

    def _lock_shared(self) -> int | None:
        """The folder, open and with a shared lock, for as long as this object lives; None where the
        file system has no locks."""
        try:
            folder = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        weakref.finalize(self, os.close, folder)
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_SH)
            with contextlib.suppress(OSError):
                os.utime(folder)  # others see that it was opened
            self._opened_at = self._changed_at()
            return folder
        return None

    def _changed_at(self) -> int:
        """When a `FolderStore` of the folder was made, or a folder in it; nanoseconds."""
        try:
            return os.stat(self.folder).st_mtime_ns
        except OSError:
            return 0

    @contextlib.contextmanager
    def _own_change(self) -> Iterator[None]:
        """Folders are made inside: that is not another's doing."""
        is_mine = self._opened_at == self._changed_at()
        yield
        if is_mine:
            self._opened_at = self._changed_at()

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
        """Remove the temporary files of writers that were killed: those that are an hour old, or,
        by a clock that was set back, as much in the future."""
        for path, status in self._files("", _TEMPORARY):
            if abs(time.time() - status.st_mtime) > _STALE_S:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _files(self, prefix: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, os.stat_result]]:
        """Path and status of the regular files in the store's own folders whose names match:
        nothing else is read or removed, whatever lies beside them."""
        wanted = (prefix.split("/") if prefix else []) + ["", ""]
        for model in _entries(self.folder, _FOLDER, wanted[0]):
            for namespace in _entries(model.path, _FOLDER, wanted[1]):
                for file in _entries(namespace.path, pattern, ""):
                    with contextlib.suppress(OSError):
                        status = file.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            yield file.path, status

    def _create_beside(self, path: str) -> tuple[str, int]:
        """Make and open a file of a name that cannot be guessed, in the folder of `path`. What
        vanished of the folders is made anew."""
        folder = path.rpartition("/")[0]
        temporary = f"{folder}/.{secrets.token_hex(16)}.tmp"
        try:
            return temporary, os.open(temporary, _WRITE_FLAGS, 0o600)
        except FileNotFoundError:
            self._make_folders(Path(folder))
            return temporary, os.open(temporary, _WRITE_FLAGS, 0o600)

    def _make_folders(self, folder: Path) -> None:
        with self._lock:
            has_vanished = not folder.parent.exists()  # or nothing was written for this model yet
            if not self.folder.exists():
                self.folder.mkdir(parents=True, mode=0o700)
                self._users = self._lock_shared()
            with self._own_change():
                for path in (folder.parent, folder):
                    path.mkdir(exist_ok=True, mode=0o700)
            if has_vanished and self.num_bytes:
                self._recount()

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}{_SUFFIX}"


def _entries(folder: str | Path, pattern: re.Pattern[str], only: str) -> list[os.DirEntry[str]]:
    """What lies in a folder and has a name that matches, and is `only` unless that is "". Links are
    left out; what is no folder has nothing."""
    try:
        with os.scandir(folder) as entries:
            return [
                entry
                for entry in entries
                if pattern.fullmatch(entry.name)
                and only in ("", entry.name)
                and not entry.is_symlink()
            ]
    except OSError:
        return []


def _remove(path: Path) -> None:
    """Remove a file, or what lies in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def _regular(path: str) -> os.stat_result | None:
    """The status of a regular file; None where there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


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
    """Bytes of a regular file; 0 where there is none."""
    status = _regular(path)
    return 0 if status is None else status.st_size
