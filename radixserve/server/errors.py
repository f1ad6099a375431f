"""Errors as HTTP answers, in the shape of OpenAI's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from radixserve.checks import shown
from radixserve.errors import EngineDead, InvalidRequest, RequestFailed
from radixserve.server.unsupported_fields import unsupported_reason

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_NAME = re.compile(r"[a-z_]+")


class ApiError(Exception):
    """An answer with a status that is not 200.

    param  the field that is wrong
    index  the item of a batch that is wrong
    code   a word for programs
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        index: int | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.index = index
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        error: dict[str, Any] = {
            "message": self.message,
            "type": TYPES.get(self.status, "server_error"),
            "param": self.param,
            "code": self.code,
        }
        if self.index is not None:
            error["index"] = self.index
        return {"error": error}

    def response(self) -> Response:
        # Escaped to ASCII: the message may quote text that is no valid Unicode.
        content = json.dumps(self.body())
        return Response(content, self.status, self.headers, media_type="application/json")


def as_api_error(error: BaseException) -> ApiError:
    """Any exception as an answer: 400 for what the client did wrong, 500 for what it did not."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return of_validation(error.errors()[0])
    if isinstance(error, InvalidRequest):
        return invalid(error)
    if isinstance(error, RecursionError):  # nothing else here goes deep
        return ApiError(400, "the body is nested too deeply", code="invalid_json")
    if isinstance(error, RequestFailed):
        return ApiError(500, str(error), code="request_failed")
    if isinstance(error, EngineDead):
        return ApiError(503, str(error), code="engine_dead")
    if isinstance(error, HTTPException):
        headers = error.headers
        return ApiError(error.status_code, str(error.detail), headers=headers)
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")


def invalid(
    error: InvalidRequest, *, param: str | None = None, index: int | None = None
) -> ApiError:
    """InvalidRequest as 400; without `param` it is the name that the message begins with."""
    message = str(error)
    if param is None:
        match = _NAME.match(message)
        is_name = match is not None and message[match.end() :].startswith((" must ", " takes "))
        param = match[0] if match is not None and is_name else None
    if index is not None:
        message = f"{param}[{index}]: {message}"
    return ApiError(400, message, param=param, index=index)


def of_validation(first: Mapping[str, Any], where: str = "") -> ApiError:
    """What pydantic finds wrong with a body, or with the part of it that is called `where`."""
    kind, place = first["type"], list(first["loc"])
    if place and place[0] == "body" and not where:
        del place[0]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    if not place and not where:
        return ApiError(400, "the body must be a JSON object", code="invalid_json")
    name = _joined(place, where)
    if kind == "extra_forbidden":
        return ApiError(400, unsupported_reason(name), param=name, code="unsupported_field")
    if kind == "missing":
        return ApiError(400, f"{name} is required", param=name)
    if kind == "value_error":
        return ApiError(400, str(first["ctx"]["error"]), param=name)
    text = str(first["msg"])
    message = f"{name} must be {text[0].lower()}{text[1:]}".replace("input should be ", "")
    return ApiError(400, f"{message}, got {shown(first.get('input'))}", param=name)


def _joined(place: list[Any], where: str) -> str:
    """["messages", 2, "role"] as "messages[2].role"."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return where + text if where else text.removeprefix(".")
