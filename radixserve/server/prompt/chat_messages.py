"""Checks a chat's messages in OpenAI's format and converts them for chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.picture import Picture, PromptPictures
from radixserve.server.answer.tool_parsers.base import read_json
from radixserve.server.wire.errors import INVALID_IMAGE, ApiError, wrong_field
from radixserve.text.picture_parts import check_picture_role, has_pictures, is_picture_part
from radixserve.text.prompts import ROLE
from radixserve.text.template_traits import Message
from radixserve.text.tool_functions import is_deep

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_TEXT_MEMBERS = {  # besides the content
    "assistant": ("name", "reasoning_content", "reasoning"),
    "tool": ("name", "tool_call_id"),
}
_MAX_CALLS = 1_024  # of one message


def read_messages(
    given: object, pictures: PromptPictures | None = None, no_pictures: str = ""
) -> list[Message]:
    """Check a list of messages. Returns them with their contents as one text each, those with
    pictures as parts, and the arguments of their calls as objects.

    pictures: reads them; None: they are refused, for the reason `no_pictures`. Raises ApiError,
    which names the wrong place.
    """
    reader = _ContentReader(pictures, no_pictures)
    if not isinstance(given, list) or not given:
        raise ApiError(
            400, f"messages must be a list with a message, got {shown(given)}", param="messages"
        )
    call_ids: set[str] = set()
    checked = []
    for index, item in enumerate(given):
        message = _checked(item, f"messages[{index}]", reader)
        call_ids.update(call["id"] for call in message.get("tool_calls", ()))
        call_id = message.get("tool_call_id")
        if call_id is not None and call_id not in call_ids:
            raise wrong_field(
                f"messages[{index}].tool_call_id",
                f"does not name a call of an earlier message: {shown(call_id)}",
            )
        checked.append(message)
    reader.decode()
    return checked


def answer_key(content: str, calls: Sequence[tuple[str, str]] = ()) -> str:
    """A key for an answer, by which a later turn recognises it. `calls`: (name, arguments as JSON);
    the key does not depend on white space in them."""
    if not calls:
        return content
    read = [[name, json.loads(arguments)] for name, arguments in calls]
    return json.dumps([content.strip(), read])


def key_of(message: Message) -> str:
    """`answer_key` of an assistant's message."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(function["name"], json.dumps(function["arguments"])) for function in functions]
    return answer_key(message["content"], calls)


def call_message(call_id: str, name: str, arguments: Any) -> Message:
    """A tool call in the format that templates take. `arguments`: an object."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _checked(message: object, where: str, reader: _ContentReader) -> Message:
    if not isinstance(message, Mapping):
        raise wrong_field(where, f"must be an object, got {shown(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise wrong_field(
            f"{where}.role", f"must be 1 to 64 letters, digits, _ and -, got {shown(role)}"
        )
    given = {name: value for name, value in message.items() if value is not None}
    checked: Message = {"role": role}
    is_answer = role == "assistant"
    calls = _calls(given.get("tool_calls", []), f"{where}.tool_calls") if is_answer else []
    content = given.get("content")
    if is_answer and not content:  # an answer of reasoning or calls alone, a refusal, or nothing
        content = given.get("refusal", "")
    if not reader.read_into(checked, content, f"{where}.content"):
        checked["content"] = _text(
            content, f"{where}.content", may_be_empty=is_answer or role == "tool"
        )
    if calls:
        checked["tool_calls"] = calls
    for name in _TEXT_MEMBERS.get(role, ("name",)):
        value = given.get(name)
        if value is None and name != "tool_call_id":
            continue
        if not isinstance(value, str):
            raise wrong_field(f"{where}.{name}", f"must be a string, got {shown(value)}")
        checked["reasoning_content" if name == "reasoning" else name] = value
    return checked


class _ContentReader:
    """Reads the contents that have pictures, of the messages of one chat."""

    def __init__(self, pictures: PromptPictures | None, no_pictures: str) -> None:
        self._pictures, self._no_pictures = pictures, no_pictures
        self._opened: list[_Opened] = []

    def read_into(self, message: Message, content: object, where: str) -> bool:
        """Set a message's content. False, and nothing is done, if it has no pictures. Raises
        ApiError."""
        if not isinstance(content, list) or not has_pictures(content):
            return False
        parts: list[Message] = []
        for index, part in enumerate(content):
            place = f"{where}[{index}]"
            if is_picture_part(part):
                parts.append(self._picture(part, message["role"], place))
            elif isinstance(text := _text_of(part), str):
                parts.append({"type": "text", "text": text})
            else:
                raise wrong_field(place, f"must be a text or a picture, got {shown(part)}")
        message["content"] = parts
        return True

    def _picture(self, part: Message, role: str, place: str) -> Message:
        if self._pictures is None:
            kind = shown(part["type"])
            raise ApiError(
                400,
                f"{place}.type {kind} is not supported by this server here: {self._no_pictures}",
                param=f"{place}.type",
                code=INVALID_IMAGE,
            )
        entry: Message = {"type": "image"}
        with _at(place):
            check_picture_role(role)
            self._opened.append(_Opened(entry, place, self._pictures.open(part)))
        return entry

    def decode(self) -> None:
        """Decode the pictures of all contents. Raises ApiError."""
        for entry, place, decode in self._opened:
            with _at(place):
                entry["image"] = decode()


class _Opened(NamedTuple):
    """A picture that is not decoded yet."""

    entry: Message  # of a message's content
    place: str
    decode: Callable[[], Picture]


@contextmanager
def _at(place: str) -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        raise ApiError(400, str(error), param=place, code=INVALID_IMAGE) from None


def _text(content: object, where: str, *, may_be_empty: bool) -> str:
    """The content as one text. Parts are joined with a line break, as vLLM joins them for templates
    that take texts only. Raises ApiError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not (content or may_be_empty):
        raise wrong_field(where, f"must be text or a list of text parts, got {shown(content)}")
    for index, part in enumerate(content):
        if not isinstance(_text_of(part), str):
            raise wrong_field(
                f"{where}[{index}]", f'must be {{"type": "text", "text": ...}}, got {shown(part)}'
            )
    return joined_text(content)


def joined_text(parts: Sequence[Any]) -> str:
    """The texts of a message's parts as one, as the template gets it."""
    return "\n".join(map(_text_of, parts))


def _text_of(part: object) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return (
        part.get(_TEXT_PARTS[kind]) if isinstance(part, Mapping) and kind in _TEXT_PARTS else None
    )


def _calls(given: object, where: str) -> list[Message]:
    if not isinstance(given, list) or len(given) > _MAX_CALLS:
        raise wrong_field(
            where, f"must be a list of at most {_MAX_CALLS} calls, got {shown(given)}"
        )
    return [_call(item, f"{where}[{index}]") for index, item in enumerate(given)]


def _call(given: object, where: str) -> Message:
    """Check a tool call. Returns it with its arguments as an object. Raises ApiError."""
    if not isinstance(given, Mapping):
        raise wrong_field(where, f"must be an object, got {shown(given)}")
    kind = given.get("type", "function")
    if kind != "function":
        raise wrong_field(f"{where}.type", f"must be 'function', got {shown(kind)}")
    call_id, function = given.get("id"), given.get("function")
    if not isinstance(call_id, str) or not call_id:
        raise wrong_field(f"{where}.id", f"must be a non-empty string, got {shown(call_id)}")
    if not isinstance(function, Mapping):
        raise wrong_field(f"{where}.function", f"must be an object, got {shown(function)}")
    where = f"{where}.function"
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise wrong_field(f"{where}.name", f"must be a non-empty string, got {shown(name)}")
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
        raise wrong_field(where, f"must be the JSON text of an object, got {shown(given)}")
    return value
