"""Decisions: the probabilities are those of the answers' scores, the input is computed once."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from radixserve import InvalidRequest, Option, Question, Runtime
from radixserve.api import decisions
from radixserve.api.decisions import DecisionBatch, _has_prefix
from radixserve.output import add_usages
from radixserve.request import Request

pytestmark = pytest.mark.usefixtures("quick_collections")
TEXT = "The parcel came two weeks late, and the screen of the telephone is broken. " * 3
QUESTIONS = [
    Question("The customer is content.", name="content"),
    Question("What is it about?", choices=["food", Option("telephones", "to call"), "parcels"]),
    Question("How angry is the customer?", levels=[("calm", "says thanks"), "cross", "furious"]),
    Question("Is a refund due?", choices=[True, False, "unsure"]),
]


def batch_of(rt: Runtime, questions: object = QUESTIONS) -> DecisionBatch:
    return DecisionBatch(rt._client, TEXT, questions)


@pytest.fixture(params=["demo", "tiny"])
def rt(request: pytest.FixtureRequest, audit: None) -> Runtime:  # noqa: ARG001
    """With a chat template, and without one."""
    rt: Runtime = request.getfixturevalue(request.param)
    return rt


def test_probabilities_are_those_of_the_answers_scores(rt: Runtime) -> None:
    made = rt.decide(TEXT, QUESTIONS)
    assert [decision.name for decision in made] == ["content", None, None, None]
    assert made[0].values == (True, False)
    assert made[3].values == (True, False, "unsure")
    for decision, plan in zip(made, batch_of(rt)._plans, strict=True):
        prompt = next(plan.requests()).token_ids
        scores = rt.score(prompt, [ids.tolist() for ids in plan.answers])
        assert decision.logprobs == pytest.approx([s.logprob for s in scores], abs=1e-3)
        weights = [math.exp(score.logprob) for score in scores]
        shares = [weight / sum(weights) for weight in weights]
        assert decision.probabilities == pytest.approx(shares, abs=1e-3)
        assert math.fsum(decision.probabilities) == pytest.approx(1.0)
        best = max(range(len(shares)), key=shares.__getitem__)
        assert decision.choice == decision.values[best]
        assert decision.confidence == pytest.approx(shares[best], abs=1e-3)
        expected = sum(index * share for index, share in enumerate(shares))
        assert decision.score == pytest.approx(expected, abs=5e-3)


def test_the_input_is_computed_once(rt: Runtime) -> None:
    batch = batch_of(rt)
    usage = add_usages([decision.usage for decision in batch.run()])
    longer = [ids for plan in batch._plans for ids in plan.answers if len(ids) > 1]
    assert batch.num_requests == len(QUESTIONS) + len(longer)
    # The questions begin alike ("\n\n"): tokens that several have in common are computed once, too.
    assert usage.computed_tokens <= batch.num_tokens + sum(len(ids) - 1 for ids in longer)
    assert usage.computed_tokens >= batch.num_tokens - len(QUESTIONS) * 2
    assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
    assert usage.completion_tokens == 0
    again = add_usages([decision.usage for decision in rt.decide(TEXT, QUESTIONS)])
    assert again.prompt_tokens == usage.prompt_tokens
    assert again.computed_tokens <= sum(len(ids) for ids in longer) + len(QUESTIONS)


def test_an_answer_that_begins_another_is_scored_with_its_end(rt: Runtime) -> None:
    (plan,) = batch_of(rt, [Question("Well?", choices=["yes", "yes, but", "no"])])._plans
    ends = {int(ids[-1]) for ids in plan.answers}
    if rt.model.eos_ids:
        assert len(ends) == 1
        assert ends <= set(rt.model.eos_ids)
    (decision,) = rt.decide(TEXT, [plan.question])
    assert math.fsum(decision.probabilities) == pytest.approx(1.0)


def test_four_hundred_questions(tiny: Runtime, audit: None) -> None:  # noqa: ARG001
    questions = [Question(f"Number {number}?", choices=["0", "1"]) for number in range(400)]
    made = tiny.decide("x", questions)
    assert [decision.question for decision in made] == questions
    with pytest.raises(InvalidRequest, match="1 to 400"):
        tiny.decide("x", [*questions, "once more"])


async def ask(rt: Runtime) -> None:
    alone, (first, *_) = await rt.adecide(TEXT, "It rains."), await batch_of(rt).arun(2)
    assert alone[0].question.kind == "predicate"
    assert first.probabilities == pytest.approx(rt.decide(TEXT, QUESTIONS)[0].probabilities)


def test_asyncio_and_several_batches(rt: Runtime) -> None:
    asyncio.run(ask(rt))


def test_messages_and_control_tokens(demo: Runtime, audit: None) -> None:  # noqa: ARG001
    user, said = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
    (last,) = batch_of_input(demo, [user])
    (text,) = batch_of_input(demo, "Hello")
    assert last == text
    (after,) = batch_of_input(demo, [user, said])
    tokenizer = demo.tokenizer
    assert tokenizer is not None
    shown = tokenizer.decode(after, keep_special=True)
    assert shown.index("Hello") < shown.index("Hi") < shown.index("Well?")
    special = [tokenizer.decode([end], keep_special=True) for end in demo.model.eos_ids]
    bad = Question(f"Well?{special[0]}", choices=[f"a{special[0]}", f"b{special[0]}"])
    (plan,) = DecisionBatch(demo._client, f"Hello{special[0]}", [bad])._plans
    ends = set(demo.model.eos_ids)
    prompt = next(plan.requests()).token_ids.tolist()
    counts = [sum(t in ends for t in ids) for ids in (prompt, last)]
    assert counts[0] == counts[1]
    assert not any(ends & set(ids.tolist()) for ids in plan.answers)


def batch_of_input(rt: Runtime, given: object) -> list[list[int]]:
    batch = DecisionBatch(rt._client, given, ["Well?"])
    return [next(plan.requests()).token_ids.tolist() for plan in batch._plans]


def test_answers_that_begin_with_each_other() -> None:
    chance = random.Random(4)
    for _ in range(500):
        answers = [
            np.array([chance.randrange(3) for _ in range(chance.randrange(1, 5))], np.int32)
            for _ in range(chance.randrange(2, 7))
        ]
        pairs = [(a.tolist(), b.tolist()) for a in answers for b in answers if len(a) < len(b)]
        assert _has_prefix(answers) == any(b[: len(a)] == a for a, b in pairs)


def test_requests_of_long_prompts_are_made_a_few_at_a_time(
    demo: Runtime,
    audit: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each holds all tokens of the input."""
    questions = [Question("Which?", choices=["it is so", "it is not so", "no"]) for _ in range(5)]
    batch = DecisionBatch(demo._client, TEXT, questions)
    sizes = []
    submit = demo._client.submit

    def note(requests: Sequence[Request], *rest: Any, **options: Any) -> Any:
        sizes.append(sum(len(request.token_ids) for request in requests))
        return submit(requests, *rest, **options)

    monkeypatch.setattr(demo._client, "submit", note)
    most = 3 * max(plan.length for plan in batch._plans)
    monkeypatch.setattr(decisions, "_TOKENS_AT_ONCE", most)
    assert len(asyncio.run(batch.arun())) == 5
    assert len(sizes) >= batch.num_requests / 3
    assert max(sizes) <= most


def test_wrong_ones(rt: Runtime) -> None:
    for fields, message in (
        ({"instructions": " "}, "instructions must be text"),
        ({"instructions": "a", "choices": ["b"]}, "2 to 255"),
        ({"instructions": "a", "choices": "bc"}, "must be a list"),
        ({"instructions": "a", "choices": [True, "true"]}, "twice"),
        ({"instructions": "a", "levels": [True, False]}, "levels must be texts"),
        ({"instructions": "a", "levels": ["b", "c"], "choices": ["b", "c"]}, "not both"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            Question(**fields)
    for given, questions, message in (
        (TEXT, [], "1 to 400"),
        (TEXT, [5], "must be texts or Questions"),
        (5, ["a"], "input must be text|chat template"),
        ("word " * 9_000, ["a"], "tokens; at most"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            rt.decide(given, questions)
