"""The log: a line of JSON per request, and the names of fields that had no effect."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from typing import Any

from starlette.requests import Request
from starlette.types import Scope

from radixserve.server.gate.json_body import has_large_body
from radixserve.server.gate.state import server_of
from radixserve.server.wire.body import Body, skipped_in
from radixserve.server.wire.errors import ApiError

log = logging.getLogger("radixserve.requests")
_KEPT_HEADERS = (b"traceparent", b"x-request-id", b"user-agent")
_MAX_HEADER = 256  # characters of a header's value in the log
_server_log = logging.getLogger("radixserve.server")
SKIPPED_HEADER = "x-radixserve-skipped-fields"
_MAX_SKIPPED = 32  # names in the header
_PLAIN = re.compile(r"[\w.\[\]-]{1,96}", re.ASCII)  # names that may stand in a header
_MAX_LOGGED = 1_024  # names that are logged, each once


def note(scope: Scope, **facts: Any) -> None:
    """Add members to the request's log line."""
    scope["radixserve.notes"].update(facts)


def log_request(scope: Scope, status: int, seconds: float) -> None:
    """Write the request's log line: counts, times and ids, never prompts or answers. `status` 0:
    the server was stopped before the answer."""
    line: dict[str, Any] = {
        "time": round(time.time(), 3),
        "id": scope["radixserve.request_id"],
        "method": scope["method"],
        "path": scope["path"],
        "status": status or None,
        "seconds": round(seconds, 6),
    }
    caller = scope.get("radixserve.caller")
    if caller is not None and caller.tenant:
        line["tenant"] = caller.tenant
    for name, value in scope["headers"]:
        if name in _KEPT_HEADERS:
            key = name.decode().replace("-", "_").replace("x_request_id", "client_request_id")
            line[key] = value.decode("latin-1")[:_MAX_HEADER]
    line |= scope["radixserve.notes"]
    log.info(json.dumps(line))


async def note_skipped(request: Request, body: Body) -> None:
    """Report the skipped fields and tools of a body in a header of the answer and in the log.

    With --strict-fields, raises ApiError 400 for the first of them.
    """
    server = server_of(request)
    labels: dict[str, None] = {}
    if has_large_body(request):
        all_skipped = await asyncio.to_thread(lambda: list(skipped_in(body)))
    else:
        all_skipped = list(skipped_in(body))
    for skipped in all_skipped:
        if server.config.strict_fields:
            raise ApiError(
                400,
                f"{skipped.param} is not supported by this server (--strict-fields)",
                param=skipped.param,
                code="unsupported_field",
            )
        labels[skipped.label if _PLAIN.fullmatch(skipped.label) else "..."] = None
    if not labels:
        return
    names = [*labels][:_MAX_SKIPPED]
    add_header(request, SKIPPED_HEADER, ", ".join(names))
    note(request.scope, skipped_fields=names)
    path = request.scope["path"]
    for name in names:
        known = server.logged_fields
        if (path, name) not in known and len(known) < _MAX_LOGGED:
            known.add((path, name))
            _server_log.info("%s: %s has no effect here and is skipped", path, name)


def add_header(request: Request, name: str, value: str) -> None:
    """Add a header to the answer, whatever its status."""
    request.scope["radixserve.headers"].append((name.encode(), value.encode("latin-1", "replace")))
