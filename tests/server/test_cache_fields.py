"""What clients send to steer the cache: OpenAI's options, and the `kv_hints` envelope."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from tests.server.local_server import LocalServer

PROMPT = "The urllib module opens addresses, and what else?"
HI = [{"role": "user", "content": "What is a socket, in one line?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": PROMPT,
        "max_tokens": 1,
    },
    "/v1/chat/completions": {"messages": HI, "max_tokens": 1},
    "/v1/responses": {"input": HI, "max_output_tokens": 1},
    "/v1/messages": {"model": "demo", "messages": HI, "max_tokens": 1},
    "/generate": {"prompt": PROMPT, "max_tokens": 1},
}
RETAINED = ("clipped", 3600.0)  # by --max-hint-seconds


@pytest.fixture(autouse=True)
def _clean(runtime: Runtime) -> Iterator[None]:
    runtime.flush_cache()
    yield
    runtime.flush_cache()
    assert runtime.cache_stats()["hints"] == 0


def action(action_id: str, action_type: str, version: str = "1", **payload: Any) -> dict[str, Any]:
    return {
        "action_id": action_id,
        "action_type": action_type,
        "action_version": version,
        "payload": payload,
    }


def envelope(*actions: Any) -> dict[str, Any]:
    return {"protocol_version": "1", "message_id": "m-7", "actions": [*actions]}


def answers_of(body: dict[str, Any]) -> list[tuple[str, str]]:
    """(action_id, answer) each."""
    answered = body["kv_hints"]
    assert (answered["protocol_version"], answered["message_id"]) == ("1", "m-7")
    return [(own["action_id"], own["answer"]) for own in answered["actions"]]


def events_of(served: LocalServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with served.client.stream("POST", path, json={**body, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("path", BODIES)
def test_actions_are_carried_out_and_answered_by_their_ids(
    served: LocalServer, runtime: Runtime, path: str
) -> None:
    hints = envelope(
        action("a", "retain", seconds=20),
        action("b", "sglang.next_turn", delay_s=4),
        action("c", "kv.pin", "1.0", max_tokens=3),
        action("d", "kv.retain", "2.0"),
        action("e", "kv.prefetch"),
        action("f", "kv.demote", target_tier="host"),
    )
    expected = [
        ("a", "accepted"),
        ("b", "ignored"),
        ("c", "accepted"),
        ("d", "ignored"),
        ("e", "rejected"),
        ("f", "ignored"),
    ]
    body = {**BODIES[path], "kv_hints": hints}
    answered = served.post(path, body)
    assert answers_of(answered) == expected
    retained, unknown, pinned, newer, prefetch, tier = answered["kv_hints"]["actions"]
    assert retained["seconds"] == 20
    assert retained["tokens_covered"] == retained["tokens_found"] > 3
    assert pinned["tokens_covered"] == 3
    assert pinned["action_type"] == "kv.pin"
    assert "not known" in unknown["reason"]
    assert "version '2.0'" in newer["reason"]
    assert "/v1/cache/hints" in prefetch["reason"]
    assert "payload.target_tier" in tier["reason"]
    assert runtime.cache_stats()["pages_pinned"] == 3
    last = next(
        event for event in reversed(events_of(served, path, body)) if "kv_hints" in str(event)
    )
    assert answers_of(last.get("response", last)) == expected


def test_an_envelope_stands_beside_native_hints(served: LocalServer) -> None:
    body = {**BODIES["/v1/chat/completions"], "cache_hints": [{"verb": "retain", "seconds": 9}]}
    answered = served.post(
        "/v1/chat/completions", {**body, "kv_hints": envelope(action("a", "demote"))}
    )
    assert [own["verb"] for own in answered["cache_hints"]] == ["retain"]
    assert answers_of(answered) == [("a", "accepted")]
    empty = served.post("/v1/chat/completions", {**body, "kv_hints": envelope()})
    assert empty["kv_hints"]["actions"] == []


def test_ranges_of_tokens_keep_the_prompt_up_to_their_ends(
    served: LocalServer, runtime: Runtime
) -> None:
    def answer(*directives: dict[str, Any]) -> dict[str, Any]:
        hints = envelope(action("a", "kv.retain", "1.0", scope=None, directives=[*directives]))
        body = {**BODIES["/v1/completions"], "kv_hints": hints}
        (own,) = served.post("/v1/completions", body)["kv_hints"]["actions"]
        return dict(own)

    own = answer({"start": 0, "end": 2, "priority": 80, "duration": 30})
    assert (own["answer"], own["tokens_covered"], own["seconds"]) == ("accepted", 2, 30)
    assert runtime.cache_stats()["pages_retained"] == 2
    own = answer({"end": 2, "priority": 80}, {"start": 2, "end": 3, "priority": 9, "duration": 60})
    assert (own["answer"], own["tokens_covered"], own["seconds"]) == ("clipped", 3, 60)
    output = {"covers_output": True, "priority": 1, "duration": 5}
    own = answer({"end": 2, "priority": 80, "duration": 30}, output)
    assert own["answer"] == "clipped"
    assert "only tokens of the prompt" in own["reason"]
    assert answer(output)["answer"] == "ignored"
    assert answer({"start": 1, "end": 2, "priority": 0})["answer"] == "ignored"
    assert answer()["answer"] == "ignored"
    runtime.flush_cache()
    answer({"end": 3, "priority": 1, "duration": 30})
    assert answer({"end": 3, "priority": 0})["answer"] == "accepted"
    assert runtime.cache_stats()["pages_retained"] == 0


def test_an_action_may_be_for_a_session(served: LocalServer) -> None:
    body = {**BODIES["/v1/chat/completions"], "session_id": "agent-42"}
    served.post("/v1/chat/completions", body)
    other = {**BODIES["/v1/completions"]}
    hints = envelope(action("a", "kv.retain", session_id="agent-42", seconds=5),
                     action("b", "kv.demote", session_id="agent-42"),
                     action("c", "kv.demote", session_id="nobody"))  # fmt: skip
    answered = served.post("/v1/completions", {**other, "kv_hints": hints})
    assert answers_of(answered) == [("a", "accepted"), ("b", "accepted"), ("c", "missing")]
    assert served.client.delete("/v1/sessions/agent-42").status_code == 404, "it is closed"


@pytest.mark.parametrize(
    ("hints", "param"),
    [
        ([], "kv_hints"),
        ({"message_id": "m", "actions": []}, "kv_hints.protocol_version"),
        ({**envelope(), "protocol_version": "2"}, "kv_hints.protocol_version"),
        ({**envelope(), "message_id": 7}, "kv_hints.message_id"),
        ({**envelope(), "actions": {}}, "kv_hints.actions"),
        (envelope("retain"), "kv_hints.actions[0]"),
        (envelope({"action_id": "a"}), "kv_hints.actions[0].action_type"),
        (envelope({**action("a", "retain"), "payload": 3}), "kv_hints.actions[0].payload"),
        (envelope(action("a", "retain"), action("a", "pin")), "kv_hints.actions[1].action_id"),
        (envelope(action("a", "retain", seconds=-1)), "kv_hints.actions[0].payload.seconds"),
        (envelope(action("a", "pin", max_tokens=0)), "kv_hints.actions[0].payload.max_tokens"),
        (envelope(action("a", "pin", session_id=4)), "kv_hints.actions[0].payload.session_id"),
        (envelope(action("a", "pin", session_id="")), "kv_hints.actions[0].payload.session_id"),
        (envelope(action("a", "kv.retain", directives={})),
         "kv_hints.actions[0].payload.directives"),
        (envelope(action("a", "kv.retain", directives=[{"priority": 101}])),
         "kv_hints.actions[0].payload.directives[0].priority"),
        (envelope(action("a", "kv.retain", directives=[{"priority": 1, "end": 0}])),
         "kv_hints.actions[0].payload.directives[0].end"),
        (envelope(action("a", "kv.retain", directives=[{"priority": 1, "duration": 1e10}])),
         "kv_hints.actions[0].payload.directives[0].duration"),
        (envelope(action("a", "kv.retain", directives=[{"priority": 1, "whim": 0}])),
         "kv_hints.actions[0].payload.directives[0].whim"),
        (envelope(*(action(str(number), "pin") for number in range(65))), "kv_hints.actions"),
    ],
)  # fmt: skip
def test_a_bad_envelope_is_400_with_its_place(served: LocalServer, hints: Any, param: str) -> None:
    for path in ("/v1/chat/completions", "/v1/responses"):
        answer = served.client.post(path, json={**BODIES[path], "kv_hints": hints})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert "kv_hints" in answer.json()["error"]["message"]


def test_hints_of_both_kinds_have_one_bound(served: LocalServer) -> None:
    path = "/v1/chat/completions"
    own = [{"verb": "retain"}] * 60
    actions = [action(str(number), "pin", max_tokens=1) for number in range(5)]
    for count, status in ((4, 200), (5, 400)):
        body = {**BODIES[path], "cache_hints": own, "kv_hints": envelope(*actions[:count])}
        assert served.client.post(path, json=body).status_code == status


OPTIONS: list[tuple[dict[str, Any], tuple[str, float] | None]] = [
    ({"prompt_cache_options": {"ttl": "30m"}}, ("accepted", 1800.0)),
    ({"prompt_cache_options": {"ttl": "12h"}}, RETAINED),
    ({"prompt_cache_options": {"mode": "explicit", "ttl": "12h"}}, None),
    ({"prompt_cache_options": {}}, None),
    ({"prompt_cache_retention": "24h"}, RETAINED),
    ({"prompt_cache_retention": "in_memory"}, None),
    ({"prompt_cache_retention": "in_memory", "prompt_cache_options": {"ttl": "30m"}},
     ("accepted", 1800.0)),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), OPTIONS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_lifetimes_are_retains(
    served: LocalServer, path: str, fields: dict[str, Any], expected: tuple[str, float] | None
) -> None:
    answered = served.post(path, {**BODIES[path], **fields})
    if expected is None:
        assert "cache_hints" not in answered
        return
    (own,) = answered["cache_hints"]
    assert (own["verb"], own["answer"], own["seconds"]) == ("retain", *expected)
    usage = answered["usage"]
    assert own["tokens_covered"] == usage.get("prompt_tokens", usage.get("input_tokens"))


@pytest.mark.parametrize(
    ("mark", "options", "seconds"),
    [({}, {}, 1800.0), ({"ttl": "12h"}, {}, 3600.0), ({}, {"mode": "explicit"}, 1800.0),
     ({}, {"mode": "explicit", "ttl": "12h"}, 3600.0)],
)  # fmt: skip
def test_breakpoints_are_retains(
    served: LocalServer, mark: dict[str, Any], options: dict[str, Any], seconds: float
) -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit", **mark}}
    for path, name, kind in (
        ("/v1/chat/completions", "messages", "text"),
        ("/v1/responses", "input", "input_text"),
    ):
        part = {"type": kind, "text": HI[0]["content"], **mark}
        body = {**BODIES[path], name: [{"role": "user", "content": [part]}]}
        answered = served.post(path, {**body, "prompt_cache_options": options})
        assert [own["seconds"] for own in answered["cache_hints"]] == [seconds]
        plain = served.post(path, BODIES[path])
        sizes = [own["usage"].get("prompt_tokens", own["usage"].get("input_tokens"))
                 for own in (answered, plain)]  # fmt: skip
        assert sizes[0] == sizes[1], "a mark is no part of the prompt"


def test_a_prewarmed_prompt_is_cached_and_nothing_is_said(served: LocalServer) -> None:
    options = {"prompt_cache_options": {"prewarm": True}}
    first = served.post("/v1/responses", {"input": HI, **options})
    assert (first["status"], first["output"]) == ("completed", [])
    usage = first["usage"]
    assert (usage["output_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (0, 0)
    assert first["prompt_cache_options"]["ttl"] == "30m"
    assert first["cache_hints"][0]["seconds"] == 1800
    assert served.client.get(f"/v1/responses/{first['id']}").status_code == 404
    again = served.post("/v1/chat/completions", {"messages": HI, "max_tokens": 1})["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1
    kinds = [
        event["type"] for event in events_of(served, "/v1/responses", {"input": HI, **options})
    ]
    assert kinds == ["response.created", "response.in_progress", "response.completed"]
    said = served.post("/v1/chat/completions", {"messages": HI, **options, "logprobs": True})
    assert said["choices"][0]["message"]["content"] == ""
    assert said["usage"]["completion_tokens"] == 0
    asked = {"messages": HI, **options, "stream_options": {"include_usage": True}}
    events = served.stream("/v1/chat/completions", asked)
    assert [event["usage"]["completion_tokens"] for event in events if event.get("usage")] == [0]
    assert all(not event["choices"] or not event["choices"][0]["delta"].get("content")
               for event in events)  # fmt: skip
