"""The usage in the events of streams: where it is asked for, and where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from tests.server.local_server import LocalServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ALWAYS = {"include_usage": True, "continuous_usage_stats": True}


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"prompt": "Some text"}
    if path == CHAT:
        asked = {"messages": [{"role": "user", "content": "Some text"}]}
    return {**asked, "max_tokens": 5, "ignore_eos": True, "temperature": 0, **fields}


@pytest.fixture(scope="module")
def forced(runtime: Runtime) -> Iterator[LocalServer]:
    with LocalServer(runtime, enable_force_include_usage=True) as served:
        yield served


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"include_usage": None},
        {"include_usage": False, "continuous_usage_stats": False},
        {"include_usage": False, "continuous_usage_stats": True},
        {"continuous_usage_stats": True},
    ],
)
def test_none_where_options_do_not_ask_for_it(
    served: LocalServer, path: str, options: dict[str, Any]
) -> None:
    events = served.stream(path, body_of(path, stream_options=options))
    assert not any(event.get("usage") for event in events)
    answer = served.client.post(path, json=body_of(path, stream_options=options))
    assert answer.json()["error"]["param"] == "stream_options"  # without a stream


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_in_one_event_of_its_own(served: LocalServer, path: str) -> None:
    events = served.stream(path, body_of(path, stream_options={"include_usage": True}))
    *others, last = events
    assert not any(event.get("usage") for event in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_in_every_event(served: LocalServer, forced: LocalServer, path: str) -> None:
    for server, fields in ((served, {"stream_options": ALWAYS}), (forced, {})):
        for options in ({}, {"n": 2, "seed": 1, "temperature": 1.0}):
            body = body_of(path, **fields, **options)
            server.post(path, body_of(path, max_tokens=1))  # now its prompt is cached
            *events, last = server.stream(path, body)
            counts: dict[int, list[int]] = {}
            for event in events:
                (choice,), usage = event["choices"], event["usage"]
                counts.setdefault(choice["index"], []).append(usage["completion_tokens"])
                assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
                assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
                # All but the last token of the prompt, and all of it for further samples.
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert cached >= usage["prompt_tokens"] - 1
            for of_choice in counts.values():
                assert of_choice == sorted(set(of_choice))  # more in each event
                assert of_choice[-1] == 5
                assert (of_choice[0] == 0) == (path == CHAT)  # the event of the role
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == 5 * len(counts)


def test_tokens_of_reasoning_are_in_the_usage_of_chats(calling: LocalServer) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": "What is 2 and 3?"}]
    body = {"messages": messages, "tools": [tool], "max_tokens": 200}
    for hidden in ({}, {"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        whole = calling.post(CHAT, {**body, **hidden})
        events = calling.stream(CHAT, {**body, **hidden})
        for usage in (whole["usage"], events[-1]["usage"]):
            assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}
        message = whole["choices"][0]["message"]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        for name in ("reasoning", "reasoning_content"):
            text = "".join(delta.get(name, "") for delta in deltas)
            assert message.get(name, "") == text == ("" if hidden else "The sum is asked for.")
        assert message["content"] == "Let me add them."
        assert len(message["tool_calls"]) == 1
