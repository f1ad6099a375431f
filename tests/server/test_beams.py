"""Beam search over HTTP gives the answers of `Runtime.beam_search`."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from tests.server.local_server import LocalServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = ["The json module", "To read a file"]
HI = [{"role": "user", "content": "How do I sort a list?"}]
SHAPES: list[dict[str, Any]] = [
    {"length_penalty": 1.0},
    {"length_penalty": 0.3, "early_stopping": True, "repetition_penalty": 1.2},
    {"length_penalty": 2.0, "early_stopping": "never", "stop": ["."]},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_completions(served: LocalServer, runtime: Runtime, shape: dict[str, Any]) -> None:
    expected = runtime.beam_search(PROMPTS, 3, max_tokens=8, logprobs=2, **shape)
    body = {"prompt": PROMPTS, "use_beam_search": True, "n": 3, "max_tokens": 8, "logprobs": 2,
            "return_token_ids": True, "return_tokens_as_token_ids": True, "seed": 7,
            "cache_salt": str(shape), **shape}  # fmt: skip
    answer = served.post(COMPLETIONS, body)
    flat = [completion for group in expected for completion in group]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for choice, completion in zip(answer["choices"], flat, strict=True):
        assert choice["text"] == completion.text
        assert choice["token_ids"] == completion.token_ids
        assert choice["score"] == pytest.approx(completion.score, abs=1e-4)
        assert choice["finish_reason"] == completion.finish_reason
        values = choice["logprobs"]["token_logprobs"]
        assert values == pytest.approx(completion.logprobs, abs=1e-4)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(group[0].usage.prompt_tokens for group in expected)
    assert usage["completion_tokens"] == sum(len(c.token_ids) for c in flat)
    events = served.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    streamed = {event["choices"][0]["index"]: event["choices"][0] for event in events[:-1]}
    assert [streamed[index]["text"] for index in range(6)] == [c.text for c in flat]
    assert events[-1]["usage"]["completion_tokens"] == usage["completion_tokens"]
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_chats(served: LocalServer, runtime: Runtime) -> None:
    expected = runtime.beam_search(HI, 2, max_tokens=6)
    body = {"messages": HI, "use_beam_search": True, "n": 2, "max_tokens": 6}
    answer = served.post(CHAT, body)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [completion.text for completion in expected]
    assert [choice["score"] for choice in answer["choices"]] == pytest.approx(
        [completion.score for completion in expected], abs=1e-4
    )
    sessions = runtime.cache_stats()["sessions"]
    streamed = ["", ""]
    for event in served.stream(CHAT, {**body, "session_id": "beams"}):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert streamed == texts
    assert served.client.delete("/v1/sessions/beams").status_code == 200
    assert runtime.cache_stats()["sessions"] <= sessions


def test_fewer_answers_than_beams(served: LocalServer) -> None:
    form = {"structured_outputs": {"choice": ["left", "right"]}}
    body = {"prompt": "Go", "use_beam_search": True, "n": 4, "max_tokens": 20, **form}
    whole = served.post(COMPLETIONS, body)
    assert {choice["text"] for choice in whole["choices"]} <= {"left", "right"}
    events = served.stream(COMPLETIONS, body)
    assert [e["choices"][0]["text"] for e in events] == [c["text"] for c in whole["choices"]]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_beams_count_as_requests(runtime: Runtime) -> None:
    with LocalServer(runtime, max_queued_requests=8, max_n=8) as served:
        body = {"prompt": PROMPTS, "use_beam_search": True, "n": 5, "max_tokens": 2}
        answer = served.client.post(COMPLETIONS, json=body)
        assert answer.status_code == 400
        assert "10 requests" in answer.json()["error"]["message"]
        assert served.client.post(COMPLETIONS, json={**body, "n": 4}).status_code == 200
