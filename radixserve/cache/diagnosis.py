"""`diagnose`: tells why a prompt found fewer cached tokens than an earlier request had left."""

from __future__ import annotations

import calendar
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.lookup import LOST_REASONS

_NAMES = (calendar.month_name, calendar.month_abbr, calendar.day_name, calendar.day_abbr)
_CALENDAR = {name.lower() for names in _NAMES for name in names if name}
Decode = Callable[[Sequence[int]], str]
_SHOWN = 16  # tokens of `expected` and `found`
_CONTEXT = 5  # tokens decoded before the shown ones, so that a word keeps its leading space


class Diagnosis(NamedTuple):
    """A prompt compared with an earlier request, which is its prompt and its answer.

    reason is one of
      hit         no token is lost
      diverged    the prompt differs from the earlier request at `position`
      one of `LOST_REASONS`, never_seen   as in Lookup: the tokens agree up to `shared_tokens`, but
                  from `position` on they were not in the cache
      partial_page  the tokens agree, and all whole pages of them were found

    expected and found are the next 16 tokens of both as text where they differ; None elsewhere and
    for models without a tokenizer. All counts are tokens of the prompt.
    """

    reason: str
    position: int  # of the first lost token
    tokens_lost: int  # tokens that were computed although the earlier request had left their K/V
    cached_tokens: int  # tokens that were found in the cache
    shared_tokens: int  # leading tokens that agree with the earlier request
    reusable_tokens: int  # tokens whose K/V the earlier request left: all but its last ones
    expected: str | None = None  # the earlier request's text
    found: str | None = None  # the prompt's text


def diagnose(
    prompt: IntArray,
    cached: int | None,
    miss_reason: str,
    previous: IntArray,
    num_reusable: int,
    decode: Decode | None = None,
) -> Diagnosis:
    """Compare a prompt with an earlier request. O(tokens).

    cached        tokens that were found; None: not known yet, all tokens that agree count as found
    miss_reason   the cache's reason, see Lookup; "" without one
    previous      the earlier prompt and answer; the K/V of the first `num_reusable` was computed
    decode        token ids to text, for `expected` and `found`
    """
    target = min(num_reusable, len(prompt) - 1)  # a prompt's last token is always computed
    shared = common_length(prompt, previous)
    num_found = min(shared, target) if cached is None else cached
    lost = max(0, target - num_found)
    counts = (lost, num_found, shared, num_reusable)
    if not lost:
        return Diagnosis("hit", num_found, *counts)
    if num_found < shared and miss_reason in LOST_REASONS:
        return Diagnosis(miss_reason, num_found, *counts)
    if shared < target:
        if decode is None:
            return Diagnosis("diverged", shared, *counts)
        expected, given = (text_at(decode, tokens, shared) for tokens in (previous, prompt))
        return Diagnosis("diverged", shared, *counts, expected, given)
    reason = "partial_page" if miss_reason == "full" else "never_seen"
    return Diagnosis(reason, num_found, *counts)


def common_length(tokens: IntArray, other: IntArray) -> int:
    """Returns the number of equal leading tokens."""
    size = min(len(tokens), len(other))
    differs = np.asarray(tokens[:size]) != np.asarray(other[:size])
    return int(differs.argmax()) if differs.any() else size


def text_at(decode: Decode, tokens: IntArray, position: int) -> str:
    """Returns the text of the next 16 tokens from `position` on."""
    context = tokens[max(0, position - _CONTEXT) : position].tolist()
    ahead = tokens[position : position + _SHOWN].tolist()
    return decode([*context, *ahead])[len(decode(context)) :]


def is_time(text: str) -> bool:
    """Whether a text may begin inside a date or a time: a number, or the name of a month or day."""
    word = next(iter(text.split()), "").strip(",.").lower()
    return any(map(str.isdigit, word)) or word in _CALENDAR
