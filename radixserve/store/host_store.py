"""`HostStore`: runs in the memory of this process; `TieredStore`: it before another store."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from radixserve.runner.kv_layout import ByteArray
from radixserve.store.run_file import Buffer
from radixserve.store.run_store import RunStore, StoredFile


class _HostFile(NamedTuple):
    data: ByteArray
    used_at: float


class HostStore(RunStore):
    """Drops the least recently used files to keep at most `max_bytes`."""

    num_bytes = 0
    num_dropped = 0

    def __init__(
        self,
        max_bytes: int,
        allocate: Callable[[int], ByteArray] = lambda size: np.empty(size, np.uint8),
    ) -> None:
        """`allocate`: memory of so many bytes, for instance pinned memory, which a device reads at
        full speed."""
        self.max_bytes = max_bytes
        self._allocate = allocate
        self._files: OrderedDict[str, _HostFile] = OrderedDict()  # the last used last
        self._lock = threading.Lock()

    def put(self, name: str, parts: Iterable[Buffer]) -> int:
        return self.keep(name, b"".join(parts))

    def keep(self, name: str, content: Buffer) -> int:
        """As `put`, of a file in one piece."""
        size = len(content)
        if size > self.max_bytes:
            raise OSError(f"{size} bytes are more than the store may hold")
        data = self._allocate(size)
        data[:] = np.frombuffer(content, np.uint8)
        with self._lock:
            self._remove(name)
            while self.num_bytes + size > self.max_bytes:
                self._remove(next(iter(self._files)))
                self.num_dropped += 1
            self._files[name] = _HostFile(data, time.time())
            self.num_bytes += size
        return size

    def get(
        self,
        name: str,
        num_bytes: int | None = None,
        into: memoryview | None = None,  # noqa: ARG002
    ) -> memoryview | None:
        """The file itself, which is not copied."""
        file = self._files.get(name)
        return None if file is None else file.data.data[:num_bytes]

    def has(self, name: str) -> bool:
        return name in self._files

    def in_memory(self, name: str) -> bool:
        return name in self._files

    def drop(self, name: str) -> None:
        with self._lock:
            self._remove(name)

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        with self._lock:
            files = list(self._files.items())
        for name, file in files:
            if not prefix or name.startswith(f"{prefix}/"):
                yield StoredFile(name, len(file.data), file.used_at)

    def touch(self, name: str) -> None:
        with self._lock:
            if (file := self._files.pop(name, None)) is not None:
                self._files[name] = file._replace(used_at=time.time())

    def check(self) -> None:
        with self._lock:
            num_bytes = sum(len(file.data) for file in self._files.values())
        assert num_bytes == self.num_bytes, f"{self.num_bytes} bytes counted, {num_bytes} stored"
        assert num_bytes <= self.max_bytes, f"{num_bytes} bytes stored, more than allowed"

    def _remove(self, name: str) -> None:
        file = self._files.pop(name, None)
        if file is not None:
            self.num_bytes -= len(file.data)


class TieredStore(RunStore):
    """A store in memory before a larger one: both are written, the first is read first, and what
    was read from the second is kept in the first."""

    def __init__(self, host: HostStore, store: RunStore) -> None:
        self.host, self.store, self.medium = host, store, store.medium

    @property
    def num_bytes(self) -> int:
        """Of the second store."""
        return self.store.num_bytes

    @property
    def num_dropped(self) -> int:
        """Of the second store."""
        return self.store.num_dropped

    def put(self, name: str, parts: Iterable[Buffer]) -> int:
        content = b"".join(parts)
        self._keep(name, content)
        return self.store.put(name, [content])

    def get(
        self, name: str, num_bytes: int | None = None, into: memoryview | None = None
    ) -> memoryview | None:
        data = self.host.get(name, num_bytes, into)
        if data is not None:
            return data
        data = self.store.get(name, num_bytes, into)
        if data is not None and (num_bytes is None or len(data) < num_bytes):  # the whole file
            self._keep(name, data)
        return data

    def has(self, name: str) -> bool:
        return self.host.has(name) or self.store.has(name)

    def in_memory(self, name: str) -> bool:
        return self.host.has(name)

    def drop(self, name: str) -> None:
        self.host.drop(name)
        self.store.drop(name)

    def set_aside(self, name: str) -> None:
        self.host.drop(name)
        self.store.set_aside(name)

    def drop_folder(self, prefix: str) -> None:
        self.host.drop_folder(prefix)
        self.store.drop_folder(prefix)

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        listed = {file.name for file in self.host.list(prefix)}
        yield from self.host.list(prefix)
        for file in self.store.list(prefix):
            if file.name not in listed:
                yield file

    def touch(self, name: str) -> None:
        self.host.touch(name)
        self.store.touch(name)

    def check(self) -> None:
        self.host.check()
        self.store.check()

    def _keep(self, name: str, content: Buffer) -> None:
        if len(content) <= self.host.max_bytes:
            self.host.keep(name, content)
