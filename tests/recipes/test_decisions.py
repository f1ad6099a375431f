"""Decisions: the probabilities are those of the answers' scores, the input is computed once."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from radixserve import InvalidRequest, Option, Question, Runtime
from radixserve.api.client import EngineClient
from radixserve.output import add_usages
from radixserve.recipes import decisions
from radixserve.recipes.decisions import DecisionBatch, _has_prefix
from radixserve.request import Request
from radixserve.text.decision_prompts import DecisionPrompts

pytestmark = pytest.mark.usefixtures("quick_collections")
TEXT = "The parcel came two weeks late, and the screen of the telephone is broken. " * 3
QUESTIONS = [
    Question("The customer is content.", name="content"),
    Question("What is it about?", choices=["food", Option("telephones", "to call"), "parcels"]),
    Question("How angry is the customer?", levels=[("calm", "says thanks"), "cross", "furious"]),
    Question("Is a refund due?", choices=[True, False, "unsure"]),
]


class Prompts(NamedTuple):
    """Of each question its prompt, and the token ids of its answers."""

    prompts: list[list[int]]
    answers: list[list[list[int]]]


def prompts_of(rt: Runtime, questions: Sequence[Question], given: object = TEXT) -> Prompts:
    assert rt.tokenizer is not None
    made = DecisionPrompts.read(rt.tokenizer, given, questions)
    answers = [[ids.tolist() for ids in each] for each in made.answers]
    return Prompts([made.head + tail for tail in made.tails], answers)


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
    for decision, prompt, answers in zip(made, *prompts_of(rt, QUESTIONS), strict=True):
        scores = rt.score(prompt, answers)
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
    batch = DecisionBatch(rt.client, TEXT, QUESTIONS)
    usage = add_usages([decision.usage for decision in batch.run()])
    longer = [ids for each in prompts_of(rt, QUESTIONS).answers for ids in each if len(ids) > 1]
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
    question = Question("Well?", choices=["yes", "yes, but", "no"])
    (prompt,), (answers,) = prompts_of(rt, [question])
    (decision,) = rt.decide(TEXT, [question])
    assert math.fsum(decision.probabilities) == pytest.approx(1.0)
    ends = [[token_id] for token_id in rt.model.eos_ids] or [[]]
    scored = [rt.score(prompt, [ids + end for ids in answers]) for end in ends]
    expected = [pytest.approx([score.logprob for score in each], abs=1e-3) for each in scored]
    assert any(decision.logprobs == logprobs for logprobs in expected)


def test_four_hundred_questions(tiny: Runtime, audit: None) -> None:  # noqa: ARG001
    questions = [Question(f"Number {number}?", choices=["0", "1"]) for number in range(400)]
    made = tiny.decide("x", questions)
    assert [decision.question for decision in made] == questions
    with pytest.raises(InvalidRequest, match="1 to 400"):
        tiny.decide("x", [*questions, "once more"])


async def ask(rt: Runtime) -> None:
    alone = await rt.adecide(TEXT, "It rains.")
    first, *_ = await DecisionBatch(rt.client, TEXT, QUESTIONS).arun(2)
    assert alone[0].question.kind == "predicate"
    assert first.probabilities == pytest.approx(rt.decide(TEXT, QUESTIONS)[0].probabilities)


def test_asyncio_and_several_batches(rt: Runtime) -> None:
    asyncio.run(ask(rt))


def test_messages_and_control_tokens(demo: Runtime, audit: None) -> None:  # noqa: ARG001
    user, said = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
    well = [Question("Well?")]
    (last,), _ = prompts_of(demo, well, [user])
    (text,), _ = prompts_of(demo, well, "Hello")
    assert last == text
    (after,), _ = prompts_of(demo, well, [user, said])
    tokenizer = demo.tokenizer
    assert tokenizer is not None
    shown = tokenizer.decode(after, keep_special=True)
    assert shown.index("Hello") < shown.index("Hi") < shown.index("Well?")
    special = [tokenizer.decode([end], keep_special=True) for end in demo.model.eos_ids]
    bad = Question(f"Well?{special[0]}", choices=[f"a{special[0]}", f"b{special[0]}"])
    (prompt,), (answers,) = prompts_of(demo, [bad], f"Hello{special[0]}")
    ends = set(demo.model.eos_ids)
    counts = [sum(t in ends for t in ids) for ids in (prompt, last)]
    assert counts[0] == counts[1]
    assert not any(ends & set(ids) for ids in answers)


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
    batch = DecisionBatch(demo.client, TEXT, questions)
    sizes = []
    submit = EngineClient.submit

    def note(client: EngineClient, requests: Sequence[Request], **options: Any) -> Any:
        sizes.append(sum(len(request.token_ids) for request in requests))
        return submit(client, requests, **options)

    monkeypatch.setattr(EngineClient, "submit", note)
    made = prompts_of(demo, questions)
    lens = [len(prompt) + max(map(len, ids)) for prompt, ids in zip(*made, strict=True)]
    most = 3 * max(lens)
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
