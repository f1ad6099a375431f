"""Several completions of one prompt."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixserve import InvalidRequest, Runtime, SamplingParams
from tests.checkpoints import make_checkpoint

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("samples"), "llama")


@pytest.fixture(params=[1, 16])
def rt(folder: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    with Runtime(str(folder), num_pages=600 // request.param, page_size=request.param) as rt:
        yield rt
        rt.check()
        assert rt.cache_stats()["sequences"] == 0


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "ignore_eos": True, "seed": 11, **fields})


def test_equal_to_as_many_seeded_requests(rt: Runtime) -> None:
    outs = rt.generate(PROMPT, params(n=5, logprobs=2))
    rt.flush_cache()
    for number, out in enumerate(outs):
        alone = rt.generate(PROMPT, params(seed=11 + number, logprobs=2))
        assert out.token_ids == alone.token_ids
        assert out.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert out.cumulative_logprob == pytest.approx(math.fsum(alone.logprobs or []), abs=1e-3)
    assert len({tuple(out.token_ids) for out in outs}) > 1


def test_the_prompt_is_computed_once(rt: Runtime) -> None:
    before = rt.cache_stats()["prefilled_tokens"]
    outs = rt.generate(PROMPT, params(n=6))
    assert [out.usage.computed_tokens for out in outs] == [len(PROMPT), 1, 1, 1, 1, 1]
    assert all(out.usage.prompt_tokens == len(PROMPT) for out in outs)
    assert rt.cache_stats()["prefilled_tokens"] - before == len(PROMPT) + 5
    assert all(out.logprobs is None and out.top_logprobs is None for out in outs)


def test_best_of(rt: Runtime) -> None:
    every = rt.generate(PROMPT, params(n=6))
    ranked = sorted(every, key=lambda out: -out.cumulative_logprob)
    rt.flush_cache()
    best = rt.generate(PROMPT, params(n=2, best_of=6))
    assert [out.token_ids for out in best] == [out.token_ids for out in ranked[:2]]
    assert [out.usage.computed_tokens for out in best] == [len(PROMPT), 1]
    rt.flush_cache()
    one = rt.generate(PROMPT, params(best_of=6))
    assert one.token_ids == ranked[0].token_ids


def test_the_best_one_counts_its_own_answer(rt: Runtime) -> None:
    every = rt.generate(PROMPT, params(n=6))
    ranked = sorted(every, key=lambda out: -out.cumulative_logprob)
    assert ranked[0] is not every[0]
    best = rt.generate(PROMPT, params(n=5, best_of=6, prediction=ranked[0].token_ids))
    alone = [
        rt.generate(PROMPT, params(seed=11 + every.index(out), prediction=ranked[0].token_ids))
        for out in ranked[:5]
    ]
    accepted = [out.usage.accepted_prediction_tokens for out in best]
    assert accepted == [out.usage.accepted_prediction_tokens for out in alone]
    assert accepted[0] == 8


def test_batches_and_asyncio(rt: Runtime) -> None:
    each = [params(n=3), params(), params(n=2)]
    prompts = [PROMPT, PROMPT[:20], PROMPT[:10]]
    outs = rt.generate(prompts, each)
    assert [len(out) if isinstance(out, list) else 0 for out in outs] == [3, 0, 2]
    again = asyncio.run(rt.agenerate(prompts, each))
    for one, other in zip(outs, again, strict=True):
        left, right = (x if isinstance(x, list) else [x] for x in (one, other))
        assert [out.token_ids for out in left] == [out.token_ids for out in right]


def test_greedy_ones_are_all_the_same(rt: Runtime) -> None:
    outs = rt.generate(PROMPT, params(n=3, temperature=0.0))
    assert outs[0].token_ids == outs[1].token_ids == outs[2].token_ids


def test_wrong_ones(rt: Runtime) -> None:
    for fields, message in (
        ({"n": 0}, "n must be"),
        ({"n": 4, "best_of": 3}, "best_of must be"),
        ({"n": 10**6}, "n must be"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            params(**fields)
    with pytest.raises(InvalidRequest, match="n=1"):
        rt.stream(PROMPT, params(n=2))
    with pytest.raises(InvalidRequest, match="n=1"):
        rt.stream(PROMPT, params(best_of=2))
    with pytest.raises(InvalidRequest, match="single request"):
        rt.generate(PROMPT, params(n=2), request_id="mine")
