"""What a fork of a long branch costs: microseconds, and bytes of K and V that are moved."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

from branch_players import DTYPE, random_prompt

from radixserve import Runtime, SamplingParams
from radixserve.api.branch import generate_all
from radixserve.engine.engine import ModelRunner
from radixserve.schedule import ModelRunnerOutput, SchedulerOutput

ROOM = 1_024  # tokens beside the branch
FORKS = 8  # that go on, each another way


class _Counting:
    """A runner that counts what it is told to copy."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_pages = runner.num_pages
        self.num_copied = 0  # tokens

    @property
    def overlap_depth(self) -> int:
        return self._runner.overlap_depth

    def launch(self, schedule: SchedulerOutput) -> Any:
        self.num_copied += int(schedule.cow_copies[:, 2].sum())
        return self._runner.launch(schedule)

    def collect(self, pending: Any) -> ModelRunnerOutput:
        return self._runner.collect(pending)

    def close(self) -> None:
        self._runner.close()


def measure_forks(folder: Path, length: int, page_size: int, repeats: int) -> dict[str, float]:
    """Forking a branch of `length` tokens whose K and V is cached, then going on from its forks."""
    pages = (length + ROOM) // page_size
    with Runtime(folder, dtype=DTYPE, page_size=page_size, num_pages=pages) as rt:
        engine = rt._worker._engine  # between steps only: nothing runs now
        counting = _Counting(engine._runner)
        engine._runner = counting
        each = rt.memory.kv_bytes_per_token
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        with rt.branch(list(random_prompt(length - 1, rt.model.vocab_size, seed=0))) as root:
            computed = root.generate(params).usage.computed_tokens
            root.truncate(length)
            steps, before = rt.cache_stats()["steps"], counting.num_copied
            kept = []  # until all are made: letting go is not what is measured
            samples = []
            for _ in range(repeats):
                start = time.perf_counter()
                (fork,) = root.fork()
                samples.append((time.perf_counter() - start) * 1e6)
                kept.append(fork)
            by_forks = counting.num_copied - before
            assert rt.cache_stats()["steps"] == steps, "a fork asks nothing of the engine"
            kids, kept = kept[:FORKS], []
            for number, kid in enumerate(kids):
                kid.extend([number])
            outs = generate_all(kids, params)
            after = counting.num_copied - before - by_forks
            return {
                "page_size": page_size,
                "fork_us": median(samples),
                "computed_before": computed,
                "moved_by_forks": by_forks * each,
                "computed_after": sum(out.usage.computed_tokens for out in outs),
                "moved_after": after * each,
                "bytes_per_token": each,
            }
