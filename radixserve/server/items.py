"""Items of a body that are told apart by their `type`: read one by one, errors name them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import ValidationError

from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.server.errors import ApiError, as_api_error, of_validation
from radixserve.server.schema import Body

M = TypeVar("M", bound=Body)
_SAME = ("model", "temperature", "top_p", "top_k", "stream", "seed", "priority", "session_id",
         "supersede", "cache_salt")  # fmt: skip


def same_fields(body: Body) -> dict[str, Any]:
    """The fields that the agents' protocols and a ChatRequest have in common."""
    return {name: getattr(body, name) for name in _SAME}


def read_as(kind: type[M], value: Any, where: str) -> M:
    """`value` as a model. Raises ApiError."""
    if not isinstance(value, dict):
        raise ApiError(400, f"{where} must be an object, got {shown(value)}", param=where)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise of_validation(error.errors()[0], where) from None


def read_item(
    kinds: Mapping[str, type[M]], value: Any, where: str, default: str | None = None
) -> M:
    """`value` as the model of its type; another type is refused by name. Raises ApiError."""
    if not isinstance(value, dict):
        raise ApiError(400, f"{where} must be an object, got {shown(value)}", param=where)
    param, name = f"{where}.type", value.get("type", default)
    if name is None:
        raise ApiError(400, f"{param} is required", param=param)
    if not isinstance(name, str) or name not in kinds:
        raise ApiError(
            400,
            f"{param} {shown(name)} is not supported by this server here; "
            f"supported: {', '.join(kinds)}",
            param=param,
            code="unsupported_field",
        )
    return read_as(kinds[name], value, where)


def read_list(value: Any, where: str, *, may_be_empty: bool = False) -> list[Any]:
    if not isinstance(value, list) or not (value or may_be_empty):
        what = "a list" if may_be_empty else "a list with at least one item"
        raise ApiError(400, f"{where} must be {what}, got {shown(value)}", param=where)
    return value


@contextmanager
def errors_in_terms(terms: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Errors of the block, for a client that calls the fields otherwise: (ours, theirs), in order;
    ours is a regular expression."""
    try:
        yield
    except (ApiError, InvalidRequest) as error:
        raise _in_terms(as_api_error(error), terms) from None


def _in_terms(error: ApiError, terms: Sequence[tuple[str, str]]) -> ApiError:
    message, param = error.message, error.param
    for ours, theirs in terms:
        if param is not None:
            new = re.sub(rf"\A{ours}", theirs, param)
            if new != param:
                message, param = message.replace(param, new), new
    return ApiError(
        error.status, message, param=param, index=error.index, code=error.code,
        headers=error.headers,
    )  # fmt: skip
