"""Errors in the shape of Anthropic's, on the routes of its protocol alone."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

from radixserve.server.errors import TYPES, ApiError

_PATH = "/v1/messages"
_STATUSES = {415: 400, 503: 529}  # where theirs is another
_TYPES = {**TYPES, 413: "request_too_large", 529: "overloaded_error"}


def is_anthropic(path: str) -> bool:
    return path == _PATH or path.startswith(f"{_PATH}/")


def error_response(error: ApiError, request_id: str) -> Response:
    # Escaped to ASCII: the message may quote text that is no valid Unicode.
    content = json.dumps(error_body(error, request_id))
    return Response(content, _status(error), error.headers, media_type="application/json")


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = _TYPES.get(_status(error), "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id,
    }


def _status(error: ApiError) -> int:
    """A dead engine is no passing overload."""
    if error.code == "engine_dead":
        return 500
    return _STATUSES.get(error.status, error.status)
