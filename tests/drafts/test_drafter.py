"""Which sources are asked, and how many drafts a step takes by what steps cost: the real scheduler
over a model without arithmetic, whose steps take a known time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from radixserve.drafts.budget import MOST_ROWS
from radixserve.drafts.drafter import Drafts
from radixserve.drafts.source import DraftContext, DraftSource
from radixserve.schedule import SchedulerOutput
from tests.scheduler.fake import VOCAB, Driver, prefix_hashes

STEP_S, TOKEN_S = 0.008, 0.001


class TimedSteps:
    """A driver on a clock of its own, by which a step takes STEP_S and a draft TOKEN_S."""

    def __init__(self, sources: Sequence[DraftSource]) -> None:
        self.now = 0.0
        self.driver = Driver(
            num_pages=4_000,
            chunked_prefill_size=512,
            max_running_requests=64,
            clock=lambda: self.now,
        )
        self._note_launch = self.driver.runner.before_launch
        self.driver.runner.before_launch = self._launch
        if sources:
            self.driver.scheduler.set_drafter(Drafts(sources, 32))

    def _launch(self, schedule: SchedulerOutput) -> None:
        self._note_launch(schedule)
        self.now += STEP_S + TOKEN_S * sum(schedule.rows.drafts.values())

    def seconds(self, num_requests: int, num_tokens: int) -> float:
        """Of answers that are computed at once."""
        for number in range(num_requests):
            prompt = [number % VOCAB, 2, 3 + number // VOCAB]
            self.driver.add(f"{number}", prompt, max_tokens=num_tokens, ignore_eos=True)
        before = self.now
        self.driver.run()
        return self.now - before


class Guessing(DraftSource):
    """Guesses what the model without arithmetic samples, or anything else."""

    def __init__(self, *, is_right: bool, is_sure: bool = False, has_any: bool | None = True):
        self.is_right, self.is_sure, self.has_any = is_right, is_sure, has_any
        self.num_asked = 0

    def draft(self, context: DraftContext, most: int) -> Sequence[int] | None:
        self.num_asked += 1
        if not self.has_any:
            return None if self.has_any is None else ()
        hashes, found = prefix_hashes(context.tokens.tolist()), []
        for _ in range(most):
            next_id = (hashes[-1] + context.request.seed) % VOCAB
            found.append(int(next_id) if self.is_right else (int(next_id) + 1) % VOCAB)
            hashes = prefix_hashes([*context.tokens.tolist(), *found], hashes)
        return found


def test_a_source_without_any_guess_is_asked_once_for_a_request() -> None:
    source, other = Guessing(is_right=True, has_any=None), Guessing(is_right=True, has_any=False)
    TimedSteps([source, other]).seconds(3, 40)
    assert source.num_asked == 3
    assert other.num_asked == 3 * 38  # neither before the first token nor for the last


def test_right_guesses_are_used_in_full() -> None:
    plain = TimedSteps([]).seconds(1, 200)
    assert plain == pytest.approx(200 * STEP_S)
    assert TimedSteps([Guessing(is_right=True)]).seconds(1, 200) < plain / 4


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 300), (4, 120), (MOST_ROWS, 40)])
def test_wrong_guesses_cost_little(num_rows: int, num_tokens: int) -> None:
    """A source rests after some that were wrong, each time longer. It is not asked meanwhile."""
    source = Guessing(is_right=False)
    slow = TimedSteps([source]).seconds(num_rows, num_tokens)
    assert slow < 1.05 * TimedSteps([]).seconds(num_rows, num_tokens)
    assert source.num_asked < 0.3 * num_rows * num_tokens


def test_what_did_not_pay_is_tried_less_with_later_requests() -> None:
    """Short answers, each of which would try some drafts; and it is found out when they pay
    again."""
    source = Guessing(is_right=False)
    timed, plain_s = TimedSteps([source]), TimedSteps([]).seconds(3, 40)
    seconds = [timed.seconds(3, 40) for _ in range(10)]
    assert seconds[0] > 1.01 * plain_s
    assert seconds[-1] < 1.01 * plain_s
    source.is_right = True
    assert min(timed.seconds(3, 40) for _ in range(40)) < 0.8 * plain_s


def test_many_rows_ask_sure_sources_alone() -> None:
    num_rows = MOST_ROWS + 1
    sure, unsure = Guessing(is_right=True, is_sure=True, has_any=False), Guessing(is_right=True)
    timed = TimedSteps([sure, unsure])
    timed.seconds(num_rows, 20)
    assert sure.num_asked == num_rows * 18
    assert unsure.num_asked == 0
    assert timed.driver.scheduler.counts.drafted_tokens == 0
    sure.has_any = True
    before = timed.driver.scheduler.counts.steps
    timed.seconds(num_rows, 20)
    assert timed.driver.scheduler.counts.steps - before < 5
    assert unsure.num_asked == 0
