"""`TraceRecorder`: records finished requests, one JSON line each, for `radixserve replay`.

The first line is a header: {"trace", "kind": "radixserve-log", "version", "started"}. A request is

    {"time", "tokens", "output_tokens", "finish", "cached_tokens", "session"?, "namespace"?}

or, where token ids must not be recorded, with "block_size" in the header,

    {"time", "input_length", "output_length", "hash_ids", "finish", "cached_tokens", ...}

"time" is the arrival in seconds since 1970. "hash_ids" are keyed hashes of the prompt's whole
blocks, each of all tokens up to its end: they show equal prefixes and nothing else. Sessions and
namespaces are hashed as well. The key is random and never written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, BinaryIO

from radixserve.arrays import IntArray
from radixserve.engine.extension import EngineExtension
from radixserve.errors import InvalidRequest
from radixserve.output import Finish
from radixserve.request import Request

LOG_KIND = "radixserve-log"  # the "kind" in a log's first line
_VERSION = 1
_FLUSH_BYTES = 1 << 20
_FLUSH_S = 1.0  # between two writes while requests finish


class TraceRecorder(EngineExtension):
    """Appends to a file, whole lines at a time. Used by one thread.

    Costs some 0.1 us a token; writes are buffered. A write that fails ends the recording, never a
    request. Lines not yet written are lost when the process is killed; a line that was cut off is
    dropped when the file is read or appended to. A new file is readable by its owner alone.
    """

    name = "trace"

    def __init__(self, path: str, hash_block: int | None = None) -> None:
        """`hash_block`: tokens per block, to record hashes of blocks; None: record token ids.

        Raises InvalidRequest when the file cannot be written.
        """
        self._hash_block = hash_block
        self._key = os.urandom(32)
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._flushed_at = time.monotonic()
        name = os.path.basename(path)
        header = {"trace": name, "kind": LOG_KIND, "version": _VERSION, "started": time.time()}
        self._put(header if hash_block is None else {**header, "block_size": hash_block})
        try:
            self._file: BinaryIO | None = open(  # noqa: SIM115
                path, "ab+", buffering=0, opener=_open_own
            )
            _cut_broken_line(self._file)
            self.flush()
        except OSError as error:
            raise InvalidRequest(f"trace {path!r} cannot be written: {error.strerror}") from None

    def on_finish(
        self, request: Request, output_ids: Sequence[int], finish: Finish, arrived_at: float
    ) -> None:
        """Record a finished request. Raises OSError. A request without an output token is not
        recorded."""
        if self._file is None or not output_ids:
            return
        self._put(self._line(request, output_ids, finish, arrived_at))
        is_due = time.monotonic() - self._flushed_at > _FLUSH_S
        if is_due or self._num_bytes > _FLUSH_BYTES:
            self.flush()

    def on_idle(self) -> None:
        self.flush()

    def flush(self) -> None:
        """Write the buffered lines. Raises OSError. O(1) when there are none."""
        if self._file is None or not self._lines:
            return
        data = memoryview(b"".join(self._lines))
        self._lines, self._num_bytes, self._flushed_at = [], 0, time.monotonic()
        while data:
            data = data[self._file.write(data) :]

    def close(self, timeout_s: float = 0.0) -> None:  # noqa: ARG002
        """Write the buffered lines and close the file. Idempotent."""
        try:
            self.flush()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _line(
        self, request: Request, output_ids: Sequence[int], finish: Finish, arrived_at: float
    ) -> dict[str, Any]:
        line: dict[str, Any] = {"time": round(arrived_at, 6)}
        namespace = request.params.namespace
        if self._hash_block is None:
            line["tokens"] = request.token_ids.tolist()
            line["output_tokens"] = list(output_ids)
        else:
            line["input_length"] = len(request.token_ids)
            line["output_length"] = len(output_ids)
            line["hash_ids"] = self._hash_ids(request.token_ids, namespace, self._hash_block)
        line["finish"] = finish.reason
        line["cached_tokens"] = finish.usage.cached_tokens
        for name, text in (("session", request.session), ("namespace", namespace)):
            if text:
                line[name] = text if self._hash_block is None else self._hash(_bytes_of(text)).hex()
        return line

    def _hash_ids(self, token_ids: IntArray, namespace: str, block: int) -> list[int]:
        """Returns 63-bit hashes of the whole blocks, each of all tokens up to the block's end."""
        data, width = token_ids.tobytes(), 4 * block
        ids, digest = [], self._hash(_bytes_of(namespace))
        for offset in range(0, len(data) - width + 1, width):
            digest = self._hash(digest + data[offset : offset + width])
            ids.append(int.from_bytes(digest) >> 1)
        return ids

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=8, key=self._key).digest()

    def _put(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        self._lines.append(data)
        self._num_bytes += len(data)


def _open_own(path: str, flags: int) -> int:
    """Open a file; a new one is its owner's alone, since it has prompts in it."""
    return os.open(path, flags, 0o600)


def _bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a name need not be valid Unicode


def _cut_broken_line(file: BinaryIO) -> None:
    """Drop the bytes after the last line's end: their writer was killed."""
    end = size = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - (1 << 16))
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        file.truncate(end)
    file.seek(0, os.SEEK_END)
