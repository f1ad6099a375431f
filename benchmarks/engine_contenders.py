"""Who takes part: the engines behind one small interface, and how each is opened.

radix, hash, off   radixserve's `Runtime` with that cache (hash: blocks of 16 tokens)
transformers       `generate` on a batch padded on the left; sequential: on one prompt
copied             `generate` on copies of a cache that holds the shared prefix; in chats, on
                   the session's own cache: what an application does by hand
continuous         transformers' continuous batching with its prefix cache
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine_workloads import Workload


@dataclass(frozen=True)
class Answer:
    """A request's tokens, and the seconds from its submission to the first of them."""

    token_ids: list[int]
    first_s: float


class Contender(Protocol):
    """One engine, open for one workload. `num_prefilled`: prompt tokens computed since `reset`."""

    num_prefilled: int

    def serve(self, prompts: list[list[int]], sessions: Sequence[int]) -> list[Answer]:
        """Answer prompts that are sent at the same moment; `sessions` says who asks."""

    def reset(self) -> None:
        """Forget every prompt; never timed."""

    def stats(self) -> dict[str, float]:
        """Counters since it was opened that only grow; of engines that tell the seconds spent in
        each part of their steps, also these: steps, schedule_s ..."""

    def close(self) -> None: ...


class Unavailable(Exception):
    """This engine cannot run here; the message says why."""


@dataclass(frozen=True)
class Job:
    """What a contender is opened for."""

    folder: Path  # the checkpoint
    dtype: str
    workload: Workload  # lengths and rounds; the tokens may be others

    @property
    def num_tokens(self) -> int:
        """Prompts and outputs of all requests: room for a cache that shares nothing."""
        total, length = 0, 0
        for sessions in self.workload.rounds:
            length += len(sessions[0]) + self.workload.num_new
            total += length * len(sessions)
        return total


def open_contender(name: str, job: Job) -> Contender:
    """Load the model. Raises Unavailable."""
    return _OPENERS[name](job)


def _ours(cache: str) -> Callable[[Job], Contender]:
    def opened(job: Job) -> Contender:
        from engine_ours import Ours

        return Ours(job, cache)

    return opened


def _generate(job: Job) -> Contender:
    from engine_peers import Generate

    return Generate(job)


def _copied(job: Job) -> Contender:
    from engine_peers import CopiedPrefix

    return CopiedPrefix(job)


def _continuous(job: Job) -> Contender:
    from engine_peers import Continuous

    return Continuous(job)


_OPENERS: dict[str, Callable[[Job], Contender]] = {
    "radix": _ours("radix"),
    "hash": _ours("hash"),
    "off": _ours("off"),
    "transformers": _generate,
    "copied": _copied,
    "continuous": _continuous,
}
NAMES = tuple(_OPENERS)
