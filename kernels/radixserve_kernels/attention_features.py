"""Features of a layer's attention besides causal attention to all earlier positions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from torch import Tensor


class AttentionVariant(NamedTuple):
    """What of a layer's features a kernel may be planned or compiled for; 0 for none."""

    sliding_window: int = 0
    logits_soft_cap: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class AttentionFeatures:
    """The attention of one layer; a field that is None has no effect. Names as in vLLM.

    Window and chunk are by position: the keys that a query sees do not depend on the cache.
    """

    sliding_window: int | None = None  # a query sees so many positions, its own the last of them
    attention_chunk_size: int | None = None  # a query sees its own chunk of so many positions
    logits_soft_cap: float | None = None  # scores s become cap * tanh(s / cap), after the scale
    sinks: Tensor | None = None  # [Hq] float32, a score of each head that has no value
    # the rows of a picture see each other: those after them, too, whatever the window
    bidirectional: bool | None = None

    @property
    def names(self) -> frozenset[str]:
        """The features that change attention over text; `bidirectional` is of pictures."""
        names = frozenset(
            feature.name for feature in fields(self) if getattr(self, feature.name) is not None
        )
        return names - {"bidirectional"}

    @property
    def span(self) -> tuple[int, int]:
        """(sliding_window, attention_chunk_size), 0 for none: which positions a query sees."""
        return self.sliding_window or 0, self.attention_chunk_size or 0

    @property
    def variant(self) -> AttentionVariant:
        return AttentionVariant(self.sliding_window or 0, self.logits_soft_cap or 0.0)


PLAIN = AttentionFeatures()
