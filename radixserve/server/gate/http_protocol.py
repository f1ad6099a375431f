"""Limits of HTTP connections: size of a request's head and time for it, time for a client to read
an answer, number of connections."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024  # of a request line and its headers
HEAD_TIMEOUT_S = 20.0  # from the connection, or a request's first byte, to the end of its headers
_SLICE_BYTES = 4 * 1024  # that are read at once: many small requests in it are known at a time
LEAST_TAKEN_BYTES = 64 * 1024  # of an answer that waits, within the write timeout

_TOO_LARGE = f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes"


class ConnectionCounts:
    """Open connections, in all and by the address of their client. Owned by the event loop."""

    def __init__(self, max_connections: int, max_per_address: int) -> None:
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._by_address: Counter[str] = Counter()

    def add(self, address: str) -> bool:
        """Count a connection. False where there are too many: it is counted all the same."""
        self._by_address[address] += 1
        return (
            self._by_address.total() <= self._max_connections
            and self._by_address[address] <= self._max_per_address
        )

    def remove(self, address: str) -> None:
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol over httptools, which itself takes heads of any size, for any time."""

    counts: ConnectionCounts  # these two are set by `bounded_protocol`
    write_timeout_s: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._address = ""
        self._reads_head = True  # between requests, and while a head arrives
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread = b""  # behind requests that wait for the answer to an earlier one
        self._write_timer: asyncio.TimerHandle | None = None  # also where nothing waits any more
        self._unsent_since: float | None = None  # by the loop's clock; None: nothing waits
        self._num_unsent = 0  # bytes that waited then

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # All that the system does not take pauses the answer: at most one piece of it waits here.
        transport.set_write_buffer_limits(high=0)
        self._address = self.client[0] if self.client else ""
        if self.counts.add(self._address):
            self._start_head_timer()
        else:
            self._refuse(503, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self.counts.remove(self._address)
        self._stop_head_timer()
        self._unsent_since = None
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._note_unsent()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.write_timeout_s, self._check_unsent)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unsent_since = None

    def data_received(self, data: bytes) -> None:
        if self._unread:
            self._unread += data
        else:
            self._read(data)

    def _read(self, data: bytes) -> None:
        """A slice at a time: a piece of 256 KB may hold 14,000 requests, each of which takes a
        hundred times its size once it is known."""
        for start in range(0, len(data), _SLICE_BYTES):
            if self.transport.is_closing():
                return
            if self.pipeline:
                self._unread = data[start:]
                return
            self._read_slice(data[start : start + _SLICE_BYTES])

    def _read_slice(self, data: bytes) -> None:
        if self._reads_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._start_head_timer()
        super().data_received(data)
        if self._reads_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, _TOO_LARGE)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unread and not self.transport.is_closing():
            self.flow.pause_reading()
            if not self.pipeline:
                self.loop.call_soon(self._read_rest)

    def _read_rest(self) -> None:
        data, self._unread = self._unread, b""
        self._read(data)
        if not self._unread and not self.pipeline and not self.transport.is_closing():
            self.flow.resume_reading()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._reads_head = False
        self._stop_head_timer()
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEAD_BYTES:
            self._refuse(431, _TOO_LARGE)
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._reads_head = True
        self._head_bytes = 0
        if not self.transport.is_closing():
            super().on_message_complete()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(408, f"no whole request came within {HEAD_TIMEOUT_S:g} s")

    def _note_unsent(self) -> None:
        self._unsent_since = self.loop.time()
        self._num_unsent = self.transport.get_write_buffer_size()

    def _check_unsent(self) -> None:
        """Cut the connection of a client that does not read. O(1), once a write timeout at most."""
        self._write_timer = None
        if self._unsent_since is None:
            return
        left_s = self._unsent_since + self.write_timeout_s - self.loop.time()
        if left_s <= 0:
            if self.transport.get_write_buffer_size() > self._num_unsent - LEAST_TAKEN_BYTES:
                self.transport.abort()  # what generates the answer sees its client leave
                return
            self._note_unsent()
            left_s = self.write_timeout_s
        self._write_timer = self.loop.call_later(left_s, self._check_unsent)

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close: no route sees the request."""
        self._stop_head_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # the answer to an earlier request is on its way
            return
        body = f'{{"error":{{"message":"{message}","type":"invalid_request_error"}}}}'.encode()
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
        self.transport.close()


def bounded_protocol(counts: ConnectionCounts, write_timeout_s: float) -> type[BoundedHttpProtocol]:
    """The protocol class for uvicorn, which makes an instance for each connection."""
    shared = {"counts": counts, "write_timeout_s": write_timeout_s}
    return type("_Protocol", (BoundedHttpProtocol,), shared)
