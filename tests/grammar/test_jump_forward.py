"""Forced tokens go in as one extend: the form holds, and fewer steps are needed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixserve import InvalidRequest, Runtime, SamplingParams, StructuredOutput
from tests.runner.on_device import DeviceRuntime

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {name: {"enum": ["yes", "no"]} for name in ("first long name", "second name")},
    "required": ["first long name", "second name"],
    "additionalProperties": False,
}


def wish(jump_forward: bool, **fields: Any) -> SamplingParams:
    form = StructuredOutput(json=SCHEMA, disable_any_whitespace=True, jump_forward=jump_forward)
    return SamplingParams(**{"max_tokens": 100, "seed": 3, "structured": form, **fields})


@pytest.mark.parametrize("kind", [Runtime, DeviceRuntime])
def test_fewer_steps_and_the_same_form(kind: type[Runtime]) -> None:
    steps = {}
    with kind("demo", num_pages=2_000, chunked_prefill_size=8) as rt:
        for jumps in (False, True):
            before = rt.cache_stats()["steps"]
            found = rt.generate(["Hello", "Once"], wish(jumps, n=3))
            steps[jumps] = rt.cache_stats()["steps"] - before
            for one in [one for several in found for one in several]:
                value = json.loads(one.text)
                assert list(value) == SCHEMA["required"]
                assert one.finish_reason == "stop"
                assert one.usage.completion_tokens == len(one.token_ids)
        rt.check()
    assert steps[True] < 0.7 * steps[False]


def test_the_limits_hold_inside_forced_tokens() -> None:
    with Runtime("demo", num_pages=2_000) as rt:
        whole = rt.generate("Hello", wish(True, temperature=0))
        for most in range(1, len(whole.token_ids)):
            cut = rt.generate("Hello", wish(True, temperature=0, max_tokens=most))
            assert cut.token_ids == whole.token_ids[:most]
            assert cut.finish_reason == "length"
        chunks = list(rt.stream("Hello", wish(True, temperature=0)))
        assert "".join(chunk.text for chunk in chunks) == whole.text


def test_what_it_does_not_go_with() -> None:
    with Runtime("demo", num_pages=500) as rt:
        for fields in ({"logprobs": 1}, {"stop": "a"}, {"best_of": 2}):
            with pytest.raises(InvalidRequest, match="cannot be given with jump_forward"):
                rt.generate("Hello", wish(True, **fields))
        with pytest.raises(InvalidRequest, match="cannot jump forward"):
            rt.beam_search("Hello", structured=wish(True).structured_outputs)
