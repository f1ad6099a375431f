"""How many drafts a step takes, by measured costs."""

from __future__ import annotations

import pytest

from radixserve.drafts.budget import MOST_ROWS, DraftBudget, Odds

PLAIN_S, TOKEN_S = 0.008, 0.001


def measured(num_rows: int = 1, token_s: float = TOKEN_S) -> DraftBudget:
    """After steps that cost PLAIN_S, and `token_s` for each draft."""
    budget = DraftBudget(32)
    for _ in range(100):
        budget.note_step(num_rows, 0, PLAIN_S)
        budget.note_step(num_rows, 4, PLAIN_S + 4 * token_s)
    return budget


def test_drafts_wait_for_a_step_without_them() -> None:
    budget = DraftBudget(32)
    assert budget.length(1.0, 1, 0, 0.0) == 0
    budget.note_step(1, 4, PLAIN_S)
    assert budget.length(1.0, 1, 0, 0.0) == 0
    budget.note_step(1, 0, PLAIN_S)
    assert budget.length(1.0, 1, 0, 0.0) == 32


def test_length_follows_odds_and_costs() -> None:
    budget = measured()
    lengths = [budget.length(odds, 1, 0, 0.0) for odds in (0.0, 0.1, 0.5, 0.8, 0.95, 1.0)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert 1 <= lengths[2] <= 4
    assert lengths[-1] == 32
    dear = measured(token_s=PLAIN_S)
    assert dear.length(0.9, 1, 0, 0.0) == 0  # a draft costs a step
    assert dear.length(1.0, 1, 0, 0.0) == 0


def test_the_best_length_gives_the_most_tokens_a_second() -> None:
    budget = measured()
    for odds in (0.3, 0.6, 0.9):
        rates = [
            sum(odds**n for n in range(count + 1)) / (PLAIN_S + count * TOKEN_S)
            for count in range(33)
        ]
        best = rates.index(max(rates))
        assert abs(budget.length(odds, 1, 0, 0.0) - best) <= 1


def test_no_drafts_where_rows_fill_the_step() -> None:
    """A draft costs as much as another row: none is worth it."""
    num_rows = 16
    budget = measured(num_rows, PLAIN_S / num_rows)
    assert budget.length(0.9, num_rows, 0, 0.0) == 0
    assert budget.length(1.0, MOST_ROWS + 1, 0, 0.0) == 0


def test_further_rows_have_fewer_drafts() -> None:
    budget = measured(4)
    alone = budget.length(0.8, 4, 0, 0.0)
    assert 0 <= budget.length(0.8, 4, 20, 18.0) <= alone


@pytest.mark.parametrize("first", [0.6, 0.8])
def test_odds(first: float) -> None:
    odds = Odds(first)
    assert odds.value == first
    odds.note(4, 4)
    assert odds.value > first
    for _ in range(20):
        odds.note(4, 0)
    assert odds.value < 0.25
    odds.rest(100)
    first_rest = odds.rests_until - 100
    odds.rest(200)
    assert odds.rests_until - 200 == 2 * first_rest
    assert odds.value > 0.25  # to be tried again
