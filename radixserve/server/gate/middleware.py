"""`RequestMiddleware`: what happens to every request before its route is called.

It checks the host, origin and API key, refuses requests during shutdown, reads and parses the body,
gives the request its id, and writes its log line.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixserve.checks import shown
from radixserve.server.gate.hosts import AllowedHosts
from radixserve.server.gate.request_log import log_request
from radixserve.server.gate.state import AppState
from radixserve.server.gate.tenant_threads import tenant_of_task
from radixserve.server.wire.errors import ApiError, anthropic_error_response, is_anthropic

_BODY_TIMEOUT_S = 60.0
_DISCARD_S = 1.0  # how long the rest of a body that is too large is read
_PART_BYTES = 64 * 1024
_MAX_BODIES = 8  # memory for all bodies that are being read or parsed, in units of max_body


class RequestMiddleware:
    """ASGI middleware that checks each request, and reads and parses its whole body, before its
    route is called. An ApiError of a check becomes the response."""

    def __init__(self, app: ASGIApp, server: AppState, public_paths: frozenset[str]) -> None:
        """`public_paths`: the paths that may be requested without an API key."""
        self._app = app
        self._public_paths = public_paths
        self._server = server
        self._hosts = AllowedHosts(server.config)
        self._body_bytes: Counter[str] = Counter()  # by tenant: bytes being read or parsed now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope["radixserve.request_id"] = request_id
        scope["radixserve.notes"] = {}
        scope["radixserve.headers"] = []
        started, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                name = b"request-id" if is_anthropic(scope["path"]) else b"x-request-id"
                own = [(name, request_id.encode()), *scope["radixserve.headers"]]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        try:
            receive = await self._admit(scope, receive)
            if scope["method"] == "HEAD" and scope["path"] in self._public_paths:
                scope = {**scope, "method": "GET"}  # uvicorn does not send the body
            await self._app(scope, receive, send_with_id)
        except ApiError as error:
            self._server.counters.rejected[error.code or str(error.status)] += 1
            await error_response(error, scope)(scope, receive, send_with_id)
        finally:
            self._server.counters.statuses[str(status)] += 1
            self._server.freed_memory.add(scope.get("radixserve.body_bytes", 0))
            if self._server.config.log_requests:
                log_request(scope, status, time.perf_counter() - started)

    async def _admit(self, scope: Scope, receive: Receive) -> Receive:
        """Check host, origin, API key and shutdown, then read the body. Returns the `receive` of
        the route. Raises ApiError."""
        headers = _headers(scope)
        if not self._server.tenants:
            self._hosts.check(headers)
        if scope["path"] in self._public_paths:
            return receive
        caller = self._server.tenants.caller(headers.get("authorization"), headers.get("x-api-key"))
        scope["radixserve.caller"] = caller
        if self._server.tenants:
            tenant_of_task.set(caller.tenant)
        self._server.check_open()
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return receive
        has_body = await self._read_body(scope, headers, receive)
        return _replay(b"{}" if has_body else b"", receive)

    async def _read_body(self, scope: Scope, headers: dict[str, str], receive: Receive) -> bool:
        """Parse the JSON body into `scope["radixserve.json"]`. Returns False for an empty body.
        Raises ApiError."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        limit = self._server.config.max_body
        assert isinstance(limit, int)
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared[:20]) > limit:
            await _discard(receive, limit)
            raise _too_large(limit)
        body, tenant = _BodyParts(), scope["radixserve.caller"].tenant
        try:
            try:
                async with asyncio.timeout(_BODY_TIMEOUT_S):
                    await self._read_parts(body, receive, limit, tenant)
            except TimeoutError:
                message = f"the body did not come within {_BODY_TIMEOUT_S:g} s"
                raise ApiError(408, message, headers={"connection": "close"}) from None
            # An empty body needs the type, too: web pages of other origins cannot send it.
            if kind != "application/json":
                raise ApiError(415, f"the content type must be application/json, got {shown(kind)}")
            if not body.size:
                return False
            scope["radixserve.body_bytes"] = body.size
            scope["radixserve.json"] = await self._server.json_parser.parse(body.parts, tenant)
            return True
        finally:
            self._body_bytes[tenant] -= body.size
            if not self._body_bytes[tenant]:
                del self._body_bytes[tenant]

    async def _read_parts(
        self, body: _BodyParts, receive: Receive, limit: int, tenant: str
    ) -> None:
        """Read the body's parts into `body`, while there is memory for them. Raises ApiError."""
        more_body = True
        while more_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the client disconnected")
            part, more_body = message.get("body", b""), message.get("more_body", False)
            if body.size + len(part) > limit:
                if more_body:
                    await _discard(receive, limit)
                raise _too_large(limit)
            if body.size + len(part) > _PART_BYTES and not self._has_room(len(part), limit, tenant):
                headers = {"connection": "close", "retry-after": "1"}
                reason = "the bodies of other requests take all the memory for bodies"
                raise ApiError(503, reason, code="bodies_full", headers=headers)
            body.add(part)
            self._body_bytes[tenant] += len(part)

    def _has_room(self, num_bytes: int, limit: int, tenant: str) -> bool:
        """Whether `num_bytes` more fit into the memory for bodies. A single tenant gets at most
        half of that memory. `limit`: bytes of the largest body."""
        max_bytes = _MAX_BODIES * limit
        if self._server.tenants and self._body_bytes[tenant] + num_bytes > max_bytes // 2:
            return False
        return self._body_bytes.total() + num_bytes <= max_bytes


class _BodyParts:
    """The parts of a body in order of arrival. Small parts are joined, so that many small ones do
    not take more memory than a few large ones."""

    def __init__(self) -> None:
        self.parts: list[bytes | bytearray] = []
        self.size = 0  # bytes of all added parts, also after `parts` was emptied

    def add(self, part: bytes) -> None:
        self.size += len(part)
        last = self.parts[-1] if self.parts else None
        if isinstance(last, bytearray) and len(last) + len(part) <= _PART_BYTES:
            last += part
        elif part:
            self.parts.append(part if len(part) > _PART_BYTES // 2 else bytearray(part))


def error_response(error: ApiError, scope: MutableMapping[str, Any]) -> Response:
    """The error as a response, in the format of the protocol that the path belongs to."""
    if is_anthropic(scope["path"]):
        return anthropic_error_response(error, scope["radixserve.request_id"])
    return error.response()


async def _discard(receive: Receive, max_bytes: int) -> None:
    """Read and drop the rest of a body, at most `max_bytes`, for at most _DISCARD_S seconds. A
    client that is still sending would otherwise get a connection reset instead of the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while max_bytes > 0:
                message = await receive()
                max_bytes -= len(message.get("body", b""))
                if not message.get("more_body"):
                    return


def _replay(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that returns `body` first, then what the given `receive` returns."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


def _headers(scope: Scope) -> dict[str, str]:
    headers: dict[str, str] = {}
    pairs: Any = scope["headers"]
    for name, value in pairs:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers


def _too_large(limit: int) -> ApiError:
    headers = {"connection": "close"}
    return ApiError(413, f"the body is larger than {limit} bytes", headers=headers)
