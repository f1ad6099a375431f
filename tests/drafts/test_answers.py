"""Answers with drafts beside those without, through a Runtime: whatever a request asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from radixserve import Completion, InvalidRequest, Runtime, SamplingParams
from radixserve.drafts import budget
from radixserve.drafts.source import DraftContext, DraftSource
from tests.drafts.sources import ForcedSource, Memory
from tests.runner.on_device import DeviceRuntime

PROMPT = "The json module reads and writes"
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop": {"min_tokens": 12, "stop": [" t", "e"]},
    "stop, in the text": {"min_tokens": 9, "stop": ["e"], "include_stop_str_in_output": True},
    "min_tokens": {"min_tokens": 20, "stop": ["e"]},
    "temperature": {"temperature": 0.9},
    "top_p": {"temperature": 0.9, "top_p": 0.8, "min_p": 0.02},
    "top_k": {"temperature": 1.1, "top_k": 20},
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"temperature": 0.7, "frequency_penalty": 0.8, "presence_penalty": 0.3},
    "bias": {"logit_bias": {5: -2.0, 40: 3.0}},
    "bad words": {"bad_words": ["the", "and"]},
    "logprobs": {"logprobs": 3},
    "logprobs and stop": {"logprobs": 2, "stop": ["s"]},
    "prompt logprobs": {"prompt_logprobs": 1},
    "regex": {"structured": {"regex": "[a-z ]{3,30}"}},
    "json": {"structured": {"json": {"type": "object", "properties": {
        "first": {"type": "integer"}, "second": {"type": "boolean"}},
        "required": ["first", "second"]}}},
    "jump": {"structured": {"regex": "[a-z]{3,9}(abcdef|xyz)", "jump_forward": True}},
    "jump and logprobs": {"logprobs": 1, "structured": {
        "regex": "[a-z]{3,9}(abcdef|xyz)", "jump_forward": True}},
    "digest": {"digest": True, "temperature": 0.8},
    "functions": {"logits_processors": [lambda ids, logits: logits - (len(ids) % 3) * 0.5]},
}  # fmt: skip


ON_DEVICE = ("plain", "stop", "top_p", "frequency", "bad words", "logprobs", "regex", "jump",
             "functions", "digest")  # fmt: skip


@pytest.fixture(scope="module")
def plain() -> Iterator[Runtime]:
    with Runtime("demo", max_draft_tokens=0) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def memory() -> Memory:
    return Memory()


@pytest.fixture(scope="module")
def drafted(memory: Memory) -> Iterator[Runtime]:
    with Runtime("demo", max_draft_tokens=8) as runtime:
        runtime.add_draft_source(ForcedSource("half", memory.guess, 64, 1))
        yield runtime


@pytest.fixture(scope="module")
def on_cpu(plain: Runtime, drafted: Runtime) -> tuple[Runtime, Runtime]:
    """A runtime without drafts, and one with them."""
    return plain, drafted


@pytest.fixture(scope="module")
def on_device(memory: Memory) -> Iterator[tuple[Runtime, Runtime]]:
    """The same on the path of a device."""
    settings: dict[str, Any] = {"num_pages": 2_000, "exact": True}
    with (
        DeviceRuntime("demo", max_draft_tokens=0, **settings) as without,
        DeviceRuntime("demo", max_draft_tokens=8, **settings) as with_drafts,
    ):
        assert with_drafts.resolved_config.graph_sizes
        with_drafts.add_draft_source(ForcedSource("half", memory.guess, 64, 1))
        yield without, with_drafts


def params_of(name: str, **more: Any) -> SamplingParams:
    fields = {"max_tokens": 40, "temperature": 0.0, "seed": 3, **ASKED[name], **more}
    return SamplingParams(**fields)


def values(completion: Completion) -> tuple[Any, ...]:
    return (
        completion.text,
        completion.token_ids,
        completion.finish_reason,
        completion.stop_reason,
        completion.logprobs,
        completion.top_logprobs,
        completion.prompt_logprobs,
        completion.usage.completion_tokens,
        completion.digest,
    )


@pytest.mark.parametrize(
    ("where", "name"),
    [*(("on_cpu", name) for name in ASKED), *(("on_device", name) for name in ON_DEVICE)],
)
def test_they_are_the_same(
    where: str, name: str, request: pytest.FixtureRequest, memory: Memory
) -> None:
    plain, drafted = request.getfixturevalue(where)
    num_asked, params = 3, params_of(name)
    if isinstance(drafted, DeviceRuntime):  # that is slow
        num_asked, params = 1, replace(params, max_tokens=min(params.max_tokens, 20))
    expected = plain.generate(PROMPT, params)
    memory.note(expected.prompt_token_ids.tolist(), expected.token_ids)
    before = drafted.cache_stats()["accepted_draft_tokens"]
    found = [drafted.generate(PROMPT, params) for _ in range(num_asked)]
    assert [values(completion) for completion in found] == [values(expected)] * num_asked
    accepted = drafted.cache_stats()["accepted_draft_tokens"] - before
    assert accepted > 0
    assert sum(completion.usage.accepted_draft_tokens for completion in found) == accepted
    assert sum(completion.usage.drafted_tokens for completion in found) >= accepted
    assert bool(expected.usage.drafted_tokens) == ("jump" in name)
    drafted.check()


def test_they_are_on_where_they_change_no_answer_and_keep_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget, "DEFAULT_DRAFTS", 8)
    with Runtime("demo") as runtime:
        assert "request" in runtime.cache_stats()["drafts"]
    with DeviceRuntime("demo", num_pages=500) as runtime:  # its steps are scheduled ahead
        assert list(runtime.cache_stats()["drafts"]) == ["grammar"]  # for jump_forward
    with Runtime("demo", attention_backend="torch") as runtime:
        assert runtime.resolved_config.inexact
        assert list(runtime.cache_stats()["drafts"]) == ["grammar"]
    with Runtime("demo", attention_backend="torch", max_draft_tokens=4) as runtime:
        assert "request" in runtime.cache_stats()["drafts"]


@pytest.mark.parametrize("name", ["plain", "stop", "logprobs and stop"])
def test_streams(name: str, plain: Runtime, drafted: Runtime, memory: Memory) -> None:
    expected = plain.generate(PROMPT, params_of(name))
    memory.note(expected.prompt_token_ids.tolist(), expected.token_ids)
    chunks = list(drafted.stream(PROMPT, params_of(name)))
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.token_ids
    assert chunks[-1].completion is not None
    assert values(chunks[-1].completion) == values(expected)


def test_samples_and_batches(plain: Runtime, drafted: Runtime) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=5, n=3)
    prompts = [PROMPT, "Lists are", "A dict is"]
    expected = plain.generate(prompts, params)
    for _ in range(2):
        found = drafted.generate(prompts, params)
        assert [[one.token_ids for one in group] for group in found] == [
            [one.token_ids for one in group] for group in expected
        ]


def test_a_prediction_is_counted(plain: Runtime) -> None:
    """By its tokens in the answer, whether there are drafts or not."""
    params = SamplingParams(max_tokens=30, temperature=0.0)
    answer = plain.generate(PROMPT, params)
    predicted = [*answer.token_ids[:10], 7, *answer.token_ids[11:], 8, 9]
    with Runtime("demo", max_draft_tokens=8) as runtime:
        for own in (plain, runtime):
            given = SamplingParams(max_tokens=30, temperature=0.0, prediction=predicted)
            completion = own.generate(PROMPT, given)
            assert completion.token_ids == answer.token_ids
            assert completion.usage.accepted_prediction_tokens == len(answer.token_ids) - 1
            assert completion.usage.rejected_prediction_tokens == 3
        drafts = runtime.cache_stats()["drafts"]["prediction"]
        assert drafts["accepted_tokens"] > 0
        text = SamplingParams(max_tokens=30, temperature=0.0, prediction=answer.text)
        usage = runtime.generate(PROMPT, text).usage
        assert usage.accepted_prediction_tokens > 20


@pytest.mark.parametrize(
    ("prediction", "words"),
    [
        (5, "prediction must be text or a list of token ids, got 5"),
        ([-1], "prediction"),
        ([10**7], "prediction list [10000000] are out of range"),
    ],
)
def test_bad_predictions(prediction: Any, words: str, plain: Runtime) -> None:
    with pytest.raises(InvalidRequest, match=words.replace("[", r"\[").replace("]", r"\]")):
        plain.generate(PROMPT, SamplingParams(prediction=prediction))


def test_beams_take_no_prediction(plain: Runtime) -> None:
    with pytest.raises(InvalidRequest, match="prediction"):
        plain.beam_search(PROMPT, params=SamplingParams(max_tokens=4, prediction="a"))


class Failing(DraftSource):
    name = "failing"
    is_sure = True

    def draft(self, context: DraftContext, most: int) -> Sequence[int]:
        del context, most
        raise RuntimeError("no guess")


def test_a_failing_source_is_ended(plain: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_tokens=10, temperature=0.0)
    with Runtime("demo", max_draft_tokens=8) as runtime:
        runtime.add_draft_source(Failing())
        for _ in range(2):
            found = runtime.generate(PROMPT, params)
            assert found.token_ids == plain.generate(PROMPT, params).token_ids
        assert "failing" not in runtime.cache_stats()["drafts"]
    assert caplog.text.count("the drafts of failing have failed") == 1


def guess_11(context: DraftContext, most: int) -> Sequence[int]:
    del context
    return [11] * most


def test_rejected_tokens_are_in_no_cache() -> None:
    """After an answer with wrong drafts the tree has the tokens that it has without."""
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    trees = []
    for most in (0, 8):
        with Runtime("demo", max_draft_tokens=most) as runtime:
            runtime.add_draft_source(ForcedSource("right", guess_11, 64, 2))
            runtime.generate(PROMPT, params)
            trees.append(runtime.cache_tree(64)["namespaces"])
            drafted = runtime.cache_stats()["drafted_tokens"]
            assert (drafted > 0) == (most > 0)
    assert without_times(trees[0]) == without_times(trees[1])


def without_times(tree: Any) -> Any:
    if isinstance(tree, dict):
        left_out = ("last_use", "pages")
        return {name: without_times(part) for name, part in tree.items() if name not in left_out}
    return [without_times(part) for part in tree] if isinstance(tree, list) else tree
