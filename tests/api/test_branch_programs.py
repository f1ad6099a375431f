"""Branches beside cold runs and transformers: resent, forked, and in random programs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from pathlib import Path
from typing import Any

import pytest

from radixserve import Branch, Completion, Runtime
from radixserve.request import BeamParams
from tests.api.test_branch import GREEDY, greedy_params, random_ids
from tests.beams.beam_reference import search
from tests.checkpoints import all_logprobs, greedy, load_reference
from tests.pacing import wait_until

pytestmark = pytest.mark.usefixtures("quick_collections", "collected")

TOLERANCE = 1e-4  # of logprobs
TIE = 1e-5  # best and second best closer than this: float32 cannot tell


class Model:
    """Cold answers by transformers, up to where the best two tokens are too close to call."""

    def __init__(self, folder: Path) -> None:
        self._model = load_reference(folder)

    def check_beams(self, prompt: list[int], outs: list[Completion], width: int) -> None:
        """The answers of `beam_search` with a length penalty of 1 and without end tokens.

        Most are compared as a whole, the others by their scores.
        """
        beams = BeamParams(width=width)
        gaps: list[float] = []
        num_tokens = len(outs[0].token_ids)
        expected = search(self._last_logprobs, prompt, beams, frozenset(), num_tokens, gaps=gaps)
        if min(gaps) > TIE:
            assert [out.token_ids for out in outs] == [one.token_ids for one in expected]
        scores = [one.score for one in expected]
        assert [out.score for out in outs] == pytest.approx(scores, abs=TOLERANCE)

    def _last_logprobs(self, tokens: list[int]) -> Any:
        return all_logprobs(self._model, tokens)[-1].numpy()

    def check(self, prompt: list[int], out: Completion) -> None:
        """Greedy tokens and their logprobs."""
        count = len(out.token_ids)
        table = all_logprobs(self._model, [*prompt, *out.token_ids])[len(prompt) - 1 : -1]
        best = table.topk(2, -1)
        assert out.logprobs is not None
        for at in range(count):
            if float(best.values[at, 0] - best.values[at, 1]) < TIE:
                return
            assert out.token_ids[at] == int(best.indices[at, 0]), f"token {at}"
            assert abs(out.logprobs[at] - float(best.values[at, 0])) < TOLERANCE


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model(folder)


def agree(one: Completion, other: Completion) -> None:
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)


@pytest.mark.pairs
@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("is_tight", [False, True], ids=["roomy", "tight"])
def test_fork_resend_and_cold_run_agree(
    folder: Path, model: Model, page_size: int, is_tight: bool
) -> None:
    num_pages = (224 if is_tight else 4096) // page_size
    with (
        Runtime(str(folder), page_size=page_size, num_pages=num_pages) as rt,
        Runtime(str(folder), page_size=page_size, num_pages=4096, cache="off") as cold,
    ):
        for seed in range(4):
            ids = random_ids(37 + 11 * seed, seed)
            with rt.branch(ids) as root:
                root.generate(greedy_params(5 + seed))
                (fork,) = root.fork()
                fork.truncate(len(ids) + 2)
                fork.extend(random_ids(3, seed))
                first = fork.generate(greedy_params(9))
                fork.truncate(len(ids) + 4)
                if is_tight:  # others need the room
                    rt.generate([random_ids(90, 50 + seed + i) for i in range(3)], GREEDY)
                before = fork.tokens.tolist()
                forked = fork.fork()[0].generate(GREEDY)
                resent = rt.generate(before, GREEDY)
                agree(forked, resent)
                agree(forked, cold.generate(before, GREEDY))
                model.check(before, forked)
                agree(fork.generate(GREEDY), resent)
                prompt = [*root.tokens.tolist()[: len(ids) + 2], *random_ids(3, seed)]
                agree(first, cold.generate(prompt, greedy_params(9)))
                rt.check()
        assert rt.cache_stats()["evicted_tokens"] > 0 or not is_tight


@pytest.mark.parametrize(
    ("page_size", "num_tokens", "cache"),
    [(1, 4096, "radix"), (2, 300, "radix"), (16, 320, "radix"), (16, 320, "hash")],
)  # fmt: skip
@pytest.mark.parametrize("num_steps", [80, pytest.param(20_000, marks=pytest.mark.long)])
@pytest.mark.timeout(1800)
def test_a_random_program(
    folder: Path, model: Model, page_size: int, num_tokens: int, cache: str, num_steps: int
) -> None:
    """Branches come, move, and go; every answer is the model's own, every page has one owner."""
    settings: dict[str, Any] = {"page_size": page_size, "num_pages": num_tokens // page_size}
    with Runtime(str(folder), cache=cache, max_seq_len=200, **settings) as rt:
        program = Program(rt, model, random.Random(page_size + num_tokens))
        for _ in range(num_steps):
            program.step()
            rt.check()
            assert rt.cache_stats()["sessions"] <= len(program.branches) + 1  # a stream's, for now
        program.branches.clear()
        gc.collect()
        wait_until(lambda: rt.cache_stats()["running"] == 0)
        rt.check()
        stats = rt.cache_stats()
        assert stats["sessions"] == stats["pages_private"] == stats["pages_locked"] == 0
        assert stats["evicted_tokens"] > 0 or num_tokens > 1000
        assert stats["aborted"] > 0


class Program:
    """Random acts on up to a dozen branches."""

    def __init__(self, rt: Runtime, model: Model, rng: random.Random) -> None:
        self.rt, self.model, self.rng = rt, model, rng
        self.branches: list[Branch] = []
        self.acts = [self.fork, self.extend, self.generate, self.generate, self.leave_stream,
                     self.truncate, self.release, self.search, self.search_beside,
                     self.abort_search]  # fmt: skip

    def step(self) -> None:
        if not self.branches:
            ids = random_ids(self.rng.randint(1, 60), self.rng.randrange(5))
            self.branches.append(self.rt.branch(ids))
        branch = self.rng.choice(self.branches)
        act = self.rng.choice(self.acts)
        if branch.length < 150 or act in (self.fork, self.truncate, self.release):
            act(branch)

    def fork(self, branch: Branch) -> None:
        if len(self.branches) < 10:
            self.branches += branch.fork(self.rng.randint(1, 3))

    def extend(self, branch: Branch) -> None:
        count = self.rng.choice([1, 2, 7, 20])
        branch.extend([self.rng.randrange(256) for _ in range(count)])

    def generate(self, branch: Branch) -> None:
        prompt = branch.tokens.tolist()
        out = branch.generate(greedy_params(self.rng.randint(1, 9)))
        self.model.check(prompt, out)
        assert out.usage.cached_tokens + out.usage.computed_tokens == len(prompt)
        assert branch.tokens.tolist() == [*prompt, *out.token_ids]

    def leave_stream(self, branch: Branch) -> None:
        length, seen = branch.length, 0
        for chunk in branch.stream(greedy_params(30)):
            seen += len(chunk.token_ids)
            if seen >= self.rng.randint(1, 6):
                break
        assert branch.length == length + seen

    def search(self, branch: Branch) -> None:
        """The beams of a branch; it takes the best one."""
        prompt, width = branch.tokens.tolist(), self.rng.randint(2, 4)
        outs = self.rt.beam_search(prompt, width, self.rng.randint(1, 5), ignore_eos=True)
        self.model.check_beams(prompt, outs, width)
        usage = outs[0].usage
        assert usage.cached_tokens + usage.computed_tokens == len(prompt)
        branch.extend(outs[0].token_ids)

    def search_beside(self, branch: Branch) -> None:
        """Two searches and samples at once."""
        prompt, width, count = (
            branch.tokens.tolist(),
            self.rng.randint(2, 5),
            self.rng.randint(1, 3),
        )
        other = self.rng.choice(self.branches).tokens.tolist()

        async def run() -> list[Any]:
            return await asyncio.gather(
                self.rt.abeam_search(prompt, width, count, ignore_eos=True),
                self.rt.abeam_search(other, width, 4, stop_token_ids=[7, 9, 200]),
                self.rt.agenerate(other[:-1] or other, greedy_params(count, n=2)),
            )

        searched, _, samples = asyncio.run(run())
        self.model.check_beams(prompt, searched, width)
        for one in samples:
            self.model.check(other[:-1] or other, one)

    def abort_search(self, branch: Branch) -> None:
        """The search of a branch is given up at any time."""
        prompt, delay = branch.tokens.tolist(), self.rng.choice([0.0, 0.001, 0.003, 0.01])

        async def run() -> None:
            task = asyncio.ensure_future(self.rt.abeam_search(prompt, 4, 60, ignore_eos=True))
            await asyncio.sleep(delay)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        asyncio.run(run())

    def truncate(self, branch: Branch) -> None:
        branch.truncate(self.rng.randint(1, branch.length))

    def release(self, branch: Branch) -> None:
        self.branches.remove(branch)
        if self.rng.random() < 0.5:
            branch.release()


def test_the_whole_is_what_transformers_generates(rt: Runtime, folder: Path) -> None:
    ids = random_ids(30, 9)
    with rt.branch(ids) as branch:
        for count in (1, 4, 7):
            branch.generate(greedy_params(count))
        assert branch.tokens.tolist() == greedy(load_reference(folder), ids, 12)
