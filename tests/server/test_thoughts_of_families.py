"""Thoughts and calls in the forms of Gemma 4, Ministral and LFM2: in each protocol, whole and
streamed, and back in the history without a token computed again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from tests.server.local_server import LocalServer
from tests.server.scripted_model import TEMPLATE, make_scripted
from tests.server.test_messages import events_of, message_of

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
THOUGHT, TEXT, ARGUMENTS = "The sum is asked for.", "Let me add them.", {"a": 2, "b": 3}
ADD = {
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
USER = {"role": "user", "content": "What is 2 + 3?"}
_SAID = ["Let me", " add", " them."]
_CALLS = TEMPLATE[TEMPLATE.index("<tool_call>") : TEMPLATE.index("</tool_call>") + 12]
_REASONING = "<think>{{ message.reasoning_content }}</think>"


class Family(NamedTuple):
    """answer, special   pieces of an answer, and which of them are special tokens
    reasoning, calls  what its template renders in place of the scripted model's"""

    answer: list[str]
    special: list[str]
    reasoning: str
    calls: str
    parsers: tuple[str, str]

    @property
    def template(self) -> str:
        assert TEMPLATE.count(_REASONING) == TEMPLATE.count(_CALLS) == 1
        return TEMPLATE.replace(_REASONING, self.reasoning).replace(_CALLS, self.calls)


FAMILIES = {
    "gemma4": Family(
        ["<|channel>", "thought\n", "The sum", " is asked for.", "<channel|>", *_SAID,
         "<|tool_call>", "call:add{", "b:  3,", "a:2 }", "<tool_call|>"],
        ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"],
        "<|channel>thought\n{{ message.reasoning_content }}\n<channel|>",
        "<|tool_call>call:{{ call.function.name }}{% raw %}{{% endraw %}"
        "{%- for key, value in call.function.arguments | dictsort %}{{ key }}:{{ value }}"
        "{{ ',' if not loop.last }}{%- endfor %}}<tool_call|>",
        ("gemma4", "gemma4"),
    ),
    "ministral": Family(
        ["[THINK]", "The sum", " is asked for.", "[/THINK]", *_SAID,
         "[TOOL_CALLS]", "add", "[ARGS]", '{"a":2,  "b":', "   3}"],
        ["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"],
        # Its template knows blocks of a content, and no field for thoughts.
        "{% if message.content is not string %}{% for block in message.content %}"
        "[THINK]{{ block.thinking }}[/THINK]{% endfor %}{% endif %}",
        "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}",
        ("mistral-args", "mistral"),
    ),
    "lfm2": Family(
        ["<think>", "The sum", " is asked for.", "</think>", *_SAID,
         "<|tool_call_start|>", "[add(a", " = 2", ",b=3 )]", "<|tool_call_end|>"],
        ["<|tool_call_start|>", "<|tool_call_end|>"],
        _REASONING,
        "<|tool_call_start|>[{{ call.function.name }}("
        "{%- for key, value in call.function.arguments.items() %}{{ key }}={{ value }}"
        "{{ '' if loop.last else ', ' }}{%- endfor %})]<|tool_call_end|>",
        ("lfm2", "think"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(family: str, tmp_path_factory: Any) -> Iterator[LocalServer]:
    made = FAMILIES[family]
    folder = make_scripted(
        tmp_path_factory.mktemp(family), made.answer, template=made.template, special=made.special
    )
    with Runtime(str(folder), num_pages=4096) as runtime, LocalServer(runtime) as local:
        yield local


def test_the_template_shows_both_parsers(served: LocalServer, family: str) -> None:
    configs = served.server.parser_configs
    tools, thoughts = FAMILIES[family].parsers
    assert configs.tool_parser == tools
    assert configs.thoughts is not None
    assert configs.thoughts.opening == FAMILIES[family].answer[0]
    assert thoughts in ("think", family, "mistral")


@pytest.mark.parametrize("streams", [False, True])
def test_a_chat_of_six_turns_computes_only_what_is_new(served: LocalServer, streams: bool) -> None:
    messages: list[Any] = [USER]
    known, new_tokens = 0, set()
    for turn in range(6):
        body = {"messages": messages, "tools": [{"type": "function", "function": ADD}],
                "temperature": 0, "cache_salt": f"chat {streams}"}  # fmt: skip
        if streams:
            events = served.stream(CHAT, {**body, "stream_options": {"include_usage": True}})
            message, usage = joined(events), events[-1]["usage"]
        else:
            answer = served.post(CHAT, body)
            message, usage = answer["choices"][0]["message"], answer["usage"]
            assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert message["reasoning_content"] == THOUGHT
        assert message["content"] == TEXT
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == ARGUMENTS
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == max(0, known - 1)  # all but the last token that was sampled
        if turn:
            new_tokens.add(usage["prompt_tokens"] - cached)
        known = usage["prompt_tokens"] + usage["completion_tokens"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": f"{turn}"}
        messages += [{"role": "assistant", **message}, result]
    assert len(new_tokens) == 1


def joined(events: list[Any]) -> dict[str, Any]:
    """The message that the deltas of a stream add up to."""
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    reasoning = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
    return {
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "reasoning_content": "".join(reasoning),
        "tool_calls": [
            {key: call[key] for key in ("id", "type", "function")}
            for delta in deltas
            for call in delta.get("tool_calls", [])
        ],
    }


@pytest.mark.parametrize("streams", [False, True])
def test_messages_have_blocks(served: LocalServer, streams: bool) -> None:
    tool = {"name": "add", "description": "adds", "input_schema": ADD["parameters"]}
    fields = {"tools": [tool], "cache_salt": f"messages {streams}"}
    messages: list[Any] = [USER]
    known = 0
    for _ in range(3):
        if streams:
            answer = message_of(events_of(served, messages, **fields))
        else:
            body = {"model": "demo", "max_tokens": 100, "temperature": 0, "messages": messages}
            answer = served.post(MESSAGES, {**body, **fields})
        thinking, text, use = answer["content"]
        assert (thinking["thinking"], text["text"], use["input"]) == (THOUGHT, TEXT, ARGUMENTS)
        usage = answer["usage"]
        assert usage["cache_read_input_tokens"] == max(0, known - 1)
        known = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"]
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "5"}
        messages += [{"role": "assistant", "content": answer["content"]},
                     {"role": "user", "content": [result]}]  # fmt: skip


def test_responses_have_items(served: LocalServer) -> None:
    items: list[Any] = [USER]
    known = 0
    for _ in range(3):
        body = {"model": "demo", "input": items, "tools": [{"type": "function", **ADD}],
                "temperature": 0, "cache_salt": "responses"}  # fmt: skip
        answer = served.post(RESPONSES, body)
        kinds = [item["type"] for item in answer["output"]]
        assert kinds == ["reasoning", "message", "function_call"]
        reasoning, message, call = answer["output"]
        assert reasoning["content"][0]["text"] == THOUGHT
        assert message["content"][0]["text"] == TEXT
        assert json.loads(call["arguments"]) == ARGUMENTS
        usage = answer["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == max(0, known - 1)
        known = usage["input_tokens"] + usage["output_tokens"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
        items += [*answer["output"], result]
