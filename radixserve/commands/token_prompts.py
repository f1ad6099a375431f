"""Prompts of token ids on the command line, for models without a tokenizer."""

from __future__ import annotations

from radixserve.checks import check_int
from radixserve.errors import InvalidRequest


def read_token_ids(text: str) -> list[int]:
    """The text "5,17 3" is [5, 17, 3]. Raises InvalidRequest."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InvalidRequest(f"--prompt-ids takes token ids such as 5,17,3, got {text!r}") from None


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    """`length` token ids below `vocab_size`, the same ones for the same seed."""
    import numpy as np

    count = check_int("--random-prompt", length, 1)
    ids: list[int] = np.random.default_rng(seed).integers(vocab_size, size=count).tolist()
    return ids
