"""Finds which messages a chat template renders, and rewrites conversations to fit it.

A template may refuse a second system message, drop a role that it does not know, or have no place
for tools. `fit_messages` merges, renames and moves such messages in ways that depend on the
messages before them alone: the tokens of earlier turns stay the same from turn to turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from radixserve.errors import InvalidRequest
from radixserve.text.chat_options import KNOWN_ROLES
from radixserve.text.content_marks import THINK_TAGS, unmarked
from radixserve.text.picture_parts import as_parts, has_pictures, is_picture_part
from radixserve.text.tainted_str import ASSISTANT, concatenated, tainted

Message = dict[str, Any]
Render = Callable[..., str]  # (messages, *, tools=None); raises InvalidRequest
# Tags of the generic form, for templates that do not render tools. The forms of models that have
# one are in server/answer/tool_styles.py.
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
LISTED_CALLS = "<|tool_call|>"  # of Granite 3, before a list of calls as JSON
_GENERIC_TOOLS = (
    "You may call functions. Their descriptions, each as JSON in a line:\n<tools>\n{tools}\n"
    "</tools>\nTo call one, write its name and its arguments as JSON between tags, and stop after "
    'your calls:\n<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>\n'
    "The results come between <tool_response> and </tool_response>."
)
_WORDS = ("quorzel", "vimbrat", "yestrok")  # sample texts to test a template
_CALL_ID = "abcdefghi"  # nine letters: the only form that some templates take


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Which messages a chat template renders.

    has_system           a system message at the beginning
    has_many_systems     several system messages at the beginning
    has_later_systems    system messages after other messages, in their place
    has_developer        developer messages, under a role of their own
    has_both             a system message followed by a developer message
    has_user_runs        two user messages in a row
    has_calls            tool calls of the assistant, and their results, also without tools
    has_listed_calls     no tool calls, but results, and tools with LISTED_CALLS before their calls
    has_tools            descriptions of tools, calls or listed calls, and results
    thought_tags         tags that the template knows in an assistant's content, where it has no
                         place for reasoning_content; None: reasoning needs no tags
    """

    has_system: bool = True
    has_many_systems: bool = True
    has_later_systems: bool = True
    has_developer: bool = True
    has_both: bool = True
    has_user_runs: bool = True
    has_calls: bool = True
    has_listed_calls: bool = False
    has_tools: bool = True
    thought_tags: tuple[str, str] | None = None

    @classmethod
    def of(cls, template: str, render: Render) -> TemplateTraits:
        """Returns the traits of a template, tested by about ten renderings of short
        conversations."""
        first, second, third = _WORDS
        user = _said("user", second)
        shows = partial(_shows, render)
        if not shows([user], (second,)):
            return cls()  # rendering the conversation itself will raise the template's error
        middle = [_said("user", third), _said("assistant", "-"), _said("system", first), user]
        has_calls, has_calls_with_tools = (
            any(
                shows([user, _called(first, i), _result(third, i)], (second, first, third), tools)
                for i in (_CALL_ID, f"functions.{first}:0")  # a template may render ids alone
            )
            for tools in (None, [_tool("f")])  # or calls only beside tools
        )
        shows_tools = _shows_tool(render, user, first)
        has_listed_calls = (
            not has_calls_with_tools
            and shows_tools
            and LISTED_CALLS in template
            and shows(
                [user, _said("assistant", first), _result(third, _CALL_ID)], (second, first, third)
            )
        )
        pair = [_said("system", first), _said("developer", third), user]
        return cls(
            has_system=shows([_said("system", first), user], (first, second)),
            has_many_systems=shows(
                [_said("system", first), _said("system", third), user], (first, third, second)
            ),
            has_later_systems=shows(middle, (third, first, second))
            and shows([middle[0], middle[2]], (third, first)),
            has_developer="developer" in template
            and shows([_said("developer", first), user], (first, second)),
            has_both=shows(pair, (first, third, second)),
            has_user_runs=shows([_said("user", first), user], (first, second)),
            has_calls=has_calls,
            has_listed_calls=has_listed_calls,
            has_tools=(has_calls_with_tools or has_listed_calls) and shows_tools,
            thought_tags=_thought_tags(template, shows, user),
        )


def fit_messages(
    messages: Sequence[Mapping[str, Any]],
    traits: TemplateTraits,
    generic_tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    shows_tools: bool = False,
) -> list[Message]:
    """Returns the messages, rewritten for a template with these traits. `shows_tools`: the template
    gets tools.

    - `developer` becomes `system` where the template has no role for it.
    - System messages at the beginning are merged where it takes one; where it takes none, their
      text begins the first message of the user.
    - Later ones become messages of the user where the template takes them at the beginning only.
    - `generic_tools`, functions as JSON, are described in the system message; then, and where the
      template does not render calls, calls and results are text. Where it has listed calls, these
      are text in that form, and results stay messages of the role tool.
    - Reasoning begins the content, between tags, where the template knows it only there.
    """
    said = [dict(message) for message in messages]
    if traits.thought_tags is not None:
        said = [_with_thought_as_text(message, *traits.thought_tags) for message in said]
    shows_calls = traits.has_calls or (shows_tools and traits.has_tools)
    if generic_tools is not None or not (shows_calls or traits.has_listed_calls):
        said = [_with_calls_as_text(message) for message in said]
    elif traits.has_listed_calls:
        said = [_with_listed_calls(message) for message in said]
    if not traits.has_developer:
        said = [
            {**message, "role": "system"} if message["role"] == "developer" else message
            for message in said
        ]
    others = (index for index, message in enumerate(said) if not _is_system(message))
    count = next(others, len(said))
    head, rest = said[:count], said[count:]
    if generic_tools is not None:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in generic_tools)
        head.append(_said("system", _GENERIC_TOOLS.format(tools=lines)))
        head = [_merged(head, head[0]["role"])]
    roles = {message["role"] for message in head}
    if len(head) > 1 and not (traits.has_both if len(roles) > 1 else traits.has_many_systems):
        head = [_merged(head, head[0]["role"] if len(roles) == 1 else "system")]
    if not traits.has_later_systems:
        rest = [{**message, "role": "user"} if _is_system(message) else message for message in rest]
    if head and not traits.has_system and head[0]["role"] == "system":
        head, rest = [], [_said("user", _merged(head, "user")["content"]), *rest]
        if len(rest) > 1 and rest[1]["role"] == "user":
            rest[:2] = [_merged(rest[:2], "user")]
    if not traits.has_user_runs:
        rest = _without_user_runs(rest)
    return [*head, *rest]


def check_rendered(messages: Sequence[Message], text: str, render: Render) -> None:
    """Check that each message's text stands in the rendered `text`. Raises InvalidRequest, whose
    `param` names the message.

    Texts that a template changes, such as an answer without its thoughts, are looked for by a
    rendering with another word in their place. O(text), and a rendering for each such message.
    """
    readable, position = unmarked(text), 0
    for index, message in enumerate(messages):
        content = message.get("content")
        wanted = content.strip() if isinstance(content, str) else ""
        is_known = message["role"] in KNOWN_ROLES
        if not wanted or (message["role"] == "assistant" and message.get("tool_calls")):
            continue
        start = readable.find(wanted, position)
        start = readable.find(wanted) if start < 0 else start
        if start >= 0 and is_known:
            position = start
            continue
        if json.dumps(wanted, ensure_ascii=False)[1:-1] in readable and is_known:
            continue
        if not _is_rendered(messages, index, render):
            raise InvalidRequest(
                f"messages[{index}] has the role {message['role']!r}: the model's chat template "
                "leaves its text out",
                param=f"messages[{index}]",
            )


def _is_rendered(messages: Sequence[Message], index: int, render: Render) -> bool:
    word = _WORDS[0]
    probe = [*messages[:index], {**messages[index], "content": word}, *messages[index + 1 :]]
    try:
        return word in render(probe)
    except InvalidRequest:  # a template that reads the text
        return True


def _shows(
    render: Render,
    messages: Sequence[Message],
    words: Sequence[str],
    tools: Sequence[Message] | None = None,
) -> bool:
    """Whether the rendered messages have these words, in this order."""
    try:
        text = render(messages, tools=tools)
    except InvalidRequest:
        return False
    places = [text.find(word) for word in words]
    return places[0] >= 0 and places == sorted(places) and len(set(places)) == len(places)


def _shows_tool(render: Render, user: Message, name: str) -> bool:
    try:
        return name in render([user], tools=[_tool(name)])
    except InvalidRequest:
        return False


def _tool(name: str) -> Message:
    parameters = {"type": "object", "properties": {}}
    function = {"name": name, "description": "-", "parameters": parameters}
    return {"type": "function", "function": function}


def _thought_tags(
    template: str, shows: Callable[..., bool], user: Message
) -> tuple[str, str] | None:
    """Returns Mistral's tags if the template renders reasoning in the content only, else None."""
    thought, question, answer = _WORDS
    opening, closing = THINK_TAGS
    words = (question, thought, answer)
    if opening not in template or shows(
        [user, {**_said("assistant", answer), "reasoning_content": thought}], words
    ):
        return None
    in_content = _said("assistant", f"{opening}{thought}{closing}{answer}")
    return THINK_TAGS if shows([user, in_content], words) else None


def _with_thought_as_text(message: Message, opening: str, closing: str) -> Message:
    thought = message.get("reasoning_content")
    if message["role"] != "assistant" or not thought:
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {**rest, "content": f"{opening}{thought}{closing}{_text_of(message)}"}


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _called(name: str, call_id: str) -> Message:
    function = {"name": name, "arguments": {}}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(content: str, call_id: str) -> Message:
    return {"role": "tool", "content": content, "name": "f", "tool_call_id": call_id}


def _merged(messages: Sequence[Message], role: str) -> Message:
    """Returns one message with the texts of several, separated by empty lines."""
    if any(has_pictures(message.get("content")) for message in messages):
        parts = [as_parts(message.get("content")) for message in messages]
        return {**messages[0], "role": role, "content": _joined(parts, "\n\n")}
    texts = [_text_of(message) for message in messages]
    return {**messages[0], "role": role, "content": "\n\n".join(text for text in texts if text)}


def _joined(contents: Sequence[list[Message]], separator: str) -> list[Message]:
    """Returns the parts of several messages as those of one."""
    joined: list[Message] = []
    for parts in filter(None, contents):
        joined += [*([{"type": "text", "text": separator}] if joined else []), *parts]
    return joined


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if not is_picture_part(part))


def _without_user_runs(messages: Sequence[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"] == "user":
            merged[-1] = _merged([merged[-1], message], "user")
        else:
            merged.append(message)
    return merged


def _with_calls_as_text(message: Message) -> Message:
    """Returns a message with its tool calls, or its tool result, as text in the generic form."""
    if message["role"] == "tool":
        opening, closing = "<tool_response>\n", "\n</tool_response>"
        if has_pictures(message["content"]):
            parts = [*as_parts(opening), *message["content"], *as_parts(closing)]
            return {"role": "user", "content": parts}
        return _said("user", f"{opening}{_text_of(message)}{closing}")
    texts = [_text_of(message)] if _text_of(message) else []
    calls = [f"{TOOL_CALL}\n{call}\n{TOOL_CALL_END}" for call in _calls_as_json(message)]
    return _without_calls(message, "\n".join(texts + calls)) if calls else message


def _with_listed_calls(message: Message) -> Message:
    """Returns a message with its tool calls as text: a list after a mark, which is as much the
    template's own as if the template wrote it."""
    calls = ", ".join(_calls_as_json(message))
    if not calls:
        return message
    text, listed = (tainted(said, ASSISTANT) for said in (_text_of(message), f"[{calls}]"))
    return _without_calls(message, concatenated((text, LISTED_CALLS, listed)))


def _without_calls(message: Message, content: str) -> Message:
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": content}


def _calls_as_json(message: Message) -> list[str]:
    texts = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        name, arguments = json.dumps(function.get("name")), function.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        texts.append(f'{{"name": {name}, "arguments": {arguments}}}')
    return texts
