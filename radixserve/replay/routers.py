"""The routers that `replicas` compares: the tree router, and what others do."""

from __future__ import annotations

import itertools
import random
import zlib
from bisect import bisect, insort
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np

from radixserve.cache import EventBatch, EventLog, PrefixCache
from radixserve.replay.paths import build_paths
from radixserve.replay.serving import StepModel
from radixserve.replay.trace import Trace, TraceRequest
from radixserve.routing.records import Reservation
from radixserve.routing.token_index import TokenIndex
from radixserve.routing.tree_router import StepCosts, TreeRouter


class ReplayRouter(Protocol):
    """Replicas are known by their numbers from `add` to `remove`, requests by that of
    an attempt: one that loses its replica is sent again, as another attempt."""

    def add(self, replica: int, cache: PrefixCache) -> None:
        """The cache is empty."""
        ...

    def remove(self, replica: int) -> None: ...

    def choose(self, request: TraceRequest, attempt: int) -> int:
        """Only called while there are replicas."""
        ...

    def events(self, replica: int) -> Callable[[], object]:
        """Takes what that cache has to tell; the call is made when it arrives."""
        ...

    def start(self, attempt: int) -> None:
        """The first token has come. Nothing happens where the replica was removed meanwhile."""
        ...

    def end(self, attempt: int, num_output: int) -> None:
        """As `start`."""
        ...


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
        for one in self._sent[replica]:
            self._index.release(one)
        self._sent[replica].clear()
        self._sizes[replica] = self._running[replica] = 0
        self._places = {key: place for key, place in self._places.items() if place != replica}

    def choose(self, request: TraceRequest, attempt: int) -> int:
        tokens, num_prompt = request.prompt.tobytes(), len(request.prompt)
        matched = self._index.match(tokens, request.namespace, self._lengths)
        there = self._replicas
        running = self._running[there]
        most, least = running.max(), running.min()
        if most - least > self.BALANCE_ABS and most > self.BALANCE_REL * least:
            number = there[running.argmin()]
        elif self._lengths.max() > self.CACHE_THRESHOLD * num_prompt:
            number = int(self._lengths.argmax())
        else:
            number = there[self._sizes[there].argmin()]
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
        found = list(sessions.values())
        line = [one for first in range(num_replicas) for one in found[first::num_replicas]]
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


class Tree:
    """`TreeRouter`, fed by the events of the caches."""

    def __init__(self, step: StepModel, clock: Callable[[], float]) -> None:
        self._router = TreeRouter(clock)
        self._costs = StepCosts(step.prefill_token_s, step.decode_row_s, step.kv_token_s)
        self._logs: dict[int, EventLog] = {}  # by number
        self._names: dict[int, str] = {}  # another one at each start
        self._numbers: dict[str, int] = {}
        self._starts = itertools.count()

    def add(self, replica: int, cache: PrefixCache) -> None:
        name = f"{replica} {next(self._starts)}"
        log = self._logs[replica] = cache.open_events(1)
        self._names[replica], self._numbers[name] = name, replica
        self._router.add(name, self._costs)
        self._router.restart(name, log.snapshot())

    def remove(self, replica: int) -> None:
        name = self._names.pop(replica)
        del self._logs[replica], self._numbers[name]
        self._router.remove(name)

    def choose(self, request: TraceRequest, attempt: int) -> int:
        found = self._router.choose(str(attempt), request.prompt.tobytes(), request.namespace)
        assert found is not None
        return self._numbers[found]

    def events(self, replica: int) -> Callable[[], object]:
        return partial(self._take, self._names[replica], self._logs[replica].take())

    def _take(self, name: str, batch: EventBatch) -> None:
        if name in self._numbers:  # what comes from a lost one is dropped
            self._router.take(name, batch)

    def start(self, attempt: int) -> None:
        self._router.start(str(attempt))

    def end(self, attempt: int, num_output: int) -> None:
        self._router.end(str(attempt), num_output)


ROUTERS = ("tree", "round-robin", "random", "session", "approximate", "offline")


def make_router(
    name: str, most_replicas: int, trace: Trace, step: StepModel, clock: Callable[[], float]
) -> ReplayRouter:
    """It knows no replica yet. `most_replicas`: that are there at one time."""
    if name == "tree":
        return Tree(step, clock)
    if name == "offline":
        return Offline(most_replicas, trace, step)
    if name == "approximate":
        return Approximate(most_replicas)
    blind: dict[str, type[RoundRobin | Random | BySession]] = {
        "round-robin": RoundRobin,
        "random": Random,
        "session": BySession,
    }
    return blind[name]()
