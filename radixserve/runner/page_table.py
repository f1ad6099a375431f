"""`PageTable`: the pages of every running request, kept on the device and told only what changed.

The host side knows which line of the table belongs to which request, never the pages themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from radixserve.attention.base import IndexArray
from radixserve.runner.forward_batch import indptr
from radixserve.runner.step_layout import StepLayout
from radixserve.schedule import ScheduledRequest


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """What a step changes in the table; flat_slots are flat places in it."""

    table_rows: IndexArray  # [R] of each row, padding included
    last_flat_slots: IndexArray  # [R] where each row's last page stands
    last_pages: IndexArray  # [R] that page
    flat_slots: IndexArray  # [n] other places that changed; distinct
    pages: IndexArray  # [n]


class PageTable:
    """pages [rows + 1, max_pages] int32 on the device; the last row is that of padding, page 0.

    A row is a request's until it is needed for another one: the least recently used goes first.
    """

    def __init__(self, num_rows: int, max_pages: int, device: torch.device) -> None:
        self.max_pages = max_pages
        self.pages = torch.zeros((num_rows + 1, max_pages), dtype=torch.int32, device=device)
        self._lines: OrderedDict[str, int] = OrderedDict()  # by last use
        self._free = list(range(num_rows))[::-1]

    @property
    def num_rows(self) -> int:
        return len(self.pages) - 1

    def update(self, layout: StepLayout) -> TableUpdate:
        """Give each row a line and find what has to be written before the step.

        That is what `ScheduledRequest.first_new_page` says, or everything where the request had no
        line. Of rows that are not written after all, `forget` has to be told.
        O(rows + pages that changed). Raises ValueError, and changes nothing, if a row has more
        pages than a line has room for.
        """
        num_rows, num_pages, tables = layout.num_rows, layout.num_pages, layout.host.tables
        assert tables is not None
        if (most := int(num_pages.max())) > self.max_pages:
            name = layout.names[int(num_pages.argmax())]
            raise ValueError(f"request {name!r} has {most} pages, at most {self.max_pages} fit")
        if num_rows > self.num_rows:
            self._grow(num_rows)
        table_rows, fresh = self._assign(layout.names)
        table_rows += [self.num_rows] * (layout.num_all_rows - num_rows)
        table_row_of = np.array(table_rows, np.int64)
        begin = table_row_of * self.max_pages
        first = layout.first_new_page
        if fresh:
            first = first.copy()
            first[fresh] = 0
        many = np.flatnonzero(first < num_pages[:num_rows] - 1)
        flat_slots = pages = np.empty(0, np.int64)
        if len(many):
            changed = [tables[at][first[at] : -1] for at in many.tolist()]
            pages = np.concatenate(changed, dtype=np.int64)
            bounds = indptr(np.array([len(one) for one in changed], np.int64))
            shift = begin[many] + first[many] - bounds[:-1]
            flat_slots = np.arange(len(pages)) + np.repeat(shift, np.diff(bounds))
        return TableUpdate(
            table_row_of, begin + num_pages - 1, layout.last_pages, flat_slots, pages
        )

    def forget(self, rows: Sequence[ScheduledRequest]) -> None:
        """What the table says of these requests is not to be relied on."""
        for row in rows:
            line = self._lines.pop(row.request_id, None)
            if line is not None:
                self._free.append(line)

    def clear(self) -> None:
        """No request has a line."""
        self._free += self._lines.values()
        self._lines.clear()

    def write(self, flat_slots: Tensor, pages: Tensor) -> None:
        """flat_slots [n] int64, pages [n] int32, on the device; queued there."""
        self.pages.view(-1).index_copy_(0, flat_slots, pages)

    def _assign(self, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """The line of each, as recently used as the others then; places of those that had none."""
        known, table_rows, fresh = self._lines, [], []
        for at, name in enumerate(names):
            line = known.get(name, -1)
            if line < 0:
                fresh.append(at)
            else:
                known.move_to_end(name)
            table_rows.append(line)
        for at in fresh:
            table_rows[at] = self._free.pop() if self._free else known.popitem(last=False)[1]
            known[names[at]] = table_rows[at]
        return table_rows, fresh

    def _grow(self, num_rows: int) -> None:
        """More rows, for a step of more rows than were expected; the padding's is the last."""
        old, before = self.pages, self.num_rows
        self.pages = torch.zeros(
            (num_rows + 1, self.max_pages), dtype=torch.int32, device=old.device
        )
        self.pages[:before] = old[:before]
        self._free += range(before, num_rows)
