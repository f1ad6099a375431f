"""Which shared pages of a step are worth reading once for all rows: the cost model of the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from radixserve.attention.base import HostIndex, IndexArray
from radixserve.attention.cuda.cascade import SharedNode, find_shared
from radixserve.attention.cuda.levels import drop_levels, limit_levels, saved_pages

MAX_LEVELS = 4

# Bytes of K and V of one layer whose reading takes as long as what a level of shared pages costs in
# a layer, two launches and a merge: 16,384 tokens of 8 heads of 128 in 16 bits. From known launch
# times and a bandwidth of 4.3 TB/s; to be measured.
SHARE_BYTES = 64 << 20

# Tokens whose K and V take as long to read as merging two states of a row: three outputs and some.
MERGE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class SharingCost:
    """When reading pages once for all their rows is worth it.

    Reading a node's pages for each of its rows costs (rows - 1) * tokens more, which must pay for
    merging: rows * merge_tokens. All nodes of a level together must save `least_tokens`: they share
    their launches. With one prefix: (rows - 1) * tokens >= least_tokens.
    """

    least_tokens: int
    merge_tokens: int

    def pays(self, num_rows: int, num_tokens: int) -> bool:
        """Of a node, in a level that pays."""
        return (num_rows - 1) * num_tokens >= max(1, num_rows * self.merge_tokens)

    def may_pay(self, start: IndexArray) -> bool:
        """Whether any level of rows with so many tokens before the step could: not to search."""
        return len(start) > 1 and int(start.sum() - start.max()) >= self.least_tokens


def find_nodes(
    host: HostIndex, page_size: int, cost: SharingCost, max_levels: int = MAX_LEVELS
) -> list[SharedNode]:
    """The nodes that pay, at most `max_levels` deep; host.kv_indices is read only if some might."""
    if not max_levels or not cost.may_pay(host.start):
        return []
    nodes = limit_levels(find_shared(host, page_size, cost.pays), max_levels)
    return drop_levels(nodes, -(-cost.least_tokens // page_size))


def pays_in_place(
    nodes: Sequence[SharedNode], num_rows: int, page_size: int, cost: SharingCost
) -> bool:
    """Whether nodes of one level pay for rows that stay where they are."""
    return saved_pages(nodes, np.arange(num_rows)) * page_size >= cost.least_tokens


class NodeFinder:
    """The nodes of a step that pay; what was found last is remembered."""

    def __init__(self, page_size: int, token_bytes: int, *, shares: bool) -> None:
        self._page_size, self._shares = page_size, shares
        self._cost = SharingCost(max(1, SHARE_BYTES // token_bytes), MERGE_TOKENS)
        self._last: tuple[HostIndex, int, list[SharedNode]] | None = None

    def find(self, host: HostIndex, max_levels: int) -> list[SharedNode]:
        if not self._shares:
            return []
        if self._last is None or self._last[0] is not host or self._last[1] != max_levels:
            self._last = host, max_levels, find_nodes(host, self._page_size, self._cost, max_levels)
        return self._last[2]

    def pays_in_place(self, host: HostIndex) -> bool:
        """Whether one level pays for rows that are not put in another order."""
        return pays_in_place(self.find(host, 1), len(host.start), self._page_size, self._cost)
