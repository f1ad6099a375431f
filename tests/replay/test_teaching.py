"""Scripts on the small cache: each state is that of the real cache."""

from __future__ import annotations

from typing import Any

import pytest

from radixserve.errors import InvalidRequest
from radixserve.replay.teaching import CACHES, MOST_ACTIONS, NUM_PAGES, PAGE_SIZE, play

HEAD = "one two three four five six seven eight nine ten"


def owners(state: dict[str, Any]) -> list[str]:
    return [page["owner"] for page in state["pages"]]


def test_a_second_request_shares_to_the_token() -> None:
    script = [{"add": "a", "prompt": f"{HEAD} x"}, {"add": "b", "prompt": f"{HEAD} y"}]
    cached = {cache: play(script, cache)[1]["cached_tokens"] for cache in CACHES}
    assert cached == {"radix": 10, "hash": 8, "off": 0}
    for cache in CACHES:
        state = play(script, cache)[1]
        assert state["cached_tokens"] + state["computed_tokens"] == 11
        shared = [page for page in state["pages"] if len(page["requests"]) == 2]
        assert len(shared) == (0 if cache == "off" else 2)
        assert [one["tokens"][-1] for one in state["requests"]] == ["x", "y"]


def test_the_life_of_a_request() -> None:
    script = [
        {"add": "a", "prompt": HEAD},
        {"step": "a", "tokens": "eleven"},
        {"step": "a", "tokens": "twelve thirteen"},
        {"finish": "a"},
        {"add": "b", "prompt": f"{HEAD} eleven twelve thirteen again"},
    ]
    states = play(script)
    assert [len(state["requests"]) for state in states] == [1, 1, 1, 0, 1]
    assert [owners(state).count("free") for state in states] == [21, 21, 20, 20, 20]
    assert states[2]["pages"][3]["tokens"] == ["thirteen"]
    assert (states[4]["cached_tokens"], states[4]["computed_tokens"]) == (13, 1)
    off = play(script, "off")
    assert owners(off[3]) == ["free"] * NUM_PAGES
    assert off[4]["cached_tokens"] == 0


def test_a_full_cache_evicts_and_then_refuses() -> None:
    whole = list(range(1000, 1000 + NUM_PAGES * PAGE_SIZE))
    script = [
        {"add": "a", "prompt": HEAD},
        {"finish": "a"},
        {"add": "b", "prompt": whole},
        {"add": "c", "prompt": "no room"},
        {"finish": "b"},
        {"add": "c", "prompt": "room again"},
    ]
    states = play(script)
    assert states[2]["evicted_tokens"] == 10
    assert states[3]["error"] is not None
    assert [one["name"] for one in states[3]["requests"]] == ["b"]
    assert states[5]["error"] is None
    assert states[5]["evicted_tokens"] > 0


def test_wrong_scripts_are_refused() -> None:
    for wrong in (
        [{"add": "a"}],
        [{"add": "a", "prompt": ""}],
        [{"add": "a", "prompt": [1, -1]}],
        [{"add": "a", "prompt": [True]}],
        [{"add": "a", "prompt": "x", "tokens": "y"}],
        [{"add": "a", "prompt": "x"}, {"add": "a", "prompt": "x"}],
        [{"step": "a", "tokens": "x"}],
        [{"finish": "a"}],
        [{"add": "", "prompt": "x"}],
        [{"add": "a", "prompt": "x", "finish": "a"}],
        ["add"],
        [{}] * (MOST_ACTIONS + 1),
        {"add": "a"},
    ):
        with pytest.raises(InvalidRequest):
            play(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="radix"):
        play([], "lru")
    assert play([]) == []
