"""Routers to compare the tree router with in `radixserve.replay.replicas`.

`rival(number, name, ...)` is a `Cluster` with one of them.
"""

from __future__ import annotations

import itertools
import random
import zlib
from bisect import bisect, insort
from collections.abc import Callable
from typing import Any

import numpy as np

from radixserve.cache import PrefixCache
from radixserve.fleet.index_node import Reservation
from radixserve.fleet.token_index import TokenIndex
from radixserve.replay.paths import build_paths
from radixserve.replay.replicas import Cluster, MakeRouter, make_tree_router
from radixserve.replay.scheduled import StepModel
from radixserve.replay.trace import Trace, TraceRequest


class _CacheUnaware:
    """Knows nothing of the caches."""

    def __init__(self) -> None:
        self._replicas: list[int] = []  # that are there, sorted

    def add(self, replica: int, cache: PrefixCache) -> None:  # noqa: ARG002
        insort(self._replicas, replica)

    def remove(self, replica: int) -> None:
        self._replicas.remove(replica)

    def events(self, replica: int) -> Callable[[], object]:  # noqa: ARG002
        return lambda: None

    def start(self, attempt: int) -> None:
        pass

    def end(self, attempt: int, num_output: int) -> None:
        pass


class RoundRobin(_CacheUnaware):
    def choose(self, request: TraceRequest, attempt: int) -> int:  # noqa: ARG002
        return self._replicas[request.index % len(self._replicas)]


class Random(_CacheUnaware):
    def choose(self, request: TraceRequest, attempt: int) -> int:  # noqa: ARG002
        return self._replicas[random.Random(request.index).randrange(len(self._replicas))]


class BySession(_CacheUnaware):
    """Consistent hashing of the session, of the request itself where it has none. A replica has the
    same place on the ring whenever it is there."""

    def __init__(self) -> None:
        super().__init__()
        self._points: list[tuple[int, int]] = []

    def add(self, replica: int, cache: PrefixCache) -> None:
        super().add(replica, cache)
        names = (f"{replica} {point}" for point in range(128))
        self._points += [(zlib.crc32(name.encode()), replica) for name in names]
        self._points.sort()

    def remove(self, replica: int) -> None:
        super().remove(replica)
        self._points = [point for point in self._points if point[1] != replica]

    def choose(self, request: TraceRequest, attempt: int) -> int:  # noqa: ARG002
        key = zlib.crc32((request.session or f"#{request.index}").encode())
        return self._points[bisect(self._points, (key, -1)) % len(self._points)][1]


class Approximate(_CacheUnaware):
    """As SGLang's router describes its cache-aware policy: a tree of its own choices, which knows
    nothing of evictions. Where loads differ too much, to the replica with the fewest requests; else
    where most of the prompt was sent before, if that is enough of it; else where the tree is
    smallest."""

    CACHE_THRESHOLD = 0.3
    BALANCE_ABS, BALANCE_REL = 64, 1.5

    def __init__(self, most_replicas: int) -> None:
        super().__init__()
        self._index = TokenIndex()
        for replica in range(most_replicas):
            assert self._index.add(str(replica)) == replica
        self._sent: list[list[Reservation]] = [[] for _ in range(most_replicas)]
        self._lengths = np.zeros(most_replicas, np.int32)
        self._sizes = np.zeros(most_replicas, np.int64)  # tokens
        self._running = np.zeros(most_replicas, np.int64)
        self._places: dict[int, int] = {}

    def remove(self, replica: int) -> None:
        """The tree forgets what was sent there."""
        super().remove(replica)
        for reservation in self._sent[replica]:
            self._index.release(reservation)
        self._sent[replica].clear()
        self._sizes[replica] = self._running[replica] = 0
        self._places = {key: place for key, place in self._places.items() if place != replica}

    def choose(self, request: TraceRequest, attempt: int) -> int:
        tokens, num_prompt = request.prompt.tobytes(), len(request.prompt)
        matched = self._index.match(tokens, request.namespace, self._lengths)
        replicas = self._replicas
        running = self._running[replicas]
        most, least = running.max(), running.min()
        if most - least > self.BALANCE_ABS and most > self.BALANCE_REL * least:
            number = replicas[running.argmin()]
        elif self._lengths.max() > self.CACHE_THRESHOLD * num_prompt:
            number = int(self._lengths.argmax())
        else:
            number = replicas[self._sizes[replicas].argmin()]
        self._sent[number].append(self._index.reserve(tokens, request.namespace, number, matched))
        self._sizes[number] += num_prompt - self._lengths[number]
        self._running[number] += 1
        self._places[attempt] = number
        return number

    def end(self, attempt: int, num_output: int) -> None:  # noqa: ARG002
        if attempt in self._places:
            self._running[self._places.pop(attempt)] -= 1


class Offline(_CacheUnaware):
    """Knows the whole trace: shows what is possible.

    Conversations are laid end to end and cut into equal parts, one a replica, so that at most one
    conversation is computed again for each replica. Neighbours began far apart: a replica seldom
    has two at a time.
    """

    def __init__(self, num_replicas: int, trace: Trace, step: StepModel) -> None:
        super().__init__()
        sessions: dict[str, list[int]] = {}
        for index, session in enumerate(trace.sessions):
            sessions.setdefault(session or f"#{index}", []).append(index)
        requests = list(sessions.values())  # of each conversation
        line = [
            session for first in range(num_replicas) for session in requests[first::num_replicas]
        ]
        reusable = build_paths(trace).reusable
        missing = step.prefill_token_s * (trace.num_prompt - reusable)
        decode = trace.num_output * (step.decode_row_s + step.kv_token_s * trace.num_prompt)
        work, history = missing + decode, step.prefill_token_s * reusable
        low, high = 0.0, float((work + history).sum())
        for _ in range(40):  # the least share with which there are replicas enough
            share, load, replica = (low + high) / 2, 0.0, 0
            places = np.zeros(len(trace), np.int64)
            for index in itertools.chain.from_iterable(line):
                if load + work[index] / 2 > share:
                    load, replica = float(history[index]), replica + 1
                load += float(work[index])
                places[index] = replica
            if replica < num_replicas:
                high, self._places = share, places
            else:
                low = share

    def choose(self, request: TraceRequest, attempt: int) -> int:  # noqa: ARG002
        return int(self._places[request.index])


_MAKERS: dict[str, MakeRouter] = {
    "tree": make_tree_router,
    "round-robin": lambda *_: RoundRobin(),
    "random": lambda *_: Random(),
    "session": lambda *_: BySession(),
    "approximate": lambda cluster, *_: Approximate(cluster.most_replicas),
    "offline": lambda cluster, trace, _: Offline(cluster.most_replicas, trace, cluster.step),
}
ROUTERS = tuple(_MAKERS)


def rival(num_replicas: int, router: str, *settings: Any, **named_settings: Any) -> Cluster:
    """A cluster with the router of that name; the settings are those of `Cluster`.

    The router "offline" knows neither failures nor autoscaling: ValueError.
    """
    make_router = _MAKERS[router]
    cluster = Cluster(num_replicas, router, *settings, make_router=make_router, **named_settings)
    if router == "offline" and not cluster.is_fixed:
        raise ValueError("the router offline knows neither failures nor autoscaling")
    return cluster
