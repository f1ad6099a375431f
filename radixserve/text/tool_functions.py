"""Checks and normalises the tools of a chat, for the library and the server.

This is the input side: the functions that a model may call. The forms in which models write calls
are listed in server/answer/tool_styles.py (`STYLES`), their parsers are in
server/answer/tool_parsers/. A new form is added there.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from radixserve.checks import MAX_NESTING, shown
from radixserve.errors import InvalidRequest

MAX_TOOLS = 1_024
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_MEMBERS = ("name", "description", "parameters", "return")  # what a template may render


def read_tools(
    tools: object, where: str = "tools", *, function_member: str = ".function"
) -> tuple[dict[str, Any], ...]:
    """Returns checked copies of the tools, each {"type": "function", "function": {"name", ...}}, or
    its function alone if it was given so: templates get it in the given form.

    Members that no template renders, such as "strict", are left out. `where` names the list in
    errors; `function_member` names a tool's function, "" for protocols whose tools are flat. Raises
    InvalidRequest, whose `param` is the place, such as "tools[1].function.parameters.required".
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes) or len(tools) > MAX_TOOLS:
        raise _wrong(where, f"must be a list of at most {MAX_TOOLS} tools, got {shown(tools)}")
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        function, place = _function_of(tool, f"{where}[{index}]", function_member)
        checked = check_function(function, place)
        if checked["name"] in functions:
            raise _wrong(f"{place}.name", f"{checked['name']!r} is there twice")
        functions[checked["name"]] = checked
    return tuple(
        {"type": "function", "function": function} if "function" in tool else function
        for tool, function in zip(tools, functions.values(), strict=True)
    )


def check_function(
    function: Mapping[str, Any], where: str, *, schema_name: str = "parameters"
) -> dict[str, Any]:
    """Returns a copy of a function's description, with the members that templates render.
    `schema_name`: the name of its parameters in errors. Raises InvalidRequest."""
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(
            f"{where}.name", f"must be 1 to 128 letters, digits, _, -, . and :, got {shown(name)}"
        )
    for member, kind, what in (("description", str, "a string"), ("strict", bool, "a boolean")):
        value = function.get(member)
        if value is not None and not isinstance(value, kind):
            raise _wrong(f"{where}.{member}", f"must be {what}, got {shown(value)}")
    if function.get("parameters") is not None:
        _check_parameters(function["parameters"], f"{where}.{schema_name}")
    kept = {member: function[member] for member in function if member in _MEMBERS}
    return copy.deepcopy({member: value for member, value in kept.items() if value is not None})


def is_deep(value: Any) -> bool:
    """Whether objects and lists are nested more than MAX_NESTING deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_NESTING):
        members = [node.values() if isinstance(node, dict) else node for node in level]
        level = [node for nodes in members for node in nodes if isinstance(node, dict | list)]
    return bool(level)


def _function_of(tool: object, where: str, function_member: str) -> tuple[Mapping[str, Any], str]:
    """Returns a tool's function, and its place for errors."""
    if not isinstance(tool, Mapping):
        raise _wrong(where, f"must be an object, got {shown(tool)}")
    is_wrapped = "function" in tool or "name" not in tool
    if is_wrapped or "type" in tool:
        kind = tool.get("type", "function" if "function" in tool else None)
        if kind != "function":
            raise _wrong(f"{where}.type", f"must be 'function', got {shown(kind)}")
    if not is_wrapped:
        return tool, where
    where += function_member
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _wrong(where, f"must be an object, got {shown(function)}")
    return function, where


def _check_parameters(schema: object, where: str) -> None:
    """Check the JSON schema of a function's arguments, as far as templates read it."""
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
    for name, subschema in properties.items():
        if not isinstance(name, str) or not isinstance(subschema, Mapping | bool):
            place = f"{where}.properties.{name}"
            raise _wrong(place, f"must be a JSON schema, got {shown(subschema)}")
    required = schema.get("required", [])
    is_list = isinstance(required, list | tuple)
    is_names = is_list and all(isinstance(name, str) for name in required)
    if not is_names:
        raise _wrong(f"{where}.required", f"must be a list of names, got {shown(required)}")
    unknown = [name for name in required if name not in properties]
    if unknown and properties:
        raise _wrong(f"{where}.required", f"names what properties lacks: {', '.join(unknown)}")


def _wrong(where: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {problem}", param=where)
