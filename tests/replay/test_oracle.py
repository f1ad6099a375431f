"""The clairvoyant bound against every choice that a cache could make, on tiny traces."""

from __future__ import annotations

import functools
import itertools
import random

import pytest

from radixserve.replay.bounds import clairvoyant_hits
from radixserve.replay.paths import build_paths
from tests.replay.traces import Turn, make_trace, random_turns

Token = tuple[int, ...]  # a token is its whole prefix


def best_hits(turns: list[Turn], size: int, *, closed: bool) -> int:
    """The most hits over all choices of what to keep after each request; by search.

    `closed`: only caches in which a token never stays without all that lies above it, and hits
    only where all above is there, too.
    """
    served = []
    for prompt, output in turns:
        kept = tuple(prompt) + tuple(output[:-1])
        if len(kept) <= size:
            tokens = frozenset(kept[:end] for end in range(1, len(kept) + 1))
            usable = [kept[:end] for end in range(1, len(prompt))]
            served.append((tokens, usable))

    def hits_of(usable: list[Token], cached: frozenset[Token]) -> int:
        if not closed:
            return sum(token in cached for token in usable)
        return sum(1 for _ in itertools.takewhile(cached.__contains__, usable))

    @functools.cache
    def best(at: int, cached: frozenset[Token]) -> int:
        if at == len(served):
            return 0
        tokens, usable = served[at]
        others = sorted(cached - tokens)
        room = min(size - len(tokens), len(others))
        most = 0
        for kept in itertools.combinations(others, room):
            after = tokens | frozenset(kept)
            if closed and any(len(token) > 1 and token[:-1] not in after for token in kept):
                continue
            most = max(most, best(at + 1, after))
        return hits_of(usable, cached) + most

    return best(0, frozenset())


SEEDS = [*range(12), *(pytest.param(n, marks=pytest.mark.long) for n in range(12, 40))]


def bound(turns: list[Turn], size: int) -> int:
    trace = make_trace(turns)
    return int(clairvoyant_hits(build_paths(trace), trace.num_kept, size).sum())


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_exact_where_nothing_is_computed_anew(seed: int) -> None:
    rng = random.Random(seed)
    turns = random_turns(rng, 8, longest=5, alphabet=2, fresh=True)
    for size in range(3, 10):
        found = bound(turns, size)
        assert found == best_hits(turns, size, closed=True)
        assert found == best_hits(turns, size, closed=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_choice_beats_it(seed: int) -> None:
    rng = random.Random(1000 + seed)
    turns = random_turns(rng, 8, longest=5, alphabet=2, fresh=False)
    for size in range(3, 10):
        found = bound(turns, size)
        assert found == best_hits(turns, size, closed=False)
        assert found >= best_hits(turns, size, closed=True)


def test_it_keeps_what_is_needed_first() -> None:
    a, b, c = [1, 1, 9], [2, 2, 9], [3, 3, 9]
    turns: list[Turn] = [(a, ()), (b, ()), (c, ()), (a, ()), (b, ())]
    assert bound(turns, 100) == 4
    assert bound(turns, 5) == 2  # room for one more pair: a stays, then b has to be computed
    assert bound(turns, 3) == 0


def test_requests_that_do_not_fit_are_passed_over() -> None:
    turns: list[Turn] = [([1, 2, 3], ()), (list(range(1, 9)), ()), ([1, 2, 4], ())]
    assert bound(turns, 5) == 2
    assert bound(turns, 8) == 3 + 2


def test_a_longer_trace_at_every_size_gains_with_room() -> None:
    turns = random_turns(random.Random(5), 60, longest=40, alphabet=3, fresh=False)
    hits = [bound(turns, size) for size in range(40, 400, 10)]
    assert hits == sorted(hits)
    assert hits[-1] == build_paths(make_trace(turns)).reusable_tokens
