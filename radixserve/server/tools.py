"""`Tools`: the functions that a chat's model may call, and which of them it must."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixserve.checks import shown
from radixserve.server.errors import ApiError
from radixserve.server.tool_parsers.calls import MAX_NESTING, is_deep

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_MAX_TOOLS = 1_024
_CHOICES = (
    'tool_choice must be "none", "auto", "required" or {"type": "function", "function": '
    '{"name": ...}}'
)


@dataclass(frozen=True, slots=True)
class Tools:
    """functions  {"name", "description", "parameters"} each; none: there are no tools
    choice      "none", "auto", "required", or "named" with `name`
    parallel    whether an answer may call more than one
    """

    functions: tuple[dict[str, Any], ...] = ()
    choice: str = "none"
    name: str | None = None
    parallel: bool = True

    @classmethod
    def read(cls, tools: object, tool_choice: object, parallel: bool | None) -> Tools:
        """From the fields of a chat. Raises ApiError, which names the place."""
        functions = _functions(tools)
        if not functions:
            for field, value in (("tool_choice", tool_choice), ("parallel_tool_calls", parallel)):
                if value not in (None, "none"):
                    raise _wrong(field, "needs tools")
            return cls()
        choice, name = _choice(tool_choice, [one["name"] for one in functions])
        return cls(functions, choice, name, parallel is not False)

    @property
    def may_call(self) -> bool:
        return self.choice != "none"

    @property
    def must_call(self) -> bool:
        return self.choice in ("required", "named")

    @property
    def for_template(self) -> list[dict[str, Any]] | None:
        """With "none" too: the prompt stays the same, and with it what is cached."""
        found = [{"type": "function", "function": one} for one in self.functions]
        return found or None


def _wrong(where: str, problem: str, code: str | None = None) -> ApiError:
    return ApiError(400, f"{where} {problem}", param=where, code=code)


def _functions(given: object) -> tuple[dict[str, Any], ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) > _MAX_TOOLS:
        raise _wrong("tools", f"must be a list of at most {_MAX_TOOLS} tools, got {shown(given)}")
    found: dict[str, dict[str, Any]] = {}
    for at, tool in enumerate(given):
        function = _function(tool, f"tools[{at}]")
        if function["name"] in found:
            raise _wrong(f"tools[{at}].function.name", f"{function['name']!r} is there twice")
        found[function["name"]] = function
    return tuple(found.values())


def _function(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise _wrong(where, f"must be an object, got {shown(tool)}")
    kind = tool.get("type")
    if kind != "function":
        raise _wrong(f"{where}.type", f"must be 'function', got {shown(kind)}")
    for name in tool:
        if name not in ("type", "function"):
            raise _wrong(f"{where}.{name}", "is not supported by this server", "unsupported_field")
    function = tool.get("function")
    where = f"{where}.function"
    if not isinstance(function, Mapping):
        raise _wrong(where, f"must be an object, got {shown(function)}")
    for field in function:
        if field not in ("name", "description", "parameters", "strict"):
            raise _wrong(f"{where}.{field}", "is not supported by this server", "unsupported_field")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(
            f"{where}.name",
            f"must be 1 to 128 letters, digits, _, -, . and :, got {shown(name)}",
        )
    for field, kinds, what in (("description", str, "a string"), ("strict", bool, "a boolean")):
        value = function.get(field)
        if value is not None and not isinstance(value, kinds):
            raise _wrong(f"{where}.{field}", f"must be {what}, got {shown(value)}")
    parameters = function.get("parameters")
    if parameters is not None:
        _check_schema(parameters, f"{where}.parameters")
    kept = ("name", "description", "parameters")
    return {one: function[one] for one in kept if function.get(one) is not None}


def _check_schema(schema: object, where: str) -> None:
    """Check the schema of an object, as far as templates read it."""
    if not isinstance(schema, Mapping):
        raise _wrong(where, f"must be a JSON schema, got {shown(schema)}")
    if is_deep(schema):
        raise _wrong(where, f"must be nested at most {MAX_NESTING} deep")
    kind = schema.get("type", "object")
    if kind != "object":
        raise _wrong(f"{where}.type", f"must be 'object', got {shown(kind)}")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise _wrong(f"{where}.properties", f"must be an object, got {shown(properties)}")
    for name, one in properties.items():
        if not isinstance(one, Mapping | bool):
            raise _wrong(f"{where}.properties.{name}", f"must be a JSON schema, got {shown(one)}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise _wrong(f"{where}.required", f"must be a list of names, got {shown(required)}")
    unknown = [one for one in required if one not in properties]
    if unknown and properties:
        raise _wrong(f"{where}.required", f"names what properties lacks: {', '.join(unknown)}")


def _choice(given: object, names: list[str]) -> tuple[str, str | None]:
    if given is None:
        return "auto", None
    if isinstance(given, str) and given in ("none", "auto", "required"):
        return given, None
    if not isinstance(given, Mapping) or given.get("type") != "function":
        raise ApiError(400, f"{_CHOICES}, got {shown(given)}", param="tool_choice")
    function = given.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or set(given) - {"type", "function"}:
        raise ApiError(400, f"{_CHOICES}, got {shown(given)}", param="tool_choice")
    if name not in names:
        raise _wrong(
            "tool_choice.function.name", f"is none of the tools: {shown(name)} ({', '.join(names)})"
        )
    return "named", name
