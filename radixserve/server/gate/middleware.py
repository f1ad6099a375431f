"""`RequestMiddleware`: what happens to every request before its route is called.

It checks the host, origin and API key, refuses requests during shutdown, reads, decodes and parses
the body, gives the request its id, and writes its log line. It removes slashes that end the path.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixserve.checks import shown
from radixserve.server.gate.body_decoding import BodyDecoder
from radixserve.server.gate.disconnect import CLIENT_CLOSED, ClientGone
from radixserve.server.gate.hosts import AllowedHosts, check_host
from radixserve.server.gate.request_log import log_request
from radixserve.server.gate.state import AppState
from radixserve.server.gate.tenant_threads import tenant_of_task
from radixserve.server.wire.errors import ApiError, anthropic_error_response, is_anthropic

_BODY_TIMEOUT_S = 60.0
_DISCARD_S = 1.0  # how long the rest of a body that is too large is read
_PART_BYTES = 64 * 1024
_SINGLE = frozenset(  # headers that a request may have once
    """
    authorization content-encoding content-length content-type host origin x-api-key
    """.split()
)
_INVOKED = {  # by a field that its bodies have: the route that answers a request to /invocations
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/responses",
    "text": "/generate",
    "input_ids": "/generate",
}
_CHARSETS = ("", "utf-8", "utf8", "us-ascii")
# POST routes that take no body, and so no content type. A page of another origin sends its origin.
_BODILESS = re.compile(
    r"/flush_cache|/reset_prefix_cache|/pause|/resume|/pause_generation|/continue_generation"
    r"|/v1/responses/[^/]+/cancel"
)
_MAX_BODIES = 8  # memory for all bodies that are being read or parsed, in units of max_body


class RequestMiddleware:
    """ASGI middleware that checks each request, and reads and parses its whole body, before its
    route is called. An ApiError of a check becomes the response."""

    def __init__(
        self,
        app: ASGIApp,
        server: AppState,
        public_paths: frozenset[str],
        probes: frozenset[str],
    ) -> None:
        """`public_paths`: the paths that may be requested without an API key; `probes`: those that
        the log leaves out by default."""
        self._app = app
        self._probes = probes
        self._public_paths = public_paths
        self._server = server
        self._hosts = AllowedHosts(server.config)
        self._body_bytes: Counter[str] = Counter()  # by tenant: bytes being read or parsed now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if len(scope["path"]) > 1 and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
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
            with self._server.trace_of(scope):
                await self._app(scope, receive, send_with_id)
        except ApiError as error:
            self._server.counters.rejected[error.code or str(error.status)] += 1
            await error_response(error, scope)(scope, receive, send_with_id)
        except ClientGone:
            self._server.counters.clients_gone += 1
            await Response(status_code=CLIENT_CLOSED)(scope, receive, send_with_id)
        finally:
            self._server.admitted.discard(request_id)
            self._server.counters.statuses[str(status)] += 1
            self._server.freed_memory.add(scope.get("radixserve.body_bytes", 0))
            if self._is_logged(scope["path"], status):
                log_request(scope, status, time.perf_counter() - started)

    def _is_logged(self, path: str, status: int) -> bool:
        config = self._server.config
        is_left_out = path in self._probes and not config.log_probes and 0 < status < 400
        return config.log_requests and not is_left_out

    async def _admit(self, scope: Scope, receive: Receive) -> Receive:
        """Check host, origin, API key and shutdown, then read the body. Returns the `receive` of
        the route. Raises ApiError."""
        headers = _headers(scope)
        check_host(headers.get("host", ""))
        if not self._server.tenants:
            self._hosts.check(headers)
        if scope["path"] in self._public_paths:
            return receive
        caller = self._server.tenants.caller(headers.get("authorization"), headers.get("x-api-key"))
        scope["radixserve.caller"] = caller
        if self._server.tenants:
            tenant_of_task.set(caller.tenant)
        self._server.check_open()
        self._server.admitted.add(scope["radixserve.request_id"])
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return receive
        has_body = await self._read_body(scope, headers, receive)
        if scope["path"] == "/invocations":
            scope["path"] = _invoked_path(scope.get("radixserve.json"))
        return _replay(b"{}" if has_body else b"", receive)

    async def _read_body(self, scope: Scope, headers: dict[str, str], receive: Receive) -> bool:
        """Parse the JSON body into `scope["radixserve.json"]`. Returns False for an empty body.
        Raises ApiError."""
        kind = headers.get("content-type", "")
        limit = self._server.config.max_body
        assert isinstance(limit, int)
        declared = headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
            await _discard(receive, limit)
            raise _too_large(limit)
        try:
            decoder = BodyDecoder.of(headers.get("content-encoding", ""), _PART_BYTES)
        except ApiError:
            await _discard(receive, limit)
            raise
        body, tenant = _BodyParts(), scope["radixserve.caller"].tenant
        try:
            try:
                async with asyncio.timeout(_BODY_TIMEOUT_S):
                    await self._read_parts(body, receive, decoder, limit, tenant)
            except TimeoutError:
                message = f"the body did not come within {_BODY_TIMEOUT_S:g} s"
                raise ApiError(408, message, headers={"connection": "close"}) from None
            # An empty body needs the type, too: web pages of other origins cannot send it.
            if body.size or not _BODILESS.fullmatch(scope["path"]):
                _check_content_type(kind)
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
        self,
        body: _BodyParts,
        receive: Receive,
        decoder: BodyDecoder | None,
        limit: int,
        tenant: str,
    ) -> None:
        """Read the body's parts, decoded, into `body`, while there is memory for them. Raises
        ApiError and ClientGone."""
        more_body = True
        while more_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part, more_body = message.get("body", b""), message.get("more_body", False)
            for piece in (part,) if decoder is None else decoder.pieces(part):
                if body.size + len(piece) > limit:
                    if more_body:
                        await _discard(receive, limit)
                    raise _too_large(limit)
                self._add(body, piece, limit, tenant)
                if decoder is not None:
                    await asyncio.sleep(0)  # a part may decode to a thousand times its size
        if decoder is not None:
            decoder.check_end()

    def _add(self, body: _BodyParts, part: bytes, limit: int, tenant: str) -> None:
        """Add a part to a body. Raises ApiError 503 without memory for it."""
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
    """The headers by lower-case name. Raises ApiError 400 if one comes twice that may come once."""
    headers: dict[str, str] = {}
    pairs: Any = scope["headers"]
    for raw_name, value in pairs:
        name = raw_name.decode("latin-1").lower()
        if name in headers and name in _SINGLE:
            raise ApiError(400, f"the header {name} comes more than once")
        headers.setdefault(name, value.decode("latin-1"))
    return headers


def _check_content_type(value: str) -> None:
    """Raise ApiError 415 unless a content type is that of JSON in UTF-8."""
    kind, *parameters = (part.strip() for part in value.lower().split(";"))
    if kind != "application/json":
        raise ApiError(415, f"the content type must be application/json, got {shown(kind[:256])}")
    for parameter in parameters:
        name, _, given = parameter.partition("=")
        charset = given.strip().strip('"')
        if name.strip() == "charset" and charset not in _CHARSETS:
            raise ApiError(415, f"the body's charset must be utf-8, got {shown(charset[:64])}")


def _invoked_path(body: Any) -> str:
    """The path whose body a request to /invocations, the route of Amazon SageMaker, has. Raises
    ApiError 400."""
    for field, path in _INVOKED.items():
        if isinstance(body, dict) and field in body:
            return path
    fields = " or ".join(_INVOKED)
    raise ApiError(400, f"the body of /invocations must have {fields}")


def _too_large(limit: int) -> ApiError:
    headers = {"connection": "close"}
    return ApiError(413, f"the body is larger than {limit} bytes", headers=headers)
