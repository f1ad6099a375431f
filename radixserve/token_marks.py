"""Tokens of the cache that are not of the vocabulary: marked ones, see `AdapterUse`, and rows of
pictures."""

from __future__ import annotations

import numpy as np

from radixserve.arrays import IntArray
from radixserve.request import FIRST_PICTURE_ID, MAX_TOKEN_IDS, unmarked


def num_unmarked(keyed: IntArray) -> int:
    """Returns how many leading tokens of the cache are of the vocabulary."""
    outside = keyed >= MAX_TOKEN_IDS
    return int(outside.argmax()) if outside.any() else len(keyed)


def num_before_mark(keyed: IntArray) -> int:
    """Returns how many leading tokens of the cache have no mark of an `AdapterUse`."""
    marked = unmarked(keyed) != keyed
    return int(marked.argmax()) if marked.any() else len(keyed)


def with_placeholders(token_ids: IntArray, placeholder_id: int) -> IntArray:
    """Returns tokens with the model's own one for pictures in place of their rows."""
    return np.where(token_ids >= FIRST_PICTURE_ID, np.int32(placeholder_id), token_ids)
