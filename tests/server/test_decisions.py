"""/v1/decisions answers as `Runtime.decide` does, in OpenAI's format."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Option, Question, Runtime
from tests.server.local_server import LocalServer

PATH = "/v1/decisions"
TEXT = "The parcel came two weeks late, and the screen of the telephone is broken."
ASKED = [
    {"type": "predicate", "instructions": "The customer is content.", "name": "content"},
    {
        "type": "choice",
        "instructions": [{"type": "input_text", "text": "What is it about?"}],
        "choices": [{"value": "food"}, {"value": "phones", "description": "to call"}],
    },
    {
        "type": "score",
        "instructions": "How angry is the customer?",
        "levels": [{"label": "calm"}, {"label": "cross"}, {"label": "furious"}],
    },
    {
        "type": "choice",
        "instructions": "A refund?",
        "choices": [{"value": v} for v in (True, "no")],
    },
]
QUESTIONS = [
    Question("The customer is content.", name="content"),
    Question("What is it about?", choices=["food", Option("phones", "to call")]),
    Question("How angry is the customer?", levels=["calm", "cross", "furious"]),
    Question("A refund?", choices=[True, "no"]),
]


def test_answers_are_those_of_runtime(served: LocalServer, runtime: Runtime) -> None:
    expected = runtime.decide(TEXT, QUESTIONS)
    runtime.flush_cache()
    body = served.post(PATH, {"input": TEXT, "questions": ASKED, "model": "demo"})
    predicate, choice, score, bools = body["answers"]
    close = {"abs": 1e-4}
    assert (predicate["type"], predicate["name"]) == ("predicate", "content")
    assert predicate["probability"] == pytest.approx(expected[0].probabilities[0], **close)
    assert choice["name"] is None
    assert choice["choice"] == expected[1].choice
    assert [entry["value"] for entry in choice["probabilities"]] == ["food", "phones"]
    shares = [entry["probability"] for entry in choice["probabilities"]]
    assert shares == pytest.approx(expected[1].probabilities, **close)
    assert choice["confidence"] == max(shares)
    assert score["score"] == pytest.approx(expected[2].score, **close)
    assert [(e["label"], e["value"]) for e in score["probabilities"]] == [
        ("calm", 0), ("cross", 1), ("furious", 2),
    ]  # fmt: skip
    assert math.fsum(e["probability"] for e in score["probabilities"]) == pytest.approx(1.0)
    assert [entry["value"] for entry in bools["probabilities"]] == [True, "no"]
    usage, details = body["usage"], body["usage"]["input_tokens_details"]
    assert usage["input_tokens"] == sum(decision.usage.prompt_tokens for decision in expected)
    assert details["cached_tokens"] + details["computed_tokens"] == usage["input_tokens"]
    assert details["computed_tokens"] < usage["input_tokens"] / 2
    warm = served.post(PATH, {"input": TEXT, "questions": ASKED})["usage"]
    assert warm["input_tokens_details"]["computed_tokens"] < details["computed_tokens"] / 2


def test_the_client_library_parses_it(served: LocalServer) -> None:
    types = pytest.importorskip("openai.types.decision", reason="openai 3.57 has the type")
    decision = types.Decision.model_validate(
        served.post(PATH, {"input": TEXT, "questions": ASKED}), strict=True
    )
    assert [answer.type for answer in decision.answers] == [q["type"] for q in ASKED]


def test_a_conversation_as_input(served: LocalServer) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_json", "data": {"a": [1, "b"]}}]},
        {"type": "message", "role": "assistant", "content": "Well."},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "late"},
    ]
    body = served.post(PATH, {"input": items, "questions": ASKED[:2]})
    assert len(body["answers"]) == 2
    assert body["usage"]["input_tokens"] > 50


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": ASKED[:1] * 401}, "questions"),
        ({"questions": [{"type": "rank", "instructions": "x"}]}, "questions[0].type"),
        ({"questions": [{"type": "choice", "instructions": "x"}]}, "questions[0].choices"),
        (
            {"questions": [{**ASKED[1], "choices": [{"value": "a"}]}]},
            "questions[0].choices",
        ),
        (
            {"questions": [ASKED[0], {**ASKED[1], "choices": [{"value": "a"}, {"value": "a"}]}]},
            "questions[1]",
        ),
        ({"questions": [{"type": "predicate", "instructions": ""}]}, "questions[0]"),
        ({"input": []}, "input"),
        ({"input": "word " * 20_000}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type"),
        ({"whim": 1}, "whim"),
    ],
)  # fmt: skip
def test_wrong_requests(served: LocalServer, fields: dict[str, Any], param: str) -> None:
    answer = served.client.post(PATH, json={"input": TEXT, "questions": ASKED, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_four_hundred_questions_and_a_full_queue(runtime: Runtime) -> None:
    asked = [{"type": "predicate", "instructions": str(number)} for number in range(400)]
    with LocalServer(runtime, max_queued_requests=8) as served:
        body = served.post(PATH, {"input": "x", "questions": asked})
        assert len(body["answers"]) == 400
