"""`RunStore`: what holds the files of runs. Five methods are enough for a new one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from radixserve.store.run_file import Buffer


class StoredFile(NamedTuple):
    """A file of a store."""

    name: str  # MODEL/NAMESPACE/RUN
    num_bytes: int
    used_at: float  # time.time() of its last use, 0 where the store does not know


class NotAFile(OSError):
    """What has the name of a file is a link, a pipe or a folder."""


class RunStore(ABC):
    """Bytes by name. Any thread may call. OSError means that the store refused or cannot be
    reached; no K/V is wrong then. A store may lose a file at any time."""

    medium = "remote"  # of the files that are not in memory

    @property
    def num_bytes(self) -> int:
        """Of all files; 0 where the store does not count them."""
        return 0

    @property
    def num_dropped(self) -> int:
        """Files that the store removed to make room."""
        return 0

    @abstractmethod
    def put(self, name: str, parts: Iterable[Buffer]) -> int:
        """Write a file, in place of one of that name; returns its bytes. A reader finds the whole
        file or none. A part may be used again once the next one is taken."""

    @abstractmethod
    def get(
        self, name: str, num_bytes: int | None = None, into: memoryview | None = None
    ) -> memoryview | None:
        """A file's content, or its first bytes; None if the file does not exist.

        `into`: memory that may be used for the answer, where it is large enough.
        """

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""

    @abstractmethod
    def drop(self, name: str) -> None:
        """Remove a file, if there is one."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """The files whose names begin with the folder `prefix`, all of them for "", in no order."""

    def drop_folder(self, prefix: str) -> None:
        """Remove all files whose names begin with the folder `prefix`; all of them for ""."""
        for file in list(self.list(prefix)):
            self.drop(file.name)

    def set_aside(self, name: str) -> None:
        """Take a damaged file out of the way, where a person may look at it."""
        self.drop(name)

    def touch(self, name: str) -> None:  # noqa: B027  (a store may know by itself what is used)
        """It was used now."""

    def in_memory(self, name: str) -> bool:  # noqa: ARG002
        """Whether a file lies in the memory of this process."""
        return False

    def tier_of(self, name: str) -> str:
        """Where a file lies: "host", "disk" or "remote"."""
        return "host" if self.in_memory(name) else self.medium

    def check(self) -> None:  # noqa: B027
        """Audit the store's own books. Raises AssertionError."""
