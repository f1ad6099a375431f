"""Requests that go on from a part of their answer, as after the end of the engine that made it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from radixserve import Runtime, SamplingParams
from radixserve.api.engine_factory import make_engine
from radixserve.api.request_builder import RequestBuilder
from radixserve.api.runtime import DEMO
from radixserve.config import EngineConfig
from radixserve.engine.engine import Engine
from radixserve.output import RequestOutput
from radixserve.request import Request
from radixserve.runner.factory import make_runner
from radixserve.text.prompts import PromptReader
from radixserve.text.tokenizer import Tokenizer

PROMPT = "How do I sort a list of numbers in Python, the largest first?"
NAMES = {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3}
PARAMS = {
    "greedy": SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=24, temperature=1.2, seed=5, ignore_eos=True),
    "penalties": SamplingParams(
        max_tokens=24, temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.3,
        presence_penalty=0.5, min_tokens=20,
    ),
    "bad words": SamplingParams(max_tokens=24, temperature=0.0, bad_words=["list", " the"]),
    "a form": SamplingParams(max_tokens=60, temperature=1.0, seed=3, structured={"json": NAMES}),
    "logprobs": SamplingParams(max_tokens=16, temperature=0.0, logprobs=2, ignore_eos=True),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(num_pages=2000, max_running_requests=8, max_draft_tokens=0)
    runner = make_runner(str(DEMO), config)
    yield make_engine(runner, config)
    runner.close()


@pytest.fixture(scope="module")
def builder() -> RequestBuilder:
    tokenizer = Tokenizer.load(DEMO)
    return RequestBuilder(PromptReader(tokenizer, 4096, 1000, "a limit"), frozenset(), 0, {})


def run(engine: Engine, requests: list[Request]) -> dict[str, list[RequestOutput]]:
    for request in requests:
        engine.add(request)
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    while engine.has_work():
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("kind", PARAMS)
def test_the_answer_goes_on_as_it_would_have(
    engine: Engine, builder: RequestBuilder, kind: str
) -> None:
    if kind == "a form":
        pytest.importorskip("llguidance")
    whole = builder.single(PROMPT, PARAMS[kind])
    expected = run(engine, [whole])[whole.request_id]
    ids = tokens(expected)
    assert len(ids) > 8
    parts = []
    for at in (1, 4, len(ids) - 1):
        known = np.array([*whole.token_ids, *ids[:at]], np.int32)
        parts.append(replace(whole, request_id=f"at {at}", token_ids=known, num_resumed_tokens=at))
    found = run(engine, parts)
    for part in parts:
        at, outputs = part.num_resumed_tokens, found[part.request_id]
        assert tokens(outputs) == ids[at:]
        ours, theirs = outputs[-1].finish, expected[-1].finish
        assert ours is not None
        assert theirs is not None
        assert ours.reason == theirs.reason
        assert ours.usage.completion_tokens == len(ids)
        assert ours.usage.prompt_tokens == theirs.usage.prompt_tokens == len(whole.token_ids)
        assert ours.usage.cached_tokens + ours.usage.computed_tokens == len(whole.token_ids)
        for one, other in zip(outputs, expected[at:], strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_facts_are_those_of_the_engine() -> None:
    with Runtime("demo", num_pages=200) as runtime:
        facts: Any = runtime.facts
        assert facts.capacity == 200 * runtime.config.page_size
        assert runtime.model is facts.model
        assert runtime.memory is facts.memory
