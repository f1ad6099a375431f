"""`Pace`: as many decode steps as fit into its time."""

from __future__ import annotations

import numpy as np
import pytest

from radixserve.pace import LONGEST_S, UNREAD_S, Pace
from radixserve.schedule import RowOutput, Schedule, StepOutput


def note(pace: Pace, seconds: float, num_steps: int = 1, num_prefill: int = 0) -> int:
    """What is asked for next, after a schedule of one row that took so long."""
    no_copies = np.empty((0, 3), np.int32)
    schedule = Schedule(0, (), no_copies, num_prefill, 1, (), num_steps)
    output = RowOutput(5, None, (), further=(5,) * (num_steps - 1))
    parts = {"prepare": seconds / 4, "forward": seconds / 2, "sample": seconds / 4}
    pace.note(schedule, StepOutput((output,), parts))
    return pace.num_steps(is_read=True)


def test_one_step_until_one_was_timed() -> None:
    pace = Pace(8)
    assert pace.num_steps(is_read=True) == pace.num_steps(is_read=False) == 1
    assert note(pace, LONGEST_S / 100, num_prefill=5) == 1  # says nothing of decoding


@pytest.mark.parametrize(("part", "expected"), [(100, 8), (8.1, 8), (3.5, 3), (1.5, 1), (0.1, 1)])
def test_as_many_as_fit(part: float, expected: int) -> None:
    assert note(Pace(8), LONGEST_S / part) == expected
    assert note(Pace(1), LONGEST_S / part) == 1


@pytest.mark.parametrize(("part", "expected"), [(100, 8), (8.1, 8), (3.5, 3), (0.1, 1)])
def test_longer_while_nobody_reads(part: float, expected: int) -> None:
    pace = Pace(8)
    note(pace, UNREAD_S / part)
    assert pace.num_steps(is_read=False) == expected
    assert pace.num_steps(is_read=True) == max(1, min(8, int(LONGEST_S * part / UNREAD_S)))


def test_several_are_timed_by_what_was_answered() -> None:
    pace = Pace(8)
    assert note(pace, LONGEST_S, num_steps=4) == 4
    assert note(pace, LONGEST_S * 2, num_steps=4) == 2
    assert note(pace, 0.0) == 8
