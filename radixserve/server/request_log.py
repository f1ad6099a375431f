"""A line of JSON for each request, on standard error."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from starlette.types import Scope

log = logging.getLogger("radixserve.requests")
_KEPT_HEADERS = (b"traceparent", b"x-request-id", b"user-agent")
_LONGEST = 256  # characters of a header


def note(scope: Scope, **facts: Any) -> None:
    """Add facts to the line of this request."""
    scope["radixserve.notes"].update(facts)


def log_request(scope: Scope, status: int, seconds: float) -> None:
    """Write it. Never what was asked or answered: counts, times and ids only."""
    line: dict[str, Any] = {
        "time": round(time.time(), 3),
        "id": scope["radixserve.request_id"],
        "method": scope["method"],
        "path": scope["path"],
        "status": status or None,  # none where the client left before the answer
        "seconds": round(seconds, 6),
    }
    caller = scope.get("radixserve.caller")
    if caller is not None and caller.tenant:
        line["tenant"] = caller.tenant
    for name, value in scope["headers"]:
        if name in _KEPT_HEADERS:
            key = name.decode().replace("-", "_").replace("x_request_id", "client_request_id")
            line[key] = value.decode("latin-1")[:_LONGEST]
    line |= scope["radixserve.notes"]
    log.info(json.dumps(line))
