"""The device's page table against the rows themselves, under growth, change and reuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from radixserve.runner.page_table import PageTable, TableUpdate
from radixserve.runner.step_layout import StepLayout, pad, prepare_inputs

from radixserve.schedule import ScheduledRequest
from tests.runner.rows import SPEC

CPU = torch.device("cpu")


def row(name: str, pages: list[int], first_new_page: int = 0) -> ScheduledRequest:
    ids = np.array(pages, np.int32)
    return ScheduledRequest(
        name, np.ones(1, np.int32), len(pages) - 1, ids, SPEC, first_new_page=first_new_page
    )


def layout_of(rows: list[ScheduledRequest], num_padding: int = 0) -> StepLayout:
    layout = prepare_inputs(rows, 1)
    return pad(layout, len(rows) + num_padding) if num_padding else layout


def apply(table: PageTable, update: TableUpdate) -> None:
    for flat_slots, pages in (
        (update.flat_slots, update.pages),
        (update.last_flat_slots, update.last_pages),
    ):
        table.write(torch.from_numpy(flat_slots), torch.from_numpy(pages.astype(np.int32)))


def check(table: PageTable, rows: list[ScheduledRequest], update: TableUpdate) -> None:
    assert len(set(update.table_rows[: len(rows)].tolist())) == len(rows)
    for one, line in zip(rows, update.table_rows.tolist(), strict=False):
        assert table.pages[line, : len(one.page_ids)].tolist() == one.page_ids.tolist()
    assert set(update.table_rows[len(rows) :].tolist()) <= {table.num_rows}
    assert not table.pages[table.num_rows, 0]


@pytest.mark.parametrize("num_rows", [4, 7, 40])
def test_random_steps(num_rows: int) -> None:
    """Requests come back after other ones, with more, fewer and other pages."""
    generator = np.random.default_rng(num_rows)
    table = PageTable(num_rows, 30, CPU)
    last: dict[str, list[int]] = {}
    for step in range(300):
        names = generator.choice(12, size=generator.integers(1, 5), replace=False)
        rows = []
        for name in map(str, names.tolist()):
            pages = list(last.get(name, []))
            first = len(pages)
            kind = generator.random()
            if kind < 0.3 and pages:  # rolled back, or moved to other pages
                first = int(generator.integers(0, len(pages)))
                pages = pages[:first]
            count = int(generator.integers(0, 3)) if kind < 0.9 else 12
            pages += generator.integers(0, 1000, count).tolist()
            pages = pages[:30] or [1]
            rows.append(row(name, pages, min(first, len(pages)) if name in last else 0))
            last[name] = pages
        update = table.update(layout_of(rows, step % 3))
        apply(table, update)
        check(table, rows, update)
        if step % 37 == 0:
            table.forget(rows[:1])
        if step % 101 == 0:
            table.clear()


def test_a_decode_writes_one_page_a_row() -> None:
    table = PageTable(4, 10, CPU)
    apply(table, table.update(layout_of([row("a", [1, 2, 3]), row("b", [4])])))
    update = table.update(layout_of([row("a", [1, 2, 3, 9], 3), row("b", [4], 1)], 2))
    assert not len(update.flat_slots)
    assert update.last_pages.tolist() == [9, 4, 0, 0]
    update = table.update(layout_of([row("a", [1, 2, 3, 9, 8, 7], 4)]))
    assert update.pages.tolist() == [8]
    assert update.last_pages.tolist() == [7]


def test_a_request_without_a_line_is_written_whole() -> None:
    table = PageTable(2, 5, CPU)
    apply(table, table.update(layout_of([row("a", [1, 2, 3]), row("b", [4, 5, 6])])))
    apply(table, table.update(layout_of([row("b", [4, 5, 6, 7], 3)])))
    rows = [row("c", [8, 9, 9])]
    update = table.update(layout_of(rows))  # "a" goes: it was used longest ago
    apply(table, update)
    check(table, rows, update)
    rows = [row("a", [1, 2, 3, 4], 3), row("c", [8, 9, 9, 1], 3)]
    update = table.update(layout_of(rows))
    assert sorted(update.pages.tolist()) == [1, 2, 3]
    apply(table, update)
    check(table, rows, update)


def test_more_rows_than_lines_make_more_lines() -> None:
    table = PageTable(2, 5, CPU)
    apply(table, table.update(layout_of([row("a", [1, 2, 3])])))
    rows = [row("a", [1, 2, 3, 4], 3), *[row(f"{at}", [at, at + 1]) for at in range(6)]]
    update = table.update(layout_of(rows, 1))
    apply(table, update)
    check(table, rows, update)
    assert table.num_rows == 7


def test_too_many_pages_are_refused() -> None:
    table = PageTable(2, 3, CPU)
    with pytest.raises(ValueError, match="'a' has 4 pages, at most 3 fit"):
        table.update(layout_of([row("a", [1, 2, 3, 4])]))
