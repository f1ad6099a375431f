"""The path of a device: structured answers are the host path's, and steps are prepared ahead."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixserve import Completion, RequestFailed, Runtime, SamplingParams, StructuredOutput
from radixserve.runner.device_sampler import DeviceSampler
from tests.runner.on_device import DeviceRuntime

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer", "minimum": 0}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": "[a-c]{2,9}-[0-9]{3}"},
    {"choice": ["left", "right", "straight on"]},
    {"grammar": 'start: <|user|> /[a-z]+/ "." <[5]>'},
]
PROMPTS = ["Once upon a time", "Hello", "One day a cat"]


def jobs() -> tuple[list[str], list[SamplingParams]]:
    """Each form, greedy and sampled, with what else changes logits, beside plain requests."""
    more: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 0.0, "min_tokens": 12, "logprobs": 2},
        {"temperature": 0.9, "presence_penalty": 0.7, "bad_words": ["c"], "stop_token_ids": [30]},
        {"temperature": 0.0, "logits_processors": [lambda _, logits: logits * 0.5]},
    ]
    prompts, params = [], []
    for at, form in enumerate(FORMS):
        for number, fields in enumerate(more):
            given = StructuredOutput(**form)
            params.append(
                SamplingParams(max_tokens=60, seed=at + number, structured=given, **fields)
            )
            prompts.append(PROMPTS[number % 3])
        params.append(SamplingParams(max_tokens=20, temperature=0.0))
        prompts.append(PROMPTS[at % 3])
    return prompts, params


def said(rt: Runtime) -> list[Completion]:
    found = rt.generate(*jobs())
    rt.check()
    assert isinstance(found, list)
    return found


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    with Runtime("demo", num_pages=4_000) as rt:
        return said(rt)


@pytest.mark.parametrize(
    "fields",
    [{"overlap": True}, {"overlap": False}, {"overlap": True, "num_pages": 70, "page_size": 4}],
)
def test_answers_are_those_of_the_host(expected: list[Completion], fields: dict[str, Any]) -> None:
    with DeviceRuntime("demo", **{"num_pages": 4_000, **fields}) as rt:
        found = said(rt)
        is_ahead = rt.cache_stats()["steps_ahead"] > 10
    assert is_ahead == fields["overlap"]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.text == theirs.text
        assert mine.token_ids == theirs.token_ids
        assert mine.finish_reason == theirs.finish_reason
    for one, params in zip(found, jobs()[1], strict=True):
        form = params.structured_outputs
        is_whole = one.finish_reason == "stop" and one.stop_reason is None
        if form is not None and form.kind == "json" and is_whole:
            assert list(json.loads(one.text)) == ["a", "b"]


def test_beams(expected: list[Completion]) -> None:
    assert expected
    wish: dict[str, Any] = {"structured": FORMS[1], "beam_width": 3, "max_tokens": 30}
    with Runtime("demo", num_pages=2_000) as host, DeviceRuntime("demo", num_pages=2_000) as rt:
        theirs, mine = (one.beam_search("Hello", **wish) for one in (host, rt))
        assert [one.token_ids for one in mine] == [one.token_ids for one in theirs]


def test_failed_steps_and_aborts_leave_nothing_behind(
    expected: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the samples fail that wait for the step before."""
    prompts, params = jobs()
    with DeviceRuntime("demo", num_pages=4_000) as rt:
        real, count = DeviceSampler.launch, 0

        def sometimes(*args: Any, **fields: Any) -> Any:
            nonlocal count
            count += 1
            if count % 7 == 0:
                raise RuntimeError("the device is on fire")
            return real(*args, **fields)

        monkeypatch.setattr(DeviceSampler, "launch", sometimes)
        for _ in range(3):
            with pytest.raises(RequestFailed):
                rt.generate(prompts, params)
        monkeypatch.setattr(DeviceSampler, "launch", real)
        for at in range(6):
            for number, _ in enumerate(rt.stream(prompts[at], params[at])):
                if number == at:
                    break
        assert [one.token_ids for one in said(rt)] == [one.token_ids for one in expected]
