"""How many tokens of an answer are reasoning."""

from __future__ import annotations

from bisect import bisect_left

from radixserve.output import Completion
from radixserve.text.tokenizer import Tokenizer


def count_reasoning(tokenizer: Tokenizer, reasoning: str | None, one: Completion) -> int:
    """The fewest first tokens whose text holds all of it. O(log n) decodings."""
    if not reasoning:
        return 0
    ids = one.token_ids

    def text(size: int) -> str:
        return tokenizer.decode(ids[:size], keep_special=True)

    end = text(len(ids)).find(reasoning) + len(reasoning)
    return bisect_left(range(len(ids)), end, key=lambda size: len(text(size)))
