"""The joint choice of a beam search: the best continuations of all its beams. Pure numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixserve.schedule import Candidates

FloatArray = NDArray[np.float32]


class Continuation(NamedTuple):
    """One more token behind one of the beams."""

    parent: int  # index of that beam
    rank: int  # of the token among the parent's candidates
    token_id: int
    total: float  # the parent's total and the token's score, added in float32


def best_continuations(
    totals: FloatArray, candidates: Sequence[Candidates], count: int
) -> list[Continuation]:
    """The `count` best of all candidates of all beams, best first; fewer if there are not as many.

    totals [m] of the beams; candidates: those of each beam, best first, equally many of each, and
    at least `count` or all there are. A score of -inf is no candidate. Of a tie the earlier beam
    wins, then the earlier rank.
    """
    width = len(candidates[0].scores)
    sums = (
        np.concatenate([one.scores for one in candidates]).reshape(-1, width) + totals[:, None]
    ).ravel()
    order: NDArray[np.intp]
    if count < len(sums):  # those no worse than number `count`, of which a stable sort settles ties
        least = np.partition(sums, len(sums) - count)[len(sums) - count]
        kept = np.flatnonzero(sums >= least)
        order = kept[np.argsort(-sums[kept], kind="stable")[:count]]
    else:
        order = np.argsort(-sums, kind="stable")
    token_ids = np.concatenate([one.token_ids for one in candidates])[order]
    chosen = zip(order.tolist(), token_ids.tolist(), sums[order].tolist(), strict=True)
    return [
        Continuation(at // width, at % width, token_id, total)
        for at, token_id, total in chosen
        if total > -math.inf
    ]
