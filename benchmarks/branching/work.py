"""The work of the branch benchmark: samples, chats and beams, see `engine.base.Work`."""

from __future__ import annotations

import asyncio
import warnings
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from engine.base import Answer
from engine.runtime_engine import RuntimeEngine

from radixserve import ChatSession

LOWEST_ID = 8  # ids below are special tokens
_WARM_UP_TOKENS = 48  # of a prompt
_TEMPLATE_TOKENS = 64  # of a turn, at most


@dataclass(frozen=True)
class Samples:
    """`count` random continuations of one prompt."""

    prompt: tuple[int, ...]
    count: int
    num_new: int

    @property
    def num_requests(self) -> int:
        return self.count

    @property
    def num_tokens(self) -> int:
        return self.count * (len(self.prompt) + self.num_new)

    def warm_up(self) -> Samples:
        return Samples(self.prompt[-_WARM_UP_TOKENS:], 2, 2)

    def run(self, engine: Any) -> list[Answer]:
        answers: list[Answer] = engine.sample(list(self.prompt), self.count, self.num_new)
        return answers


@dataclass(frozen=True)
class Beams:
    """The best `width` continuations of one prompt by beam search."""

    prompt: tuple[int, ...]
    width: int
    num_new: int

    @property
    def num_requests(self) -> int:
        return self.width

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + 2 * self.width * self.num_new

    def warm_up(self) -> Beams:
        return replace(self, prompt=self.prompt[-_WARM_UP_TOKENS:], num_new=2)

    def run(self, engine: Any) -> list[Answer]:
        answers: list[Answer] = engine.beam_search(list(self.prompt), self.width, self.num_new)
        return answers


@dataclass(frozen=True)
class Chats:
    """`said[turn][session]`; all sessions send their turn at the same moment."""

    said: tuple[tuple[str, ...], ...]
    num_new: int

    @property
    def num_requests(self) -> int:
        return sum(map(len, self.said))

    @property
    def num_tokens(self) -> int:
        most = sum(len(text) for turn in self.said for text in turn)  # a token has a letter
        return most + self.num_requests * (self.num_new + _TEMPLATE_TOKENS)

    def warm_up(self) -> Chats:
        return Chats(self.said[:1], 2)

    def run(self, engine: RuntimeEngine) -> list[Answer]:
        warnings.simplefilter("error")  # a history that is rewritten would spoil the counts
        chats = [engine.chat(self.num_new) for _ in self.said[0]]
        answers = []
        for turn in self.said:
            outs = asyncio.run(_send(chats, turn))
            answers += engine.count_turns(chats, outs)
        for chat in chats:
            chat.close()
        return answers

    def new_tokens(self, answers: list[Answer]) -> int:
        """Tokens of the turns whose K and V no turn before has left: what was said, the template
        around it, and the last token of each answer. What the first turns share counts once."""
        width = len(self.said[0])
        prompts = [one.prompt for one in answers]
        turns = [prompts[at : at + width] for at in range(0, len(prompts), width)]
        known = {prompt[:end] for prompt in turns[0] for end in range(1, len(prompt))}
        first = len(known) + width  # the last token of a prompt is always computed
        return first + sum(
            len(now) - (len(before) + self.num_new - 1)
            for last, turn in pairwise(turns)
            for before, now in zip(last, turn, strict=True)
        )


async def _send(chats: list[ChatSession], said: tuple[str, ...]) -> list[Any]:
    return await asyncio.gather(*(c.asend(text) for c, text in zip(chats, said, strict=True)))


def random_prompt(length: int, vocab: int, seed: int) -> tuple[int, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(LOWEST_ID, vocab, length).tolist())


def random_words(count: int, seed: int) -> str:
    """Words of the demo model's corpus, in random order."""
    rng = np.random.default_rng([seed, 7])
    words = "list tuple string value index error return module object class file name".split()
    return " ".join(rng.choice(words, count).tolist())
