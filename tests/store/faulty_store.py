"""`FaultyStore`: a store of files that injects faults into reads and writes."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from radixserve.runner.kv_layout import KVLayout
from radixserve.store import BadRun, FolderStore, decode_run, encode_run
from radixserve.store.run_file import VERSION, Buffer, ShortHead, decode_head

_SLOW_S = 0.02
_HANG_S = 60.0  # a hang ends then, should a test forget to end it


def _torn(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    """A bit of the K/V."""
    middle = len(data) * 3 // 4
    return data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :]


def _of_tomorrow(data: bytes) -> bytes:
    """A later version."""
    return data[:4] + (VERSION + 1).to_bytes(4, "little") + data[8:]


def _of_another_model(data: bytes) -> bytes:
    """K/V of as many bytes in another dtype, with the right checksum."""
    layers, _, heads, head_dim, _ = decode_head(data).layout
    layout = KVLayout(layers, heads, head_dim, "float16", 2)
    return b"".join(encode_run(decode_run(data), layout))


def _of_other_tokens(data: bytes) -> bytes:
    """Another request's K/V under this name, with the right checksum."""
    run, head = decode_run(data), decode_head(data)
    layers, _, heads, head_dim, dtype = head.layout
    layout = KVLayout(layers, heads, head_dim, dtype, 4)
    return b"".join(encode_run(replace(run, tokens=run.tokens + 1), layout))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "torn": _torn,
    "empty": lambda _: b"",
    "flipped": _flipped,
    "of tomorrow": _of_tomorrow,
    "of another model": _of_another_model,
    "of other tokens": _of_other_tokens,
}


@dataclass
class Faults:
    """What goes wrong from now on; "" nothing. Shared by the stores of several engines."""

    read: str = ""  # of DAMAGES, or "failing", "gone", "slow", "stalled"
    find: str = ""  # of heads: "failing", "slow", "stalled"
    write: str = ""  # of DAMAGES, or "failing", "full", "slow", "stalled"
    let_go: threading.Event = field(default_factory=threading.Event)  # ends what is stalled
    num_calls: int = 0  # that went wrong

    def store(self, folder: Path, max_bytes: int) -> FaultyStore:
        return FaultyStore(folder, max_bytes, self)


class FaultyStore(FolderStore):
    """Reads of heads, reads of whole files and writes have the faults of `faults`."""

    def __init__(self, folder: Path, max_bytes: int, faults: Faults) -> None:
        super().__init__(folder, max_bytes)
        self.faults = faults

    def get(
        self, name: str, num_bytes: int | None = None, into: memoryview | None = None
    ) -> memoryview | None:
        fault = self.faults.find if into is None else self.faults.read
        if not fault:
            return super().get(name, num_bytes, into)
        data = super().get(name, num_bytes, into)
        if into is not None and data is None:
            return None
        self.faults.num_calls += 1
        if self._waits(fault):
            return data
        if fault == "failing":
            raise OSError(errno.EIO, "Input/output error")
        return None if fault == "gone" else memoryview(_damaged(bytes(data), fault))

    def put(self, name: str, parts: Iterable[Buffer]) -> int:
        fault = self.faults.write
        if not fault:
            return super().put(name, parts)
        self.faults.num_calls += 1
        if self._waits(fault):
            return super().put(name, parts)
        data = b"".join(parts)
        if fault in ("failing", "full"):
            return super().put(name, _interrupted(data, fault))
        return super().put(name, [DAMAGES[fault](data)])

    def _waits(self, fault: str) -> bool:
        """Whether the fault is one of time alone, which has passed then."""
        if fault == "slow":
            time.sleep(_SLOW_S)
        elif fault == "stalled":
            self.faults.let_go.wait(_HANG_S)
        return fault in ("slow", "stalled")


def _damaged(data: bytes, fault: str) -> bytes:
    try:
        return DAMAGES[fault](data)
    except (BadRun, ShortHead):  # it is damaged already
        return data


def _interrupted(data: bytes, fault: str) -> Iterator[bytes]:
    """A file's bytes, of which the disk takes a part."""
    yield data[: len(data) // 3]
    if fault == "full":
        raise OSError(errno.ENOSPC, "No space left on device")
    raise OSError(errno.EIO, "Input/output error")
