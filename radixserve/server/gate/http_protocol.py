"""`BoundedHttpProtocol`: limits of HTTP connections.

It bounds the size of a request's head and the time in which it arrives, the number of connections,
and the time in which a client has to read its answer (the write timeout): a stream whose client
stops reading ends in `_check_unsent`.
"""

from __future__ import annotations

import asyncio
import re
import weakref
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

MAX_HEAD_BYTES = 64 * 1024  # of a request line and its headers
# From the connection, or a request's first byte, to the end of its headers; from an answer that
# came before the end of its request to that end.
HEAD_TIMEOUT_S = 20.0
_SLICE_BYTES = 4 * 1024  # parsed at a time, which bounds how many small requests it contains
_MAX_UNPARSED = 64 * 1024  # bytes that wait for an earlier request's answer; then reading stops
# A client must take this much of an answer that waits to be sent, within each write timeout.
LEAST_TAKEN_BYTES = 64 * 1024

_UPGRADE = b"upgrade:"
_UPGRADE_LINE = re.compile(rb"\nupgrade:", re.IGNORECASE)
_TOO_LARGE = f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes"


class ConnectionCounts:
    """Counts open connections, in total and by client address. Owned by the event loop."""

    def __init__(self, max_connections: int, max_per_address: int) -> None:
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._by_address: Counter[str] = Counter()

    def add(self, address: str) -> bool:
        """Count a connection, until `remove`. Returns False if there are too many now."""
        self._by_address[address] += 1
        return (
            self._by_address.total() <= self._max_connections
            and self._by_address[address] <= self._max_per_address
        )

    def remove(self, address: str) -> None:
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


class _Http10Cycle(RequestResponseCycle):
    """The answer to a request in HTTP/1.0, which has no chunks: the end of a body whose length is
    unknown is the end of the connection. uvicorn itself sends chunks."""

    _has_length = True

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name == b"content-length" for name, _ in message["headers"])
            self.chunked_encoding = False if not self._has_length else None
        elif not self._has_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with bounds; uvicorn itself accepts a head of any size and waits for
    it, and for the client to read, without a limit. One instance per connection."""

    counts: ConnectionCounts  # set by `bounded_protocol`, as is the next one
    write_timeout_s: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._address = ""
        self._reads_head = True  # between requests, and while a head arrives
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._ends_line = False  # whether the parsed part of a head ends with a line
        self._name_start = b""  # received bytes of a name that may become Upgrade
        self._unparsed = b""  # received while an earlier request of the connection is answered
        self._answered: RequestResponseCycle | None = None  # the request that is answered now
        self._write_timer: asyncio.TimerHandle | None = None  # may outlast the unsent bytes
        self._unsent_since: float | None = None  # by the loop's clock; None: all bytes are sent
        self._num_unsent = 0  # unsent bytes at that time

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # The answer is paused as soon as the socket is full: at most one piece of it waits here.
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
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True  # uvicorn tells the last request of a pipeline only
            self._answered.message_event.set()
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
        if self._unparsed:
            self._unparsed += data
        else:
            self._parse(data)
        if len(self._unparsed) > _MAX_UNPARSED:
            self.flow.pause_reading()
        elif self.pipeline and not self.transport.is_closing():
            self.flow.resume_reading()  # uvicorn has paused it, so that no disconnect is noticed

    def _parse(self, data: bytes) -> None:
        """Parse received bytes in slices, until a request of them has to wait for the answer to an
        earlier one. The 256 KB that asyncio may deliver at once can contain 14,000 requests, each
        of which takes a hundred times its size once it is parsed."""
        for start in range(0, len(data), _SLICE_BYTES):
            if self.transport.is_closing():
                return
            if self.pipeline:
                self._unparsed = data[start:]
                return
            self._parse_slice(data[start : start + _SLICE_BYTES])

    def _parse_slice(self, data: bytes) -> None:
        if self._reads_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._start_head_timer()
            data = self._without_upgrade(data)
        super().data_received(data)
        if not self._reads_head and self._name_start:  # that of a body
            data, self._name_start = self._name_start, b""
            super().data_received(data)
        if self._reads_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, _TOO_LARGE)

    def _without_upgrade(self, data: bytes) -> bytes:
        """A part of a head in which the header Upgrade has another name, so that the request is
        answered in HTTP/1.1. httptools drops the body of a request for another protocol, such as
        the HTTP/2 that Java's client asks for."""
        line_end = b"\n" if self._ends_line else b""
        head, end, body = (line_end + self._name_start + data).partition(b"\r\n\r\n")
        _, line_break, name = head.rpartition(b"\n")
        is_start = line_break and not end and _UPGRADE.startswith(name.lower())
        self._name_start = name if is_start else b""
        head = head.removesuffix(self._name_start)
        data = _UPGRADE_LINE.sub(rb"\nx-upgrade:", head)[len(line_end) :] + end + body
        self._ends_line = data.endswith(b"\n") if data else self._ends_line
        return data

    def on_response_complete(self) -> None:
        self._answered = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        is_unread = self._answered is None and not self._reads_head
        if is_unread and not self.transport.is_closing():  # it was refused by its head
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)
        if self._unparsed and not self.transport.is_closing():
            self.flow.pause_reading()
            if not self.pipeline:
                self.loop.call_soon(self._parse_rest)

    def _parse_rest(self) -> None:
        data, self._unparsed = self._unparsed, b""
        self._parse(data)
        if not self._unparsed and not self.pipeline and not self.transport.is_closing():
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
        if not self.pipeline:
            self._answered = self.cycle
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = _Http10Cycle  # its task has not begun
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["radixserve.send"] = weakref.WeakMethod(self.cycle.send)  # the cycle has the scope

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._reads_head = True
        self._head_bytes = 0
        if self.transport.is_closing():
            return
        super().on_message_complete()
        if self.cycle.response_complete:  # uvicorn has ended its timer, as for a new request
            self._stop_head_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

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
        """Close the connection of a client that took less than LEAST_TAKEN_BYTES of its answer
        within the write timeout; its request is then aborted as after any disconnect. O(1), at most
        once per write timeout."""
        self._write_timer = None
        if self._unsent_since is None:
            return
        left_s = self._unsent_since + self.write_timeout_s - self.loop.time()
        if left_s <= 0:
            if self.transport.get_write_buffer_size() > self._num_unsent - LEAST_TAKEN_BYTES:
                self.transport.abort()  # `CancelOnDisconnect` then ends the generation
                return
            self._note_unsent()
            left_s = self.write_timeout_s
        self._write_timer = self.loop.call_later(left_s, self._check_unsent)

    def _refuse(self, status: int, message: str) -> None:
        """Send an error and close the connection. The request does not reach any route."""
        self._stop_head_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # the answer to an earlier request is being sent
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
    """The protocol class for uvicorn's option `http`. `write_timeout_s`: see `_check_unsent`."""
    shared = {"counts": counts, "write_timeout_s": write_timeout_s}
    return type("_Protocol", (BoundedHttpProtocol,), shared)
