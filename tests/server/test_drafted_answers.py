"""Answers over HTTP with drafts beside those without: the same texts, calls, reasons and usage, in
whatever events their tokens come in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from radixserve.engine.extension import EngineExtension
from radixserve.output import Finish
from radixserve.request import Request
from tests.drafts.sources import ForcedSource, Memory
from tests.server import test_storm
from tests.server.clients.recorder import said
from tests.server.local_server import LocalServer

TEXT = "The json module reads and writes"
USER = [{"role": "user", "content": TEXT}]
FORM = {"type": "json_schema", "json_schema": {"name": "form", "schema": {
    "type": "object", "properties": {"first": {"type": "integer"}, "second": {"type": "boolean"}},
    "required": ["first", "second"], "additionalProperties": False}}}  # fmt: skip
COMMON = {"temperature": 0.7, "seed": 4}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": TEXT, "max_tokens": 40}),
    "completions": ("/v1/completions", {"prompt": [TEXT, "A list"], "n": 2, "max_tokens": 20}),
    "logprobs": ("/v1/completions", {"prompt": TEXT, "logprobs": 2, "max_tokens": 20}),
    "stop": ("/v1/completions", {"prompt": TEXT, "stop": ["e", "s"], "min_tokens": 9}),
    "chat": ("/v1/chat/completions", {"messages": USER, "max_tokens": 40}),
    "chat with logprobs": ("/v1/chat/completions", {
        "messages": USER, "max_tokens": 20, "logprobs": True, "top_logprobs": 2, "n": 2}),
    "form": ("/v1/chat/completions", {
        "messages": USER, "max_tokens": 60, "response_format": FORM}),
    "response": ("/v1/responses", {"input": TEXT, "max_output_tokens": 40}),
    "message": ("/v1/messages", {"model": "demo", "messages": USER, "max_tokens": 40}),
}  # fmt: skip
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


class NotedAnswers(EngineExtension):
    name = "noted answers"

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def on_finish(
        self, request: Request, output_ids: Sequence[int], finish: Finish, arrived_at: float
    ) -> None:
        del finish, arrived_at
        self._memory.note(request.token_ids.tolist(), output_ids)


@pytest.fixture(scope="module")
def memory() -> Memory:
    return Memory()


@pytest.fixture(scope="module")
def plain(memory: Memory) -> Iterator[LocalServer]:
    with Runtime("demo", num_pages=4096, max_draft_tokens=0) as runtime:
        runtime.extend(NotedAnswers(memory))
        with LocalServer(runtime) as served:
            yield served


@pytest.fixture(scope="module")
def drafting(memory: Memory) -> Iterator[Runtime]:
    with Runtime("demo", num_pages=4096, max_draft_tokens=8) as runtime:
        runtime.add_draft_source(ForcedSource("half", memory.guess, 64, 1))
        yield runtime


@pytest.fixture(scope="module")
def drafted(drafting: Runtime) -> Iterator[LocalServer]:
    with LocalServer(drafting) as served:
        yield served


def num_accepted(runtime: Runtime) -> int:
    return runtime.cache_stats()["accepted_draft_tokens"]


def same(answer: Any) -> Any:
    """An answer without its ids, times, and what was cached."""
    if isinstance(answer, dict):
        left_out = ("id", "created", "created_at", "completed_at", "metrics", "cached_tokens",
                    "item_id", "cache", "computed_tokens", "cache_read_input_tokens",
                    "cache_creation_input_tokens", "input_tokens")  # fmt: skip
        kept = {name: name.rpartition("/")[2] not in left_out for name in answer}
        return {name: same(answer[name]) for name in answer if kept[name]}
    return [same(each) for each in answer] if isinstance(answer, list) else answer


@pytest.mark.parametrize("name", ASKED)
def test_answers(name: str, plain: LocalServer, drafted: LocalServer, drafting: Runtime) -> None:
    path, body = ASKED[name]
    body = {**COMMON, **body}
    expected = same(plain.post(path, body))
    before = num_accepted(drafting)
    assert same(drafted.post(path, body)) == expected
    assert num_accepted(drafting) > before


def stream_of(served: LocalServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with served.client.stream("POST", path, json={**body, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    assert answer.status_code == 200
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("name", ASKED)
def test_streams(name: str, plain: LocalServer, drafted: LocalServer, drafting: Runtime) -> None:
    path, body = ASKED[name]
    body = {**COMMON, **body}
    if "completions" in path:
        body |= USAGE
    wanted = stream_of(plain, path, body)
    before = num_accepted(drafting)
    found = stream_of(drafted, path, body)
    assert num_accepted(drafting) > before
    assert joined(found) == joined(wanted)


def joined(events: list[dict[str, Any]]) -> Any:
    return same(said("".join(f"data: {json.dumps(event)}\n" for event in events)))


def test_predictions(plain: LocalServer, drafted: LocalServer) -> None:
    """Their counts are those of the answer, with drafts and without, in streams too."""
    path, body = ASKED["chat"]
    body = {**COMMON, **body}
    text = plain.post(path, body)["choices"][0]["message"]["content"]
    body["prediction"] = {"type": "content", "content": text[: len(text) // 2] + " and more"}
    details = [served.post(path, body)["usage"] for served in (plain, drafted)]
    events = stream_of(drafted, path, {**body, "stream_options": {"include_usage": True}})
    details.append(events[-1]["usage"])
    kept = [usage["completion_tokens_details"] for usage in details]
    assert kept[0] == kept[1] == kept[2]
    assert kept[0]["accepted_prediction_tokens"] > 5
    assert kept[0]["rejected_prediction_tokens"] > 0


def test_metrics(drafted: LocalServer) -> None:
    lines = drafted.client.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    drafts = float(values['radixserve:source_draft_tokens_total{source="half"}'])
    right = float(values['radixserve:source_accepted_draft_tokens_total{source="half"}'])
    assert drafts > right > 0
    assert float(values["radixserve:draft_tokens_total"]) >= drafts


def test_a_storm(drafting: Runtime) -> None:
    """Of clients, many of which leave in the middle, with drafts that are anything."""
    source = ForcedSource("wrong", lambda _, most: [7] * most, 64, 2)
    drafting.add_draft_source(source)
    counts = test_storm.storm(drafting, 2, lambda turn: turn == 2)
    test_storm.check_drained(drafting)
    assert counts[200] > 5
