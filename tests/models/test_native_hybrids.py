"""Native families whose layers have states or several shapes, in every case at three page sizes and
five chunk sizes: transformers' tokens and log-probabilities, and one answer's bits in all of them.

The cases: cold, warm, together, without a cache, evicted, preempted, forked, beams, scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from radixserve import Runtime, SamplingParams
from radixserve_kernels.cpu_ops import unsupported_reason
from tests.checkpoints import (
    CONVOLUTIONS,
    DELTA_NETS,
    RECURRENT,
    SHAPED,
    STATE_SPACES,
    all_logprobs,
    load_reference,
    make_checkpoint,
)

pytestmark = pytest.mark.skipif(
    bool(unsupported_reason(torch.float32)), reason="there are no CPU kernels here"
)
PAGE_SIZES, CHUNK_SIZES = (1, 4, 16), (1, 7, 33, 64, 512)
SHORT = ((1, 512), (4, 1), (16, 33))  # of the sample; the other pairs are long runs
KINDS = (DELTA_NETS, STATE_SPACES, CONVOLUTIONS, SHAPED)  # of layers
NUM_NEW = 12
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, digest=True, logprobs=0
)
RNG = np.random.default_rng(8)
PROMPT = RNG.integers(3, 250, 90).tolist()
PROMPTS = [PROMPT, *(RNG.integers(3, 250, length).tolist() for length in (60, 61, 62, 63, 64))]
CROWD = [[*PROMPT[:60], token] for token in range(10, 16)]  # are computed at once, when cached
BRIEF = [[5, 6, token] for token in range(20, 26)]
NUM_LONG = 40  # tokens: all answers to BRIEF do not fit into TIGHT
LONG_ANSWERS = SamplingParams(temperature=0.0, max_tokens=NUM_LONG, ignore_eos=True, digest=True)
FORKS = ([9, 10], [11])
TIGHT = 196  # tokens of a pool that has no room for all answers to either
SLACK = 32  # tokens before a prompt's end that a checkpoint or a window may leave uncached


class Answer(NamedTuple):
    """To one prompt."""

    tokens: list[int]
    digest: str | None


@dataclass
class Reference:
    """What transformers says of a checkpoint, and the bits of our answers alone."""

    folder: Path

    @cached_property
    def model(self) -> Any:
        return load_reference(self.folder)

    @cached_property
    def answers(self) -> list[Answer]:
        """To PROMPTS and CROWD."""
        return self.alone([*PROMPTS, *CROWD], PARAMS)

    @cached_property
    def first_logprobs(self) -> torch.Tensor:
        """Of the answer to PROMPT."""
        return self.logprobs(self.answers[0].tokens)

    @cached_property
    def long_answers(self) -> list[Answer]:
        """To BRIEF."""
        return self.alone(BRIEF, LONG_ANSWERS)

    @cached_property
    def forked(self) -> list[Answer]:
        """To each of FORKS, which follows the first answer."""
        return self.alone([[*PROMPT, *self.answers[0].tokens, *more] for more in FORKS], PARAMS)

    def alone(self, prompts: list[list[int]], params: SamplingParams) -> list[Answer]:
        """Our answers to one prompt at a time and without a cache; each of their tokens is the
        first choice of transformers after those before it."""
        with self.start(cache="off") as rt:
            found = [rt.generate([prompt], params)[0] for prompt in prompts]
        for prompt, answer in zip(prompts, found, strict=True):
            table = all_logprobs(self.model, [*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
            assert table.argmax(-1).tolist() == list(answer.token_ids)
        return [Answer(list(one.token_ids), one.digest) for one in found]

    def start(self, **settings: Any) -> Runtime:
        options = {"num_pages": 4_000, "dtype": "float32", **settings}
        return Runtime(str(self.folder), **options)

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Of tokens after PROMPT."""
        table = all_logprobs(self.model, [*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
        return table.gather(1, torch.tensor(tokens)[:, None])[:, 0]

    def check(self, answers: list[Any], start: int = 0) -> None:
        """Those of PROMPTS and CROWD from `start` on."""
        for answer, expected in zip(answers, self.answers[start:], strict=False):
            assert Answer(answer.token_ids, answer.digest) == expected
        if start == 0:
            own = torch.tensor(answers[0].logprobs)
            assert torch.allclose(own, self.first_logprobs, atol=2e-5)


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return cache(lambda family: Reference(make_checkpoint(tmp_path_factory.mktemp(family), family)))


def sample() -> set[tuple[str, int, int]]:
    """Of each kind of layers every pair of SHORT, and of each family at least one."""
    return {
        (families[n % len(families)], *SHORT[n % len(SHORT)])
        for families in KINDS
        for n in range(max(len(families), len(SHORT)))
    }


def cases() -> list[Any]:
    """(family, page size, chunk size)."""
    short = sample()
    return [
        pytest.param(*case, marks=() if case in short else pytest.mark.long)
        for case in product((*RECURRENT, *SHAPED), PAGE_SIZES, CHUNK_SIZES)
    ]


@pytest.mark.parametrize(("family", "page_size", "chunk"), cases())
def test_every_case(
    family: str, page_size: int, chunk: int, find: Callable[[str], Reference]
) -> None:
    reference = find(family)
    sizes = {"page_size": page_size, "chunked_prefill_size": chunk}
    states = {"checkpoint_interval": 16} if family in RECURRENT else {}
    with reference.start(**sizes, **states) as rt:
        assert rt.model.is_native
        assert not rt.resolved_config.inexact
        cold, warm = rt.generate([PROMPT], PARAMS)[0], rt.generate([PROMPT], PARAMS)[0]
        reference.check([cold])
        reference.check([warm])
        assert cold.usage.cached_tokens == 0
        assert warm.usage.cached_tokens >= len(PROMPT) - SLACK
        reference.check(rt.generate(PROMPTS, PARAMS))
        check_forks(rt, reference)
        check_scores(rt, reference)
        check_beams(rt, reference)
        rt.check()
    with reference.start(**sizes, cache="off") as rt:
        reference.check(rt.generate(PROMPTS, PARAMS))
    few = {"num_states": 12} if family in RECURRENT else {}
    pool = {"num_pages": TIGHT // page_size, "max_running_requests": 8}
    with reference.start(**sizes, **states, **few, **pool) as rt:
        for _ in range(2):
            reference.check(rt.generate(PROMPTS, PARAMS))
        rt.generate([PROMPT[:60]], PARAMS)
        reference.check(rt.generate(CROWD, PARAMS), start=len(PROMPTS))
        before = rt.cache_stats()["preemptions"]
        answers = rt.generate(BRIEF, LONG_ANSWERS)
        assert [Answer(one.token_ids, one.digest) for one in answers] == reference.long_answers
        stats = rt.cache_stats()
        assert stats["evicted_tokens"] > 0
        assert stats["preemptions"] > before  # at chunks of 1 as well, as prompts are brief
        assert stats.get("evicted_checkpoints", 0) > 0 or family in SHAPED
        rt.check()


def check_forks(rt: Runtime, reference: Reference) -> None:
    with rt.branch(PROMPT) as root:
        assert root.generate(PARAMS).token_ids == reference.answers[0].tokens
        for fork, more, expected in zip(root.fork(2), FORKS, reference.forked, strict=True):
            fork.extend(more)
            assert fork.generate(PARAMS).token_ids == expected.tokens
            fork.release()


def check_scores(rt: Runtime, reference: Reference) -> None:
    candidates = [PROMPT[:12], PROMPT[5:9]]
    for candidate, score in zip(candidates, rt.score(PROMPT, candidates), strict=True):
        expected = reference.logprobs(candidate)
        assert torch.allclose(expected, torch.tensor(score.logprobs), atol=2e-5)


def check_beams(rt: Runtime, reference: Reference) -> None:
    beams = rt.beam_search(PROMPT, beam_width=3, max_tokens=6)
    assert len({tuple(beam.token_ids) for beam in beams}) == 3
    for beam in beams:
        expected = float(reference.logprobs(list(beam.token_ids)).sum())
        assert beam.cumulative_logprob == pytest.approx(expected, abs=1e-4)
