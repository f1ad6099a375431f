"""The device's page table against the rows themselves, under growth, change and reuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixserve.runner.device_batch import PageTable, TableUpdate
from radixserve.runner.input_batch import InputBatch, prepare_inputs
from radixserve.schedule import ScheduledRequest, ScheduledRows
from tests.runner.rows import SPEC

CPU = torch.device("cpu")


def row(slot: int, pages: list[int], first_new_page: int = 0) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=f"r{slot}",
        token_ids=np.ones(1, np.int32),
        start=len(pages) - 1,
        page_ids=np.array(pages, np.int32),
        sample=SPEC,
        first_new_page=first_new_page,
        slot=slot,
    )


def batch_of(rows: list[ScheduledRequest], num_padding: int = 0) -> InputBatch:
    batch = prepare_inputs(ScheduledRows.of(rows), 1)
    return batch.padded(len(rows) + num_padding) if num_padding else batch


def apply(table: PageTable, update: TableUpdate) -> None:
    for slots, pages in ((update.slots, update.pages), (update.last_slots, update.last_pages)):
        table.write(torch.from_numpy(slots), torch.from_numpy(pages.astype(np.int32)))


def check(table: PageTable, rows: list[ScheduledRequest], update: TableUpdate) -> None:
    slots = [one.slot for one in rows]
    assert update.table_rows[: len(rows)].tolist() == slots
    for one in rows:
        assert table.pages[one.slot, : len(one.page_ids)].tolist() == one.page_ids.tolist()
    assert set(update.table_rows[len(rows) :].tolist()) <= {table.num_rows}
    assert not table.pages[table.num_rows, 0]


@pytest.mark.parametrize("num_rows", [4, 7, 40])
def test_random_steps(num_rows: int) -> None:
    """Slots get more, fewer and other pages, and other requests, which bring all of theirs."""
    generator = np.random.default_rng(num_rows)
    table = PageTable(num_rows, 30, CPU)
    last: dict[int, list[int]] = {}
    for step in range(300):
        rows = []
        for slot in generator.choice(num_rows, size=generator.integers(1, 5), replace=False):
            pages = list(last.get(int(slot), []))
            first = len(pages)
            kind = generator.random()
            if kind < 0.1:  # another request
                pages, first = [], 0
            elif kind < 0.3 and pages:  # rolled back, or moved to other pages
                first = int(generator.integers(0, len(pages)))
                pages = pages[:first]
            count = int(generator.integers(0, 3)) if kind < 0.9 else 12
            pages += generator.integers(0, 1000, count).tolist()
            pages = pages[:30] or [1]
            rows.append(row(int(slot), pages, min(first, len(pages))))
            last[int(slot)] = pages
        update = table.update(batch_of(rows, step % 3))
        apply(table, update)
        check(table, rows, update)


def test_a_decode_writes_one_page_a_row() -> None:
    table = PageTable(4, 10, CPU)
    apply(table, table.update(batch_of([row(0, [1, 2, 3]), row(1, [4])])))
    update = table.update(batch_of([row(0, [1, 2, 3, 9], 3), row(1, [4], 1)], 2))
    assert not len(update.slots)
    assert update.last_pages.tolist() == [9, 4, 0, 0]
    update = table.update(batch_of([row(0, [1, 2, 3, 9, 8, 7], 4)]))
    assert update.pages.tolist() == [8]
    assert update.last_pages.tolist() == [7]


def test_another_request_in_a_slot_is_written_whole() -> None:
    table = PageTable(2, 5, CPU)
    apply(table, table.update(batch_of([row(0, [1, 2, 3]), row(1, [4, 5, 6])])))
    rows = [row(0, [8, 9, 9]), row(1, [4, 5, 6, 7], 3)]
    update = table.update(batch_of(rows))
    assert sorted(update.pages.tolist()) == [8, 9]
    apply(table, update)
    check(table, rows, update)


def test_too_many_pages_are_refused() -> None:
    table = PageTable(2, 3, CPU)
    with pytest.raises(ValueError, match="'r1' has 4 pages, at most 3 fit"):
        table.update(batch_of([row(1, [1, 2, 3, 4])]))
