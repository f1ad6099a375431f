"""`DraftSource`: the interface of what guesses the next tokens of a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence
from radixserve.request import Request
from radixserve.structured_outputs import Matcher


@dataclass(slots=True, eq=False)
class DraftContext:
    """What a source may read of a running request, within a call. One object a request."""

    request: Request
    tokens: IntArray  # [n] prompt and output so far
    num_prompt: int
    sequence: CacheSequence  # of the first n - 1 tokens
    matcher: Matcher | None  # of the request's grammar
    kept: dict[DraftSource, Any] = field(default_factory=dict)  # what each source keeps of the
    # request, until that ends

    @property
    def output(self) -> IntArray:
        return self.tokens[self.num_prompt :]


class DraftSource(ABC):
    """Guesses next tokens. The scheduler's thread makes all calls, between steps.

    A wrong guess costs time and changes no answer.
    """

    name = "source"  # in the statistics
    is_sure = False  # whether nearly all guesses are right, so that they are verified at any load
    first_odds = 0.6  # of a guess to be right, before any was verified for a request

    @abstractmethod
    def draft(self, context: DraftContext, most: int) -> Sequence[int] | None:
        """Returns up to `most` >= 1 token ids that may follow `context.tokens`; none without a
        guess. None where it will have no guess for this request later either: it is not asked
        again. Takes microseconds: it is called for a request in nearly every step."""

    def end(self, context: DraftContext) -> None:  # noqa: B027
        """A request has ended, which it may never have been asked about. Its sequence is not
        released yet."""

    def stats(self) -> dict[str, int]:
        """Returns gauges of its own. O(1)."""
        return {}

    def reset(self, namespace: str | None) -> None:  # noqa: B027
        """Forget the texts of a namespace; of all where None."""
