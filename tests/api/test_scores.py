"""Scores of continuations against the reference model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixserve import InvalidRequest, Runtime, SamplingParams
from tests.checkpoints import all_logprobs, load_reference, make_checkpoint

PROMPT = list(range(5, 45))
CANDIDATES = [[7], [8, 9, 10], [7, 7, 7, 7, 7], [8, 9, 11]]


@pytest.fixture(scope="module", params=["llama", "gpt_neox"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("scores"), request.param, with_tokenizer=True)


@pytest.fixture(params=[(1, 512), (16, 512), (1, 3), (16, 7)], ids=str)
def rt(folder: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    page_size, chunked_prefill_size = request.param
    pages = 320 // page_size
    with Runtime(
        str(folder), num_pages=pages, page_size=page_size, chunked_prefill_size=chunked_prefill_size
    ) as rt:
        yield rt
        rt.check()
        assert rt.cache_stats()["sequences"] == 0


def expected(folder: Path, prompt: list[int], candidate: list[int]) -> list[float]:
    logprobs = all_logprobs(load_reference(folder), prompt + candidate)
    start = len(prompt) - 1
    return [float(logprobs[start + i, token]) for i, token in enumerate(candidate)]


def test_equal_to_the_reference_cold_and_warm(folder: Path, rt: Runtime) -> None:
    for _ in range(2):
        for one, candidate in zip(rt.score(PROMPT, CANDIDATES), CANDIDATES, strict=True):
            assert one.token_ids == candidate
            assert one.logprobs == pytest.approx(expected(folder, PROMPT, candidate), abs=1e-4)
            assert one.logprob == pytest.approx(math.fsum(one.logprobs))


def test_beside_requests_that_go_on(rt: Runtime) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
    out = rt.generate(PROMPT, params)
    (score,) = rt.score(PROMPT, [out.token_ids])
    assert score.logprobs == pytest.approx(out.logprobs, abs=1e-4)
    assert rt.generate(PROMPT + out.token_ids[:3], params).token_ids[:3] == out.token_ids[3:]


def test_a_branch(folder: Path, rt: Runtime) -> None:
    with rt.branch(PROMPT) as branch:
        scores = branch.score(CANDIDATES)
        assert branch.length == len(PROMPT)
        assert [s.logprob for s in scores] == pytest.approx(
            [math.fsum(expected(folder, PROMPT, c)) for c in CANDIDATES], abs=1e-3
        )


def test_text(rt: Runtime) -> None:
    yes, no = rt.score("hello", ["yes", "no"])
    assert rt.tokenizer is not None
    assert yes.token_ids == rt.tokenizer.encode_more("yes")
    assert len(no.logprobs) == len(no.token_ids)


def test_wrong_ones(rt: Runtime) -> None:
    for candidates, message in (
        ([], "candidates must be"),
        ("yes", "candidates must be"),
        ([[]], "no tokens"),
        ([[10**6]], "out of range"),
        ([[5] * 10_000], "longer than"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            rt.score(PROMPT, candidates)
