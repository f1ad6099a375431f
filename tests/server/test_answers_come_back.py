"""The server takes back every kind of answer that it sends, on each protocol."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from tests.server.local_server import LocalServer

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASK = {"role": "user", "content": "Add 2 and 3."}
SCHEMA = {"type": "object", "properties": {}}
FUNCTION = {"name": "add", "parameters": SCHEMA}
# Of the scripted answer: nothing but a thought, a thought and a text, all of it.
LIMITS = (1, 3, 6, 100)


@pytest.fixture(scope="module")
def strict(calling: LocalServer) -> Any:
    """Of the same model; what it has sent is no field that it would have to skip."""
    runtime: Runtime = calling.server.runtime
    with LocalServer(runtime, strict_fields=True) as served:
        yield served


@pytest.mark.parametrize("limit", LIMITS)
def test_chats(strict: LocalServer, limit: int) -> None:
    body = {"tools": [{"type": "function", "function": FUNCTION}], "max_tokens": limit}
    first = strict.post(CHAT, {**body, "messages": [ASK]})
    message = first["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "5"}
        for call in message.get("tool_calls", [])
    ]
    assert bool(results) == (limit == 100)
    again = strict.post(CHAT, {**body, "messages": [ASK, message, *results, ASK]})
    assert again["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]


@pytest.mark.parametrize("member", ["annotations", "audio", "refusal", "function_call"])
def test_members_that_other_servers_send(calling: LocalServer, member: str) -> None:
    for value in (None, [] if member == "annotations" else None):
        message = {"role": "assistant", "content": None, member: value}
        calling.post(CHAT, {"messages": [ASK, message, ASK], "max_tokens": 1})
    for content in ("", [], [{"type": "text", "text": ""}], [{"type": "refusal", "refusal": "no"}]):
        message = {"role": "assistant", "content": content}
        calling.post(CHAT, {"messages": [ASK, message, ASK], "max_tokens": 1})


@pytest.mark.parametrize("limit", LIMITS)
def test_messages(strict: LocalServer, limit: int) -> None:
    tool = {"name": "add", "input_schema": SCHEMA}
    body = {"model": "demo", "tools": [tool], "max_tokens": limit}
    first = strict.post(MESSAGES, {**body, "messages": [ASK]})
    said = {"role": "assistant", "content": first["content"]}
    calls = [block for block in first["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "5"} for call in calls]
    assert bool(results) == (limit == 100)
    asked = {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]}
    again = strict.post(MESSAGES, {**body, "messages": [ASK, said, asked]})
    assert again["type"] == "message"


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("summary", [None, "auto"])
def test_responses(strict: LocalServer, limit: int, summary: str | None) -> None:
    body: dict[str, Any] = {"tools": [{"type": "function", **FUNCTION}], "max_output_tokens": limit}
    if summary is not None:
        body["reasoning"] = {"summary": summary}
    first = strict.post(RESPONSES, {**body, "input": [ASK]})
    thoughts = [item for item in first["output"] if item["type"] == "reasoning"]
    for item in thoughts:
        place, other = ("content", "summary") if summary is None else ("summary", "content")
        assert item[place][0]["text"]
        assert item[other] == []
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "5"}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    assert bool(results) == (limit == 100)
    again = strict.post(RESPONSES, {**body, "input": [ASK, *first["output"], *results, ASK]})
    if limit == 100:  # the thought came back, too: all of the answer is in the cache
        cached = again["usage"]["input_tokens_details"]["cached_tokens"]
        usage = first["usage"]
        assert cached >= usage["input_tokens"] + usage["output_tokens"] - 1
