"""What every request passes: key, shutdown, content type, body limit, request id, log."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixserve.server.anthropic_messages.errors import error_response as anthropic_error
from radixserve.server.anthropic_messages.errors import is_anthropic
from radixserve.server.dashboard_routes import PATHS as PAGE
from radixserve.server.errors import ApiError
from radixserve.server.health import PATHS as HEALTH
from radixserve.server.request_log import log_request
from radixserve.server.state import Server

_BODY_TIMEOUT_S = 60.0
_DISCARD_S = 1.0


class RequestMiddleware:
    """ASGI middleware. The body is read here, whole, before a route sees it."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope["radixserve.request_id"] = request_id
        scope["radixserve.notes"] = {}
        started, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                name = b"request-id" if is_anthropic(scope["path"]) else b"x-request-id"
                message["headers"] = [*message["headers"], (name, request_id.encode())]
            await send(message)

        try:
            receive = await self._admit(scope, receive)
            await self._app(scope, receive, send_with_id)
        except ApiError as error:
            self._server.counters.rejected[error.code or str(error.status)] += 1
            await error_response(error, scope)(scope, receive, send_with_id)
        finally:
            self._server.counters.statuses[str(status)] += 1
            if self._server.config.log_requests:
                log_request(scope, status, time.perf_counter() - started)

    async def _admit(self, scope: Scope, receive: Receive) -> Receive:
        """Raise ApiError, or return where the route reads its body from."""
        if scope["path"] in HEALTH or scope["path"] in PAGE:
            return receive
        headers = _headers(scope)
        caller = self._server.tenants.caller(headers.get("authorization"), headers.get("x-api-key"))
        scope["radixserve.caller"] = caller
        self._server.check_open()
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return receive
        return _replay(await self._read_body(headers, receive), receive)

    async def _read_body(self, headers: dict[str, str], receive: Receive) -> bytes:
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        limit = self._server.config.max_body
        assert isinstance(limit, int)
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            await _discard(receive, limit)
            raise _too_large(limit)
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                body = await _read(receive, limit)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {_BODY_TIMEOUT_S:g} s") from None
        if body and kind != "application/json":
            raise ApiError(415, f"the content type must be application/json, got {kind!r}")
        return body


def error_response(error: ApiError, scope: MutableMapping[str, Any]) -> Response:
    """In the shape of the protocol that the route belongs to."""
    if is_anthropic(scope["path"]):
        return anthropic_error(error, scope["radixserve.request_id"])
    return error.response()


async def _read(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client left")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            if message.get("more_body"):
                await _discard(receive, limit)
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def _discard(receive: Receive, most: int) -> None:
    """Read on for a moment: a client that still sends would see a reset instead of the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while most > 0:
                message = await receive()
                most -= len(message.get("body", b""))
                if not message.get("more_body"):
                    return


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once more, then what comes after it."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


def _headers(scope: Scope) -> dict[str, str]:
    found: dict[str, str] = {}
    pairs: Any = scope["headers"]
    for name, value in pairs:
        found.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return found


def _too_large(limit: int) -> ApiError:
    headers = {"connection": "close"}
    return ApiError(413, f"the body is larger than {limit} bytes", headers=headers)
