"""The constraint on an answer: `response_format`, `structured_outputs`, and SGLang's
json_schema, regex and ebnf."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from radixserve.checks import shown
from radixserve.errors import InvalidRequest, RequestFailed
from radixserve.request import SamplingParams
from radixserve.server.errors import ApiError
from radixserve.server.state import Server
from radixserve.structured_output import StructuredOutput

_FORMATS = ("text", "json_object", "json_schema")
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")
_FIELDS = tuple(field.name for field in fields(StructuredOutput))
NATIVE = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}  # SGLang's -> ours


async def with_structured(server: Server, body: Any, params: SamplingParams) -> SamplingParams:
    """`params` with the constraint that the body asks for, compiled. Raises ApiError."""
    structured = _read(body)
    if structured is None:
        return params
    name, fields = structured
    return replace(params, structured=await compile_structured(server, fields, name))


async def compile_structured(
    server: Server, fields: Mapping[str, Any], name: str
) -> StructuredOutput:
    """The StructuredOutput of these fields, compiled outside the event loop.

    `name`: the field of the request that asked for it, for errors. Raises ApiError.
    """
    try:
        structured = StructuredOutput(**fields)
        if not server.runtime.has_grammar(structured):
            await asyncio.to_thread(server.runtime.compile_grammar, structured)
    except InvalidRequest as error:
        raise ApiError(400, f"{name}: {error}", param=name) from None
    except RequestFailed as error:
        raise ApiError(503, f"{name}: {error}", param=name, headers={"retry-after": "5"}) from None
    return structured


def _read(body: Any) -> tuple[str, dict[str, Any]] | None:
    """The name of the field that asks for a constraint, and its fields as ours."""
    found = []
    response_format = getattr(body, "response_format", None)
    if response_format is not None:
        format_fields = _of_response_format(response_format)
        if format_fields is not None:
            found.append(("response_format", format_fields))
    given = getattr(body, "structured_outputs", None)
    if given is not None:
        found.append(("structured_outputs", _of_structured_outputs(given)))
    native = getattr(body, "sampling_params", None)
    for theirs, ours in NATIVE.items():
        value = getattr(native, theirs, None)
        if value is not None:
            found.append((f"sampling_params.{theirs}", {ours: value}))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise ApiError(400, f"{names} exclude each other: give one", param=found[0][0])
    return found[0] if found else None


def _of_response_format(given: object) -> dict[str, Any] | None:
    place = "response_format"
    fields = _object(place, given)
    kind = fields.pop("type", None)
    if kind not in _FORMATS:
        raise ApiError(
            400, f"{place}.type must be one of {', '.join(_FORMATS)}, got {shown(kind)}",
            param=f"{place}.type",
        )  # fmt: skip
    if kind != "json_schema":
        _refuse_unknown(place, fields, ())
        return None if kind == "text" else {"json_object": True}
    _refuse_unknown(place, fields, ("json_schema",))
    place += ".json_schema"
    inner = _object(place, fields.get("json_schema"))
    _refuse_unknown(place, inner, _SCHEMA_FIELDS)
    if not isinstance(inner.get("strict"), bool | None):
        raise ApiError(
            400, f"{place}.strict must be true or false, got {shown(inner['strict'])}",
            param=f"{place}.strict",
        )  # fmt: skip
    return {"json": _object(f"{place}.schema", inner.get("schema"))}


def _of_structured_outputs(given: object) -> dict[str, Any]:
    place = "structured_outputs"
    fields = {name: value for name, value in _object(place, given).items() if value is not None}
    _refuse_unknown(place, fields, _FIELDS)
    return fields


def _object(place: str, given: object) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ApiError(400, f"{place} must be an object, got {shown(given)}", param=place)
    return dict(given)


def _refuse_unknown(place: str, fields: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for name in fields:
        if name not in allowed:
            rest = f"; allowed: {', '.join(allowed)}" if allowed else ""
            raise ApiError(
                400, f"{place}.{name} is not supported{rest}", param=f"{place}.{name}",
                code="unsupported_field",
            )  # fmt: skip
