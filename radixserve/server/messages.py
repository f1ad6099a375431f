"""The messages of a chat in OpenAI's format, checked, as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from radixserve.checks import shown
from radixserve.server.errors import ApiError
from radixserve.server.tool_parsers.calls import is_deep, read_json

Message = dict[str, Any]
_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = {
    "assistant": ("role", "content", "name", "tool_calls", "reasoning_content", "reasoning"),
    "tool": ("role", "content", "name", "tool_call_id"),
}
_PLAIN_FIELDS = ("role", "content", "name")
_MAX_CALLS = 1_024  # of one message


def read_messages(given: object) -> list[Message]:
    """Each with its content as one text and the arguments of its calls as objects. Raises ApiError,
    which names the place."""
    if not isinstance(given, list) or not given:
        raise ApiError(
            400, f"messages must be a list with a message, got {shown(given)}", param="messages"
        )
    call_ids: set[str] = set()
    found = []
    for at, one in enumerate(given):
        message = _checked(one, f"messages[{at}]")
        call_ids.update(call["id"] for call in message.get("tool_calls", ()))
        call_id = message.get("tool_call_id")
        if call_id is not None and call_id not in call_ids:
            raise _wrong(
                f"messages[{at}].tool_call_id",
                f"names no call of an earlier message: {shown(call_id)}",
            )
        found.append(message)
    return found


def answer_key(content: str, calls: Sequence[tuple[str, str]] = ()) -> str:
    """The same for answers that say the same: `calls` are (name, arguments as JSON)."""
    if not calls:
        return content
    read = [[name, json.loads(arguments)] for name, arguments in calls]
    return json.dumps([content.strip(), read])


def key_of(message: Message) -> str:
    """`answer_key` of an assistant's message."""
    calls = [one["function"] for one in message.get("tool_calls", ())]
    return answer_key(
        message["content"], [(one["name"], json.dumps(one["arguments"])) for one in calls]
    )


def call_message(call_id: str, name: str, arguments: Any) -> Message:
    """A call as templates take it: its arguments are an object."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _wrong(where: str, problem: str, code: str | None = None) -> ApiError:
    return ApiError(400, f"{where} {problem}", param=where, code=code)


def _checked(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise _wrong(where, f"must be an object, got {shown(message)}")
    role = message.get("role")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}, got {shown(role)}")
    fields = _FIELDS.get(str(role), _PLAIN_FIELDS)
    given = {name: value for name, value in message.items() if value is not None}
    for name in given:
        if name not in fields:
            raise _wrong(f"{where}.{name}", "is not supported by this server", "unsupported_field")
    found: Message = {"role": role}
    calls = _calls(given.get("tool_calls", []), f"{where}.tool_calls")
    content = given.get("content") or ("" if calls else given.get("content"))
    found["content"] = _text(content, f"{where}.content")
    if calls:
        found["tool_calls"] = calls
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        value = given.get(name)
        if value is None and not (name == "tool_call_id" and role == "tool"):
            continue
        if not isinstance(value, str):
            raise _wrong(f"{where}.{name}", f"must be a string, got {shown(value)}")
        found["reasoning_content" if name == "reasoning" else name] = value
    return found


def _text(content: object, where: str) -> str:
    """Parts are joined with a line break, as vLLM does for templates that know text only."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _wrong(where, f"must be text or a list of text parts, got {shown(content)}")
    texts = []
    for at, part in enumerate(content):
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        text = part.get("text") if is_text else None
        if not isinstance(text, str) or set(part) - {"type", "text", "cache_control"}:
            raise _wrong(
                f"{where}[{at}]", f'must be {{"type": "text", "text": ...}}, got {shown(part)}'
            )
        texts.append(text)
    return "\n".join(texts)


def _calls(given: object, where: str) -> list[Message]:
    if not isinstance(given, list) or len(given) > _MAX_CALLS:
        raise _wrong(where, f"must be a list of at most {_MAX_CALLS} calls, got {shown(given)}")
    return [_call(one, f"{where}[{at}]") for at, one in enumerate(given)]


def _call(given: object, where: str) -> Message:
    """With its arguments as an object, which is what templates render."""
    if not isinstance(given, Mapping):
        raise _wrong(where, f"must be an object, got {shown(given)}")
    kind = given.get("type", "function")
    if kind != "function":
        raise _wrong(f"{where}.type", f"must be 'function', got {shown(kind)}")
    for name in given:
        if name not in ("id", "type", "function", "index"):
            raise _wrong(f"{where}.{name}", "is not supported by this server", "unsupported_field")
    call_id, function = given.get("id"), given.get("function")
    if not isinstance(call_id, str) or not call_id:
        raise _wrong(f"{where}.id", f"must be a non-empty string, got {shown(call_id)}")
    if not isinstance(function, Mapping):
        raise _wrong(f"{where}.function", f"must be an object, got {shown(function)}")
    where = f"{where}.function"
    for field in function:
        if field not in ("name", "arguments"):
            raise _wrong(f"{where}.{field}", "is not supported by this server", "unsupported_field")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _wrong(f"{where}.name", f"must be a non-empty string, got {shown(name)}")
    arguments = _arguments(function.get("arguments"), f"{where}.arguments")
    return call_message(call_id, name, arguments)


def _arguments(given: object, where: str) -> Any:
    value = given
    if isinstance(given, str):
        try:
            value = read_json(given) if given.strip() else {}
        except ValueError:
            value = None
    if not isinstance(value, dict) or is_deep(value):
        raise _wrong(where, f"must be the JSON text of an object, got {shown(given)}")
    return value
