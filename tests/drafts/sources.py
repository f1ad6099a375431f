"""Sources of drafts for tests: right, wrong and half right ones, whatever they cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal

from radixserve.drafts.source import DraftContext, DraftSource

Kind = Literal["right", "wrong", "half"]
KINDS: tuple[Kind, ...] = ("right", "wrong", "half")
LENGTH = 6  # most drafts at a time


class ForcedSource(DraftSource):
    """Drafts what `guess` returns, up to LENGTH tokens, all, none or half of them spoilt; in some
    steps nothing."""

    is_sure = True

    def __init__(
        self,
        kind: Kind,
        guess: Callable[[DraftContext, int], Sequence[int]],
        vocab_size: int,
        seed: int,
    ) -> None:
        self.name = self._kind = kind
        self._guess, self._vocab_size = guess, vocab_size
        self._random = random.Random(seed)

    def draft(self, context: DraftContext, most: int) -> Sequence[int]:
        count = self._random.randint(0, min(most, LENGTH))
        return [self._spoil(token_id) for token_id in self._guess(context, count)[:count]]

    def _spoil(self, token_id: int) -> int:
        odds = {"right": 0.0, "wrong": 1.0, "half": 0.5}[self._kind]
        if self._random.random() >= odds:
            return token_id
        return (token_id + self._random.randrange(1, self._vocab_size)) % self._vocab_size


class Memory:
    """What followed each text, as far as requests have ended."""

    def __init__(self) -> None:
        self._answers: dict[bytes, list[int]] = {}  # by the tokens before

    def guess(self, context: DraftContext, most: int) -> Sequence[int]:
        return self._answers.get(context.tokens.tobytes(), [])[:most]

    def note(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        import numpy as np

        tokens = np.array([*prompt, *answer], np.int32)
        for end in range(len(prompt) + 1, len(tokens)):
            self._answers[tokens[:end].tobytes()] = tokens[end:].tolist()
