"""Random schemas and expressions on two models: what is finished has its form, nothing hangs, and
the cache changes nothing.

With little memory, small chunks, samples, branches and aborts in the mix.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixserve import Completion, InvalidRequest, Runtime, SamplingParams, StructuredOutput
from radixserve.api.runtime import DEMO
from tests.checkpoints import EOS_ID, make_checkpoint
from tests.grammar.forms import check_answer, random_forms

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

AT_ONCE = 20


@pytest.fixture(scope="module", params=["demo", "random"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that has learnt to write, and one with random weights and a token a byte."""
    if request.param == "demo":
        return DEMO
    folder = tmp_path_factory.mktemp("random")
    # More tokens than the tokenizer has, as most published models.
    return make_checkpoint(folder, "qwen3", with_tokenizer=True, eos_ids=EOS_ID, vocab_size=352)


@pytest.fixture
def tight(model: Path) -> Iterator[Runtime]:
    """Too small for all that run: requests are preempted, prompts come in chunks."""
    settings: dict[str, Any] = {"num_pages": 1_000, "max_running_requests": 16}
    with Runtime(model, chunked_prefill_size=24, admission="greedy", **settings) as runtime:
        yield runtime


def wishes(
    forms: list[StructuredOutput], rng: random.Random, **fields: Any
) -> tuple[list[str], list[SamplingParams]]:
    params = [
        SamplingParams(
            max_tokens=150,
            seed=rng.randrange(10**6),
            temperature=rng.choice([0.0, 0.8, 1.0]),
            structured=form,
            **fields,
        )
        for form in forms
    ]
    prompts = [rng.choice(["Once upon a time, ", "JSON: "]) * rng.randrange(1, 9) for _ in forms]
    return prompts, params


def usable(rt: Runtime, forms: list[StructuredOutput]) -> list[StructuredOutput]:
    """Those that can be compiled: a random schema may have no answer."""
    found = []
    for form in forms:
        try:
            rt.compile_grammar(form)
        except InvalidRequest as refusal:
            assert "cannot be used" in str(refusal)  # noqa: PT017
        else:
            found.append(form)
    assert len(found) > 0.7 * len(forms)
    return found


def run(rt: Runtime, num_schemas: int, num_regexes: int, seed: int) -> None:
    rng = random.Random(seed)
    forms = usable(rt, random_forms(rng, num_schemas, num_regexes))
    finished = total = 0
    while forms:
        some, forms = forms[:AT_ONCE], forms[AT_ONCE:]
        prompts, params = wishes(some, rng, n=rng.choice([1, 1, 3]))
        answers = asyncio.run(generate_and_abort(rt, prompts, params, rng))
        for form, several in zip(some, answers, strict=True):
            for answer in several:
                finished += check_answer(form, answer)
                total += 1
        with rt.branch(prompts[0]) as root:
            for form, kid in zip(some[:3], root.fork(3), strict=False):
                kid.extend("The answer: ")
                one = SamplingParams(max_tokens=150, seed=1, structured=form)
                total, finished = total + 1, finished + check_answer(form, kid.generate(one))
        rt.check()
    assert finished > 0.5 * total, f"{finished} of {total} answers are finished"


async def generate_and_abort(
    rt: Runtime, prompts: list[str], params: list[SamplingParams], rng: random.Random
) -> list[list[Completion]]:
    """All answers; some others run beside them and are aborted."""
    beside = asyncio.create_task(rt.agenerate(prompts[:4], params[:4]))
    task = asyncio.create_task(rt.agenerate(prompts, params))
    await asyncio.sleep(rng.random() * 0.05)
    beside.cancel()
    found = await task
    return [one if isinstance(one, list) else [one] for one in found]


def test_forty_schemas_and_twenty_expressions(tight: Runtime) -> None:
    run(tight, 40, 20, seed=0)
    assert tight.cache_stats()["preemptions"] > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_thousand_schemas_and_two_hundred_expressions(tight: Runtime) -> None:
    run(tight, 1_000, 200, seed=1)


def test_cold_warm_and_off_say_the_same(model: Path) -> None:
    rng = random.Random(2)
    settings: dict[str, Any] = {"num_pages": 4_000, "max_running_requests": 8}
    with Runtime(model, **settings) as rt, Runtime(model, cache="off", **settings) as off:
        prompts, params = wishes(usable(rt, random_forms(rng, 8, 4)), rng)
        cold, warm, without = (one.generate(prompts, params) for one in (rt, rt, off))
        for several in zip(cold, warm, without, strict=True):
            ids = [one.token_ids for one in several if isinstance(one, Completion)]
            assert ids[0] == ids[1] == ids[2]
            assert several[1].usage.cached_tokens > 0
