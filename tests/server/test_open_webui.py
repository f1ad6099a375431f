"""The requests of Open WebUI 0.12.4, as its code makes them; `clients/open_webui.py` runs its own
server, by hand.

`routers/openai.py` sends the chat's messages with the model's parameters; `utils/misc.py` writes
what was answered before; `routers/tasks.py` asks for titles, tags and further questions.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve.server.turn.cache_use import session_id_of
from radixserve.server.wire.schema import ChatRequest
from tests.server.local_server import LocalServer

ASK = {"role": "user", "content": "How do I sort a list?"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "", "parameters": {"type": "object"}},
}
# What its settings of a chat become: `apply_model_params_to_body_openai`.
PARAMS: dict[str, Any] = {"temperature": 0.0, "top_p": 0.9, "min_p": 0.0, "max_tokens": 40,
                          "frequency_penalty": 0.0, "presence_penalty": 0.0, "seed": 42,
                          "reasoning_effort": "medium", "stop": ["###"], "top_k": 40}  # fmt: skip


def streamed(served: LocalServer, body: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The answer as Open WebUI adds it up, and the usage."""
    body = {"stream": True, "model": "demo", "stream_options": {"include_usage": True}, **body}
    headers = {"authorization": "Bearer none", "x-openwebui-chat-id": "chat-1"}
    text = served.client.post("/v1/chat/completions", json=body, headers=headers).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    answer: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            answer["content"] += delta.get("content") or ""
            answer["reasoning_content"] += delta.get("reasoning_content") or ""
            answer["tool_calls"] += delta.get("tool_calls") or []
    usages = [event["usage"] for event in events if event.get("usage")]
    return answer, usages[-1]


def test_a_chat_with_settings_and_its_title(served: LocalServer) -> None:
    models = served.client.get("/v1/models").json()["data"]
    assert models[0]["id"] == "demo"
    messages: list[Any] = [ASK]
    known = 0
    for turn in range(3):
        answer, usage = streamed(served, {"messages": messages, **PARAMS})
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        if turn:
            assert cached >= known - 1
        known = usage["total_tokens"]
        messages += [{"role": "assistant", "content": answer["content"]}, ASK]
    title = {"role": "user", "content": "### Task:\nGenerate a title.\n### Output: JSON"}
    body = {"model": "demo", "messages": [title], "stream": False, "max_tokens": 20}
    assert served.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]


def test_native_tools_go_on_where_the_thought_comes_back(calling: LocalServer) -> None:
    """A connection of the provider llama.cpp sends thoughts back; others leave them out, and the
    prompt then differs from what the model said."""
    for keeps in (True, False):
        messages: list[Any] = [{"role": "system", "content": f"keeps: {keeps}"}, ASK]
        first, usage = streamed(calling, {"messages": messages, "tools": [TOOL]})
        assert first["reasoning_content"] == "The sum is asked for."
        calls = [
            {key: call[key] for key in ("id", "type", "function")} for call in first["tool_calls"]
        ]
        thought = {"reasoning_content": first["reasoning_content"]} if keeps else {}
        messages += [
            {"role": "assistant", "content": first["content"], "tool_calls": calls, **thought},
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": "5"},
        ]
        second, more = streamed(calling, {"messages": messages, "tools": [TOOL]})
        assert second["tool_calls"]
        cached = more["prompt_tokens_details"]["cached_tokens"]
        assert (cached >= usage["total_tokens"] - 1) is keeps
        assert cached >= usage["prompt_tokens"]


def test_the_chat_names_the_session() -> None:
    """ENABLE_FORWARD_USER_INFO_HEADERS sends its id."""
    body = ChatRequest.model_validate({"messages": [ASK]})
    assert session_id_of(body, {"x-openwebui-chat-id": "chat-1"}) == "chat-1"


def test_an_answer_is_continued(served: LocalServer) -> None:
    """The button Continue, with the provider llama.cpp."""
    begun = {"role": "assistant", "content": "Call the"}
    fields = {"continue_final_message": True, "add_generation_prompt": False, "temperature": 0.0}
    answer, _ = streamed(served, {"messages": [ASK, begun], "max_tokens": 5, **fields})
    assert answer["content"]
    assert not answer["content"].startswith("Call the")
