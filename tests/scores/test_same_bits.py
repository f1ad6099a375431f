"""What is read from the tree is what was computed, to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from radixserve import InvalidRequest, Runtime, SamplingParams

TEXT = "The json module provides a way to read and write files of the format."


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    with Runtime("demo", num_pages=4000) as rt:
        yield rt
        rt.check()


def scored(rt: Runtime, num_tops: int = 1, start: int = 0) -> tuple[list[object], int]:
    params = SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=num_tops, logprob_start_len=start
    )
    out = rt.generate(TEXT, params)
    return [out.prompt_logprobs, out.prompt_ranks, out.prompt_top_logprobs], (
        out.usage.computed_tokens
    )


def test_a_prompt(rt: Runtime) -> None:
    rt.flush_cache()
    cold, num_cold = scored(rt)
    warm, num_warm = scored(rt)
    assert (num_cold, num_warm) == (len(rt.tokenize(TEXT)), 1)
    assert warm == cold


def test_an_answer_is_scored_by_its_own_log_probabilities(rt: Runtime) -> None:
    """As a rollout is, or an answer by a reward model: the last token alone is computed."""
    rt.flush_cache()
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, logprobs=0, ignore_eos=True)
    out = rt.generate(TEXT, params)
    prompt = rt.tokenize(TEXT)
    (read,) = rt.score(prompt, [out.token_ids])
    assert read.usage.computed_tokens == 1
    assert read.logprobs == out.logprobs
    rt.flush_cache()
    (computed,) = rt.score(prompt, [out.token_ids])
    assert computed.usage.computed_tokens == len(prompt) + len(out.token_ids) - 1
    assert computed.logprobs == read.logprobs


def test_from_a_position_on(rt: Runtime) -> None:
    rt.flush_cache()
    whole, _ = scored(rt)
    rt.flush_cache()
    length = len(rt.tokenize(TEXT))
    rt.generate(TEXT, SamplingParams(max_tokens=1))
    found, num_computed = scored(rt, 1, length - 4)
    assert num_computed == 4
    for mine, all_of_them in zip(found, whole, strict=True):
        assert mine == [None] * (length - 3) + all_of_them[length - 3 :]  # type: ignore[index]
    nothing, _ = scored(rt, 1, length + 5)
    assert nothing[0] == [None] * length


def test_wrong_positions() -> None:
    with pytest.raises(InvalidRequest, match="needs prompt_logprobs"):
        SamplingParams(logprob_start_len=3)
    with pytest.raises(InvalidRequest, match="logprob_start_len must be"):
        SamplingParams(logprob_start_len=-1, prompt_logprobs=0)
