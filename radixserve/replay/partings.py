"""`find_partings`: the positions where prompts part from others: what a hashed trace shows."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from radixserve.replay.paths import PathTable
from radixserve.replay.trace import Trace

_MOST = 8  # positions that are told apart


class Parting(NamedTuple):
    """Requests that begin like earlier ones and then differ from all of them."""

    position: int | None  # the first token that differs; None: other positions
    requests: int
    tokens: int  # of the prompts from there on


def find_partings(trace: Trace, paths: PathTable) -> list[Parting]:
    """The positions behind which most tokens were computed, then the others together. A prompt that
    goes on where an earlier request ended does not part. O(segments on all paths)."""
    is_known = np.zeros(len(paths.lengths), np.bool_)
    has_more = np.zeros(len(paths.lengths), np.bool_)  # whether an earlier request went on
    used_roots: set[str] = set()
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for request, namespace in enumerate(trace.namespaces):
        path = paths.path(request)
        num_known = int(is_known[path].argmin()) if not is_known[path].all() else len(path)
        position = int(paths.reusable[request])
        is_parted = namespace in used_roots if not num_known else has_more[path[num_known - 1]]
        if num_known < int(paths.num_usable[request]) and is_parted:
            counts[position][0] += 1
            counts[position][1] += int(trace.num_prompt[request]) - position
        is_known[path] = True
        has_more[path[:-1]] = True
        used_roots.add(namespace)
    ordered = sorted(counts.items(), key=lambda item: -item[1][1])
    partings = [Parting(position, *both) for position, both in ordered[:_MOST]]
    if rest := [both for _, both in ordered[_MOST:]]:
        partings.append(Parting(None, *np.asarray(rest).sum(0).tolist()))
    return partings
