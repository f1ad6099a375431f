"""Snapshots: what `dump` shows, at a cost that does not grow with the tree, nothing of others."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, HashBlockCache, PrefixCache, RadixCache, SnapshotView
from radixserve.cache.snapshot import OWNERS, page_runs

NAMES = {letter: name for name, letter in OWNERS.items()}


def use(cache: PrefixCache, tokens: Any, namespace: str = "", **options: Any) -> CacheSequence:
    """A sequence of `tokens`, all of them published."""
    sequence = cache.acquire(np.asarray(tokens, np.int32), namespace, **options)
    sequence.extend(np.asarray(tokens, np.int32)[sequence.cached_len :])
    sequence.commit(sequence.length)
    return sequence


def owners(snapshot: dict[str, Any]) -> Counter[str]:
    return Counter(NAMES[letter] for letter in snapshot["pages"]["owners"])


def pages_of(runs: list[list[int]]) -> list[int]:
    return [page for first, count in runs for page in range(first, first + count)]


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_small_tree_is_shown_as_dump_shows_it(page_size: int) -> None:
    cache = RadixCache(64, page_size)
    session = cache.open_session("chat")
    use(cache, range(24)).release()
    use(cache, [*range(12), *range(100, 112)], session=session).release()
    held = use(cache, [*range(8), *range(200, 209)])
    forked = held.fork()
    snapshot, dump = cache.snapshot(SnapshotView()), cache.dump()
    nodes = {}
    stack = [(None, root) for root in dump["namespaces"].values()]
    while stack:
        parent, node = stack.pop()
        key = tuple(node["tokens"])
        nodes[node["start"], key] = (parent, node)
        stack += [(key, child) for child in node["children"]]
    assert len(snapshot["nodes"]) == len(nodes) - 1  # without the root
    texts = {shown["id"]: tuple(shown["head"] + shown["tail"]) for shown in snapshot["nodes"]}
    for shown in snapshot["nodes"]:
        parent, node = nodes[shown["start"], texts[shown["id"]]]
        assert texts.get(shown["parent"], ()) == parent
        for name in ("num_tokens", "lock_ref", "sequences", "state"):
            assert shown[name] == node[name], name
        assert pages_of(shown["pages"]) == node["pages"]
        assert shown["num_children"] == len(node["children"])
        assert (shown["idle_s"] is None) == bool(shown["lock_ref"])
    assert [shown["sessions"] for shown in snapshot["nodes"] if shown["num_sessions"]].count(
        ["chat"]
    ) == 1
    stats, counted = cache.stats(), owners(snapshot)
    assert counted["free"] == stats["pages_free"]
    assert counted["private"] == stats["pages_private"] == snapshot["pages"]["private"]
    assert counted["locked"] == stats["pages_locked"]
    assert counted["tree"] + counted["leased"] == stats["pages_cached"]
    assert counted["leased"] > 0
    users = snapshot["pages"][
        "users"
    ]  # of page tables: the fork has its own copy of a part of a page
    assert snapshot["pages"]["shared"] == sum(digit > "1" for digit in users)
    assert snapshot["pages"]["shared"] == stats["pages_shared"] - (page_size > 1)
    assert sum(int(digit, 36) for digit in users) == len(held.pages) + len(forked.pages)
    slots = dump["fragmentation"]
    assert snapshot["fragmentation"] == {name: slots[name] for name in ("slots", "unused_slots")}
    ids = [shown["head"] + shown["tail"] for shown in snapshot["victims"]]
    assert ids == [shown["tokens"] for shown in cache.eviction_preview(8)]
    for sequence in (held, forked):
        sequence.release()
    cache.check()


def test_the_hash_cache_shows_runs_of_blocks() -> None:
    cache = HashBlockCache(64, 4)
    use(cache, range(24)).release()
    held = use(cache, [*range(12), *range(100, 113)])
    snapshot, stats = cache.snapshot(SnapshotView()), cache.stats()
    trunk, branch = sorted(snapshot["nodes"], key=lambda shown: shown["start"])
    assert trunk["head"] == [*range(24)]
    assert (branch["parent"], branch["start"]) == (trunk["id"], 12)
    assert branch["head"] == [*range(100, 112)]
    assert (trunk["state"], branch["sequences"]) == ("referenced", 1)
    counted = owners(snapshot)
    assert counted["free"] == stats["pages_free"]
    assert counted["private"] == stats["pages_private"] == 1
    assert counted["locked"] == stats["pages_locked"]
    assert snapshot["victims"][0]["head"] == [20, 21, 22, 23]
    held.release()


def test_a_namespace_sees_its_own_part_only() -> None:
    for cache in (RadixCache(64, 4), HashBlockCache(64, 4)):
        mine = use(cache, range(10), "ann")
        use(cache, range(50, 62), "ann/salt").release()
        theirs = [use(cache, range(20, 30), name) for name in ("bob", "anna")]
        snapshot = cache.snapshot(SnapshotView(within="ann"))
        assert {shown["namespace"] for shown in snapshot["nodes"]} == {"ann", "ann/salt"}
        assert {space["name"] for space in snapshot["namespaces"]} == {"ann", "ann/salt"}
        counted = owners(snapshot)
        assert counted == Counter(other=64 - 6, locked=3 - mine.num_private, tree=3,
                                  private=mine.num_private)  # fmt: skip
        assert snapshot["victims"] == []
        assert "free_runs" not in snapshot["pages"]
        path = SnapshotView(within="ann", path=tuple(range(20, 30)), path_namespace="bob")
        again = cache.snapshot(path)["nodes"]
        assert [shown["id"] for shown in again] == [shown["id"] for shown in snapshot["nodes"]]
        for sequence in (mine, *theirs):
            sequence.release()


def big_tree(num_branches: int) -> RadixCache:
    """Each branch adds one node or two."""
    rng = np.random.default_rng(0)
    cache = RadixCache(200_000)
    trunks: list[IntArray] = [rng.integers(0, 1000, 40).astype(np.int32)]
    for _ in range(num_branches):
        trunk = trunks[rng.integers(len(trunks))]
        tail = rng.integers(0, 1000, 4)
        tokens = np.concatenate((trunk[: rng.integers(len(trunk))], tail)).astype(np.int32)
        use(cache, tokens).release()
        trunks.append(tokens)
    return cache


def num_calls(cache: PrefixCache, view: SnapshotView) -> int:
    """Function calls, of Python and of C, that a snapshot takes."""
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        cache.snapshot(view)
    finally:
        sys.setprofile(None)
    return calls


def test_a_snapshot_costs_no_more_for_a_larger_tree() -> None:
    view = SnapshotView(opened=frozenset(range(50)), max_nodes=60, max_cells=512)
    small, large = big_tree(2500), big_tree(6000)
    snapshot = large.snapshot(view)
    assert len(snapshot["nodes"]) == 60
    assert len(snapshot["pages"]["owners"]) <= 512
    assert num_calls(large, view) < 1.2 * num_calls(small, view)


def test_what_was_asked_for_is_shown_in_a_large_tree() -> None:
    cache = big_tree(1000)
    wanted = [*range(2000, 2010)]
    use(cache, wanted).release()
    for number in range(400):
        use(cache, [3000 + number, 1]).release()
    small = SnapshotView(max_nodes=60)
    assert 2000 not in {shown["head"][0] for shown in cache.snapshot(small)["nodes"]}
    snapshot = cache.snapshot(SnapshotView(max_nodes=60, path=tuple(wanted)))
    assert snapshot["nodes"][0]["head"] == wanted
    root = snapshot["namespaces"][0]
    assert root["num_children"] > 400


def test_opened_nodes_show_more_children() -> None:
    cache = RadixCache(4096)
    for number in range(100):
        use(cache, [1, 2, 3, 100 + number]).release()
    (trunk,) = [
        shown for shown in cache.snapshot(SnapshotView())["nodes"] if shown["parent"] is None
    ]
    assert trunk["num_children"] == 100
    few = len(cache.snapshot(SnapshotView())["nodes"])
    view = SnapshotView(opened=frozenset({trunk["id"]}))
    assert len(cache.snapshot(view)["nodes"]) == 101 > few


def test_pinned_and_retained_nodes() -> None:
    cache = RadixCache(64, 4)
    use(cache, range(12)).release()
    use(cache, range(20, 32)).release()
    with cache.open_session("keeper") as session:
        pin = cache.pin(range(12), session=session)
        kept = use(cache, range(20, 32), session=session)
        kept.release()
        snapshot = cache.snapshot(SnapshotView())
        states = {shown["head"][0]: shown for shown in snapshot["nodes"]}
        assert (states[0]["state"], states[0]["sequences"], states[0]["lock_ref"]) == (
            "pinned", 0, 1
        )  # fmt: skip
        assert states[20]["state"] == "leased"
        assert owners(snapshot) == Counter(free=64 - 6, locked=3, leased=3)
        assert set(snapshot["pages"]["users"]) == {"0"}
        pin.release()


def test_runs_of_pages() -> None:
    assert page_runs(np.array([], np.int32)) == []
    assert page_runs(np.array([7], np.int32)) == [[7, 1]]
    assert page_runs(np.array([7, 8, 9, 3, 2, 1, 5], np.int32)) == [
        [7, 3], [3, 1], [2, 1], [1, 1], [5, 1]
    ]  # fmt: skip
    assert page_runs(np.array([1, 3, 2, 4], np.int32)) == [[1, 1], [3, 1], [2, 1], [4, 1]]
