"""The engines behind one small interface, and how each is opened.

radix, hash, off   radixserve's `Runtime` with that cache (hash: blocks of 16 tokens)
transformers       `generate` on a batch padded on the left; sequential: on one prompt
copied             `generate` on copies of a cache that holds the shared prefix; in chats, on
                   the session's own cache: what an application does by hand
continuous         transformers' continuous batching with its prefix cache
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Answer:
    """A request's tokens, and the seconds from its submission to the first of them."""

    token_ids: list[int]
    first_s: float = 0.0
    score: float = 0.0  # of a beam
    prompt: tuple[int, ...] = ()  # of a chat's turn, the whole history


class Engine(Protocol):
    """One engine with a model loaded.

    `num_computed`: prompt tokens computed since `reset`, padding included.
    """

    num_computed: int

    def serve(
        self, prompts: list[list[int]], sessions: Sequence[int], num_new: int
    ) -> list[Answer]:
        """Answer prompts that are sent at the same moment, each of one session."""

    def reset(self) -> None:
        """Forget every prompt; never timed."""

    def stats(self) -> dict[str, float]:
        """Counters since it was opened that only grow; of engines that tell the seconds spent in
        each part of their steps, also these: steps, schedule_s ..."""

    def close(self) -> None: ...


class Work(Protocol):
    """What an engine is asked; the properties are the room that it needs for that."""

    @property
    def num_requests(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    def run(self, engine: Any) -> list[Answer]:
        """Ask it; the engine has what this work calls, beside `Engine`."""

    def warm_up(self) -> Work:
        """Other work of this kind."""


class Unavailable(Exception):
    """This engine cannot run here; the message says why."""


@dataclass(frozen=True)
class Setup:
    """What an engine is opened for."""

    folder: Path  # the checkpoint
    dtype: str
    work: Any  # a Work


def open_engine(name: str, setup: Setup) -> Engine:
    """Load the model. Raises Unavailable. Imports only what this engine needs."""
    if name in _CACHES:
        from engine.runtime_engine import RuntimeEngine

        return RuntimeEngine.open(setup, name)
    from engine import transformers_engines as peers

    if name == "continuous":
        return peers.Continuous(setup)
    return peers.Copied(setup) if name == "copied" else peers.Generate(setup)


_CACHES = ("radix", "hash", "off")
NAMES = (*_CACHES, "transformers", "copied", "continuous")
