"""`ApiError`: errors as HTTP answers, in OpenAI's format and, on /v1/messages, in Anthropic's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from radixserve.checks import shown
from radixserve.errors import (
    BranchBusy,
    EngineDead,
    InvalidRequest,
    ModelNotSupported,
    PromptTooLong,
    RequestFailed,
)
from radixserve.server.wire.fields import FieldRule

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
INVALID_IMAGE = "invalid_image"  # the code of errors about pictures of a prompt
_NAME = re.compile(r"[a-z_]+")
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_STATUSES = {415: 400, 503: 529}  # our status: theirs, where they differ
_ANTHROPIC_TYPES = {**TYPES, 413: "request_too_large", 529: "overloaded_error"}


class ApiError(Exception):
    """An error that becomes the answer to a request.

    param     the wrong field
    index     the wrong item of a batch, from 0
    code      a word for programs, such as "queue_full"
    overflow  of a prompt that is too long: its tokens, and the most that are allowed
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
        overflow: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.index = index
        self.code = code
        self.headers = dict(headers or {})
        self.overflow = overflow

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's format."""
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
        # Escaped to ASCII: the message may quote text that is not valid Unicode.
        content = json.dumps(self.body())
        return Response(content, self.status, self.headers, media_type="application/json")


def wrong_field(param: str, problem: str) -> ApiError:
    """A 400 whose message is the field's name and then `problem`, such as "must be a list"."""
    return ApiError(400, f"{param} {problem}", param=param)


def as_api_error(error: BaseException) -> ApiError:
    """Any exception as an ApiError: 400 for an error of the client's, 500 for an unknown one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return of_validation(error.errors()[0])
    if isinstance(error, BranchBusy):
        return ApiError(409, str(error), code="branch_busy")
    if isinstance(error, InvalidRequest):
        return invalid(error)
    if isinstance(error, ModelNotSupported):  # an adapter, or a model for an update
        return ApiError(400, str(error), code="not_supported")
    if isinstance(error, RecursionError):  # only a nested body can cause it
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
    """InvalidRequest as a 400. Without `param`, the field is that of the error, or else the name
    with which its message begins."""
    message = str(error)
    param = param or error.param
    if param is None:
        match = _NAME.match(message)
        is_name = match is not None and message[match.end() :].startswith((" must ", " takes "))
        param = match[0] if match is not None and is_name else None
    if index is not None:
        message = f"{param}[{index}]: {message}"
    if isinstance(error, PromptTooLong):  # coding agents look for these words to compact history
        message += f": this model's maximum context length is {error.max_tokens + 1} tokens"
        return ApiError(
            400,
            message,
            param=param,
            index=index,
            code="context_length_exceeded",
            overflow=(error.num_tokens, error.max_tokens),
        )
    return ApiError(400, message, param=param, index=index)


def of_validation(first: Mapping[str, Any]) -> ApiError:
    """The ApiError for the first of pydantic's errors about a body."""
    kind, given = first["type"], first.get("input")
    place = [part for part in first["loc"] if not str(part).startswith("<")]  # tags of unions
    if place and place[0] in ("body", "query"):
        del place[0]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    context = first.get("ctx", {})
    if kind == "refused":
        return _refused(_joined([*place, context["name"]]), context["rule"], context["near"])
    if not place:
        return ApiError(400, "the body must be a JSON object", code="invalid_json")
    name = _joined(place)
    if kind == "union_tag_invalid":
        return _wrong_tag(name, context, given)
    is_untagged = context.get("discriminator") in _MEMBERS and isinstance(given, dict)
    if kind == "missing" or is_untagged:
        name += "." + _MEMBERS[context["discriminator"]] if is_untagged else ""
        return ApiError(400, f"{name} is required", param=name)
    if kind == "value_error":
        return ApiError(400, str(context["error"]), param=name)
    return ApiError(400, f"{name} must {_demand(first)}, got {shown(given)}", param=name)


def _refused(name: str, rule: FieldRule | None, near: str) -> ApiError:
    """The error for a field that is not taken. `near`: names a similar field that is."""
    message = f"unknown field {name}{near}"
    if rule is not None:
        message = f"{name} is not supported by this server: {rule.note}"
    return ApiError(400, message, param=name, code="unsupported_field")


def _wrong_tag(name: str, context: Mapping[str, Any], given: Any) -> ApiError:
    """The error for a part whose type, or a message whose role, is not supported there."""
    member = _MEMBERS.get(context["discriminator"], "type")
    supported = re.sub("['<>]", "", context["expected_tags"])
    value = given.get(member) if isinstance(given, dict) else None
    return ApiError(
        400,
        f"{name}.{member} {shown(value)} is not supported by this server here; "
        f"supported: {supported}",
        param=f"{name}.{member}",
        code="unsupported_field",
    )


def _demand(first: Mapping[str, Any]) -> str:
    """What the value must be or have, in words that follow "must"."""
    kind, context = first["type"], first.get("ctx", {})
    if kind == "union_tag_not_found":
        choices = str(context["discriminator"])
        return _CHOICES.get(choices, "be an object")
    if kind in _DEMANDS:
        return _DEMANDS[kind]
    if kind == "too_short":
        return "be a list with at least one item"
    if kind == "too_long":
        return f"have at most {context['max_length']} items"
    return str(first["msg"]).partition(" should ")[2] or str(first["msg"])


# By the discriminator of a union: the member that it reads, and what the value must be.
_MEMBERS = {"by_type()": "type", "by_role()": "role", "item_kind()": "type"}
_CHOICES = {
    "text_or_list()": "be text or a list",
    "text_or_items()": "be text or a list",
    "text_or_object()": "be a word or an object",
}
_DEMANDS = {
    "model_type": "be an object",
    "model_attributes_type": "be an object",
    "dict_type": "be an object",
    "list_type": "be a list",
    "string_type": "be a string",
    "bool_type": "be true or false",
}


def _joined(place: list[Any]) -> str:
    """["messages", 2, "role"] as "messages[2].role"."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's protocol."""
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")


def anthropic_error_response(error: ApiError, request_id: str) -> Response:
    # Escaped to ASCII: the message may quote text that is not valid Unicode.
    content = json.dumps(anthropic_error_body(error, request_id))
    return Response(content, _anthropic_status(error), error.headers, media_type="application/json")


def anthropic_error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind, message = _ANTHROPIC_TYPES.get(_anthropic_status(error), "api_error"), error.message
    if error.overflow is not None:
        num_tokens, max_tokens = error.overflow
        message = f"prompt is too long: {num_tokens} tokens > {max_tokens} maximum"
    elif error.code == INVALID_IMAGE:  # Claude Code looks for these words, and drops its pictures
        message = f"Could not process image: {message}"
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


def _anthropic_status(error: ApiError) -> int:
    """The status in Anthropic's protocol. A dead engine is 500, since clients take 529 for a
    temporary overload."""
    if error.code == "engine_dead":
        return 500
    return _ANTHROPIC_STATUSES.get(error.status, error.status)
