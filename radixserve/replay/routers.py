"""The routers that `replicas` compares: the tree router, and what others do."""

from __future__ import annotations

import itertools
import random
import zlib
from bisect import bisect
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from radixserve.cache import EventLog, PrefixCache
from radixserve.replay.paths import build_paths
from radixserve.replay.serving import StepModel
from radixserve.replay.trace import Trace, TraceRequest
from radixserve.routing.token_index import TokenIndex
from radixserve.routing.tree_router import StepCosts, TreeRouter


class ReplayRouter(Protocol):
    """Replicas are known by their numbers, requests by their indexes."""

    def choose(self, request: TraceRequest) -> int: ...

    def events(self, replica: int) -> Callable[[], object]:
        """Takes what that cache has to tell; the call is made when it arrives."""
        ...

    def start(self, index: int) -> None:
        """The request's first token has come."""
        ...

    def end(self, index: int, num_output: int) -> None: ...


class _CacheUnaware:
    """Knows nothing of the caches."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas

    def events(self, replica: int) -> Callable[[], object]:  # noqa: ARG002
        return lambda: None

    def start(self, index: int) -> None:
        pass

    def end(self, index: int, num_output: int) -> None:
        pass


class RoundRobin(_CacheUnaware):
    def choose(self, request: TraceRequest) -> int:
        return request.index % self._num_replicas


class Random(_CacheUnaware):
    def choose(self, request: TraceRequest) -> int:
        return random.Random(request.index).randrange(self._num_replicas)


class BySession(_CacheUnaware):
    """Consistent hashing of the session, of the request itself where it has none."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        points = [
            (zlib.crc32(f"{replica} {point}".encode()), replica)
            for replica in range(num_replicas)
            for point in range(128)
        ]
        self._points = sorted(points)

    def choose(self, request: TraceRequest) -> int:
        key = zlib.crc32((request.session or f"#{request.index}").encode())
        return self._points[bisect(self._points, (key, -1)) % len(self._points)][1]


class Approximate(_CacheUnaware):
    """As SGLang's router describes its cache-aware policy: a tree of its own choices, which knows
    nothing of evictions. Where loads differ too much, to the replica with the fewest requests; else
    where most of the prompt was sent before, if that is enough of it; else where the tree is
    smallest."""

    CACHE_THRESHOLD = 0.3
    BALANCE_ABS, BALANCE_REL = 64, 1.5

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self._index = TokenIndex()
        for replica in range(num_replicas):
            assert self._index.add(str(replica)) == replica
        self._lengths = np.zeros(num_replicas, np.int32)
        self._sizes = np.zeros(num_replicas, np.int64)  # tokens
        self._running = np.zeros(num_replicas, np.int64)
        self._places: dict[int, int] = {}

    def choose(self, request: TraceRequest) -> int:
        tokens, num_prompt = request.prompt.tobytes(), len(request.prompt)
        matched = self._index.match(tokens, request.namespace, self._lengths)
        most, least = self._running.max(), self._running.min()
        if most - least > self.BALANCE_ABS and most > self.BALANCE_REL * least:
            number = int(self._running.argmin())
        elif self._lengths.max() > self.CACHE_THRESHOLD * num_prompt:
            number = int(self._lengths.argmax())
        else:
            number = int(self._sizes.argmin())
        self._index.reserve(tokens, request.namespace, number, matched)  # never released
        self._sizes[number] += num_prompt - self._lengths[number]
        self._running[number] += 1
        self._places[request.index] = number
        return number

    def end(self, index: int, num_output: int) -> None:  # noqa: ARG002
        self._running[self._places.pop(index)] -= 1


class Offline(_CacheUnaware):
    """Knows the whole trace: shows what is possible.

    Conversations are laid end to end and cut into equal parts, one a replica, so that at most one
    conversation is computed again for each replica. Neighbours began far apart: a replica seldom
    has two at a time.
    """

    def __init__(self, num_replicas: int, trace: Trace, step: StepModel) -> None:
        super().__init__(num_replicas)
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

    def choose(self, request: TraceRequest) -> int:
        return int(self._places[request.index])


class Tree:
    """`TreeRouter`, fed by the events of the caches."""

    def __init__(
        self, caches: Sequence[PrefixCache], step: StepModel, clock: Callable[[], float]
    ) -> None:
        self._router = TreeRouter(clock)
        self._logs: list[EventLog] = []
        costs = StepCosts(step.prefill_token_s, step.decode_row_s, step.kv_token_s)
        for number, cache in enumerate(caches):
            self._logs.append(cache.open_events(1))
            self._router.add(str(number), costs)
            self._router.restart(str(number), self._logs[-1].snapshot())

    def choose(self, request: TraceRequest) -> int:
        found = self._router.choose(str(request.index), request.prompt.tobytes(), request.namespace)
        assert found is not None
        return int(found)

    def events(self, replica: int) -> Callable[[], object]:
        batch = self._logs[replica].take()
        return lambda: self._router.take(str(replica), batch)

    def start(self, index: int) -> None:
        self._router.start(str(index))

    def end(self, index: int, num_output: int) -> None:
        self._router.end(str(index), num_output)


_BLIND: dict[str, type[RoundRobin | Random | BySession | Approximate]] = {
    "round-robin": RoundRobin,
    "random": Random,
    "session": BySession,
    "approximate": Approximate,
}
ROUTERS = ("tree", *_BLIND, "offline")


def make_router(
    name: str,
    caches: Sequence[PrefixCache],
    trace: Trace,
    step: StepModel,
    clock: Callable[[], float],
) -> ReplayRouter:
    if name == "tree":
        return Tree(caches, step, clock)
    if name == "offline":
        return Offline(len(caches), trace, step)
    return _BLIND[name](len(caches))
