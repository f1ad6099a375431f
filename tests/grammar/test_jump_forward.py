"""Forced tokens are drafts that cannot fail: the form holds, and fewer steps are needed."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from radixserve import InvalidRequest, RequestFailed, Runtime, SamplingParams, StructuredOutput
from radixserve.grammar.compiler import GrammarCompiler
from radixserve.grammar.matcher import BitmaskFuture
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


def tokens_of(rt: Runtime, **fields: Any) -> list[list[int]]:
    found = rt.generate(["Hello", "Once"], wish(True, **fields))
    return [one.token_ids for several in found for one in several]


def test_settings_change_no_token() -> None:
    """Forced tokens are sampled where their log-probabilities are asked for, and where a step has
    no room for them."""
    with Runtime("demo", num_pages=2_000) as rt:
        wanted = tokens_of(rt, n=3)
        assert tokens_of(rt, n=3, logprobs=1) == wanted
    for more in ({"max_draft_tokens": 4}, {"chunked_prefill_size": 2}, {"num_pages": 90}):
        with Runtime("demo", **{"num_pages": 2_000, **more}) as rt:
            assert tokens_of(rt, n=3) == wanted


def test_what_it_goes_with() -> None:
    with Runtime("demo", num_pages=500) as rt:
        whole = rt.generate("Hello", wish(True, logprobs=2, digest=True))
        assert whole.logprobs is not None
        assert len(whole.logprobs) == len(whole.token_ids)
        assert whole.digest is not None
        best = rt.generate("Hello", wish(True, best_of=3))
        assert list(json.loads(best.text)) == SCHEMA["required"]
        cut = rt.generate("Hello", wish(True, stop="long"))
        assert cut.text == whole.text[: whole.text.index("long")]
        assert cut.stop_reason == "long"
        forced = whole.token_ids[3]
        others = [token for token in range(rt.model.vocab_size) if token != forced]
        for jumps in (False, True):
            with pytest.raises(RequestFailed, match="all tokens are forbidden"):
                rt.generate("Hello", wish(jumps, allowed_token_ids=others))
        with pytest.raises(InvalidRequest, match="cannot jump forward"):
            rt.beam_search("Hello", structured=wish(True).structured_outputs)


def test_a_matcher_depends_on_the_answer_alone() -> None:
    """Whatever it was moved to before; and a text that can follow only one way is divided as the
    compiler divides it."""
    with Runtime("demo", num_pages=500) as rt:
        form = wish(True).structured_outputs
        assert form is not None
        answer = np.array(rt.generate("Hello", wish(True)).token_ids, np.int32)
        compiler = GrammarCompiler(lambda: rt.tokenizer.backend)
        grammar = compiler.compile(form)
        moved = grammar.matcher(frozenset())
        drawn, num_forced = random.Random(1), 0
        for _ in range(60):
            count = drawn.randrange(len(answer))
            fresh = grammar.matcher(frozenset())
            assert moved.forced_ids(answer[:count]) == fresh.forced_ids(answer[:count])
            masks = [BitmaskFuture([each], [answer[:count]], 1).get() for each in (moved, fresh)]
            assert (masks[0] == masks[1]).all()
            forced = fresh.forced_ids(answer[:count])
            if forced and fresh.must_follow(forced):
                num_forced += 1
                assert answer[count : count + len(forced)].tolist() == forced
        assert num_forced > 20
