"""What agents' programs look for: words of an overflow, headers, the names of sessions."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from tests.server.local_server import LocalServer

LONG = "word " * 5_000  # the demo model has 4,096 positions
HI = [{"role": "user", "content": "hi"}]


def error_of(served: LocalServer, path: str, body: dict[str, Any]) -> Any:
    answer = served.client.post(path, json=body)
    assert answer.status_code == 400
    return answer.json()["error"]


def test_an_overflow_is_told_in_the_words_of_each_protocol(served: LocalServer) -> None:
    messages = [{"role": "user", "content": LONG}]
    for path, body, param in (
        ("/v1/chat/completions", {"messages": messages}, "messages"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/responses", {"input": LONG}, "input"),
    ):
        error = error_of(served, path, body)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "maximum context length is 4096 tokens" in error["message"]
    body = {"model": "demo", "max_tokens": 4, "messages": messages}
    message = error_of(served, "/v1/messages", body)["message"]
    num_tokens = int(message.removeprefix("prompt is too long: ").partition(" ")[0])
    assert message == f"prompt is too long: {num_tokens} tokens > 4095 maximum"
    assert 4_500 < num_tokens < 5_500  # a text that cannot fit is not tokenised to its end


def test_max_tokens_beyond_the_context_are_said_in_a_header(served: LocalServer) -> None:
    body = {"model": "demo", "messages": HI, "stop_sequences": ["e"], "max_tokens": 50_000}
    answer = served.client.post("/v1/messages", json=body)
    usage = answer.json()["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert answer.headers["x-radixserve-max-tokens"] == str(4096 - num_prompt)
    answer = served.client.post("/v1/messages", json={**body, "max_tokens": 4})
    assert "x-radixserve-max-tokens" not in answer.headers


def test_a_stream_has_no_usage_where_it_is_not_wanted(served: LocalServer) -> None:
    body = {"messages": HI, "max_tokens": 3}
    for options, expected in (({"include_usage": False}, 0), ({}, 0), ({"include_usage": True}, 1)):
        events = served.stream("/v1/chat/completions", {**body, "stream_options": options})
        assert sum(event.get("usage") is not None for event in events) == expected, options
    events = served.stream("/v1/chat/completions", body)
    assert [event.get("usage") is not None for event in events] == [False] * (len(events) - 1) + [
        True
    ]


@pytest.mark.parametrize(
    ("path", "fields", "headers"),
    [
        ("/v1/chat/completions", {"messages": HI, "session_id": "s-0"}, {"session-id": "other"}),
        ("/v1/chat/completions", {"messages": HI, "prompt_cache_key": "s-0"}, {}),
        ("/v1/responses", {"input": "hi"}, {"session-id": "s-0"}),
        ("/v1/messages", {"model": "demo", "messages": HI, "metadata": {"user_id": "other"}},
         {"x-claude-code-session-id": "s-0"}),
        ("/v1/messages", {"model": "demo", "messages": HI,
                          "metadata": {"user_id": "user_1_account_2_session_s-0"}}, {}),
        ("/v1/messages", {"model": "demo", "messages": HI,
                          "metadata": {"user_id": '{"session_id": "s-0"}'}}, {}),
    ],
)  # fmt: skip
def test_sessions_have_the_names_that_clients_send(
    served: LocalServer, path: str, fields: dict[str, Any], headers: dict[str, str]
) -> None:
    limit = "max_output_tokens" if "input" in fields else "max_tokens"
    served.post(path, {**fields, limit: 1}, headers=headers)
    closed = served.client.delete("/v1/sessions/s-0")
    assert closed.status_code == 200, closed.text
    assert served.client.delete("/v1/sessions/s-0").status_code == 404


def test_a_model_has_several_names_or_any(runtime: Runtime) -> None:
    asked = {"messages": HI, "max_tokens": 1}
    with LocalServer(runtime, served_model_name=["large", "small"]) as served:
        cards = served.client.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["large", "small"]
        for name in ("large", "small"):
            answer = served.post("/v1/chat/completions", {**asked, "model": name})
            assert answer["model"] == "large"
        answer = served.client.post("/v1/chat/completions", json={**asked, "model": "huge"})
        assert answer.status_code == 404
    with LocalServer(runtime, accept_any_model=True) as served:
        served.post("/v1/chat/completions", {**asked, "model": "huge"})
