"""Requests as a snapshot shows them: who runs, who waits, and for whom."""

from __future__ import annotations

from typing import Any

import numpy as np

from radixserve.cache import RadixCache, SnapshotView
from radixserve.request import Request, SamplingParams
from radixserve.scheduler import Scheduler


def request(name: str, tokens: Any, namespace: str = "") -> Request:
    ids, params = np.asarray(tokens, np.int32), SamplingParams(namespace=namespace)
    return Request(name, ids, params, 0, frozenset(), len(ids) + 8, session=f"s-{name}")


def test_a_follower_names_the_one_that_it_waits_for() -> None:
    scheduler = Scheduler(RadixCache(128), chunked_prefill_size=50, max_running_requests=3)
    tokens = range(20)
    scheduler.add(request("first", tokens))
    scheduler.add(request("second", [*tokens, 30]))
    scheduler.add(request("other", range(40, 60), "tenant"))
    scheduler.add(request("late", range(70, 170)))
    assert scheduler.schedule() is not None
    found = scheduler.snapshot(SnapshotView())
    states = {one["id"]: one for one in found["requests"]}
    first, second, other, late = (states[name] for name in ("first", "second", "other", "late"))
    assert (found["running"], found["waiting"]) == (2, 2)
    assert (first["state"], first["session"], first["waits_for"]) == ("prefill", "s-first", None)
    assert (first["num_pages"], first["num_shared"]) == (20, 0)
    assert sum(count for _, count in other["pages"]) == other["num_pages"] == 20
    assert (second["state"], second["waits_for"], second["awaited_len"]) == ("follows", "first", 20)
    assert (late["state"], late["waits_for"], late["pages"]) == ("queued", None, [])
    assert second["cached_tokens"] == late["cached_tokens"] == 0

    own = scheduler.snapshot(SnapshotView(within="tenant"))
    assert [one["id"] for one in own["requests"]] == ["other"]
    assert (own["running"], own["waiting"]) == (1, 0)
    few = scheduler.snapshot(SnapshotView(max_requests=1))
    assert [one["id"] for one in few["requests"]] == ["first"]
    assert few["waiting"] == 2
