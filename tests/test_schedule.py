"""`ScheduledRows`: rows that went into columns come out as they were."""

from __future__ import annotations

import numpy as np
import pytest

from radixserve.schedule import ScheduledRequest, ScheduledRows
from tests.runner.rows import random_rows


def assert_same(mine: ScheduledRequest, other: ScheduledRequest) -> None:
    for name, value, wanted in zip(ScheduledRequest._fields, mine, other, strict=True):
        if isinstance(wanted, np.ndarray):
            assert value.dtype == wanted.dtype == np.int32, name
            assert value.tolist() == wanted.tolist(), name
        else:
            assert value == wanted, name


@pytest.mark.parametrize("has_futures", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_what_they_were(seed: int, has_futures: bool) -> None:
    generator = np.random.default_rng(seed)
    rows = [
        row._replace(
            slot=number,
            first_new_page=number % 3,
            future_index=number if has_futures and len(row.token_ids) == 1 else -1,
            state_id=number,
            checkpoints=((row.start + 1, 40 + number),) if number % 2 else (),
            written_state_id=number + 9,
            num_top_logprobs=0 if row.logprob_targets is None else number,
        )
        for number, row in enumerate(random_rows(generator, 4, 9))
    ]
    columns = ScheduledRows.of(rows)
    assert len(columns) == len(rows)
    assert len(columns.input_ids) == sum(columns.num_tokens)
    for number, (mine, other) in enumerate(zip(columns, rows, strict=True)):
        assert_same(mine, other)
        assert_same(columns[number], other)
        assert_same(columns[number - len(rows)], other)
    with pytest.raises(IndexError):
        columns[len(rows)]


def test_no_rows() -> None:
    assert not ScheduledRows()
    assert list(ScheduledRows.of([])) == []
