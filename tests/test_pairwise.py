"""The cover of a test's combinations, and which of them run by default."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.pairwise import cover

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 5, 4), (3, 4, 2, 2), (10, 2, 5), (2,) * 9])
def test_each_two_values_meet(sizes: tuple[int, ...]) -> None:
    everything = list(product(*map(range, sizes)))
    chosen = [everything[place] for place in cover(everything)]
    for (first, a), (second, b) in combinations(enumerate(sizes), 2):
        met = {(values[first], values[second]) for values in chosen}
        assert met == set(product(range(a), range(b)))
    largest = sorted(sizes)[-2:]
    assert largest[0] * largest[1] <= len(chosen) <= 1.5 * largest[0] * largest[1] + 4


def test_what_is_no_product() -> None:
    """Only pairs that there are; those of one parameter or two are all needed."""
    assert cover([]) == []
    assert cover([()]) == [0]
    assert cover([("a", 1), ("a", 2), ("b", 2)]) == [0, 1, 2]
    some = [(0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 0, 0)]
    pairs = lambda rows: {pair for row in rows for pair in combinations(enumerate(row), 2)}  # noqa: E731
    assert pairs(some) == pairs(some[place] for place in cover(some))


MARKED = """
import pytest

@pytest.fixture(params=[0, 1, pytest.param(2, marks=pytest.mark.skipif(True, reason="absent"))])
def third(request):
    return request.param

@pytest.mark.pairs
@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(3))
def test_marked(first, second, third):
    assert third < 2

@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(3))
def test_unmarked(first, second, third):
    assert third < 2
"""
HOOK = "from tests.pairwise import mark_long_runs as pytest_collection_modifyitems"


def test_others_are_long_runs(pytester: pytest.Pytester) -> None:
    """Of what is skipped here too; named or chosen with -m long they run."""
    pytester.makepyfile(MARKED)
    pytester.makeconftest(HOOK)

    def run(*arguments: str) -> dict[str, int]:
        own = ("-p", "no:cacheprovider", "-p", "no:xdist")
        return pytester.runpytest_inprocess(*own, *arguments).parseoutcomes()

    assert run("-k", "test_marked", "-m", "not long") == {
        "passed": 9,
        "skipped": 9,
        "deselected": 27 + 9,
    }
    assert run("-m", "long") == {"passed": 9, "deselected": 45}
    one = "test_others_are_long_runs.py::test_marked[1-2-2]"
    assert run(one, "-m", "not long") == {"passed": 1}
