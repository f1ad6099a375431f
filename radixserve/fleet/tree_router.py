"""`TreeRouter`: chooses the replica on which a request costs least, by what each has cached.

    cost = prefill x (1 + price) + half a mean request x price + wait + displaced

All costs are in seconds; the replica with the smallest cost is chosen.

- prefill: time to compute the tokens that are not cached there. A prefix that n replicas have costs
  nothing if its requests are at least n + 1 mean loads of recent work, since another replica must
  compute it anyway.
- price: exp((load - mean load) / scale). Work costs more on a busy replica. So requests with the
  same prefix stay together until their replica has too much work.
- load: recent work, and the expected work of the replica's open conversations. The router learns
  how often and how soon prompts are continued. So new conversations go where few are open.
- wait: half of the prefill that is queued there; half, since requests are not served in order of
  arrival.
- displaced: time to recompute the tokens that must be evicted; those that were used long ago count
  less. So prompts without a cached prefix go where they evict least, and all caches together evict
  in nearly the order of a single one.

Evictions reach the router as cache events: `take`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixserve.cache.events import EventBatch, EventSnapshot
from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.fleet.index_node import NEVER, Conversation, IndexNode, Reservation
from radixserve.fleet.token_index import WORK_HALF_LIFE_S, TokenIndex

Floats = NDArray[np.float64]
# Of a request that loses its replica, in `ClusterClient` and in the replay:
WITHOUT_REPLICA_S = 120.0  # how long it waits for another one
MAX_LOST = 3  # a request that has lost 3 replicas fails, since it may be the cause
# The scale of the price is the sum of the two: a load that much above the mean costs e times more.
_SCALE_REQUESTS = 1.0  # in mean requests
_SCALE_SHARE = 0.045  # as a part of the mean load
_PRICED_REQUESTS = 0.5  # mean requests whose price is added to that of the prefill
_MAX_EXPONENT = 50.0
_MAX_CONTINUED = 10.0  # mean requests that are expected of an open conversation at most
_OPEN_GAPS = 4.0  # expected work halves after so many mean gaps between continued requests
_WAIT_SHARE = 0.5
_MAX_DISPLACED = 4.0  # the most that an evicted token costs, in times of its prefill
_EMA = 0.02  # weight of a request in moving averages


class StepCosts(NamedTuple):
    """Seconds that a replica's steps take. Default: 8 billion parameters in bfloat16 on a GPU."""

    prefill_token_s: float = 27e-6
    decode_row_s: float = 20e-6  # for each decoded token
    kv_token_s: float = 50e-9  # for each decoded token and each token before it


class RoutedRequest(NamedTuple):
    """A request that was sent to a replica and has not ended."""

    replica: str
    reservation: Reservation
    num_prompt: int
    num_output: float  # expected
    prefill_s: float


class TreeRouter:
    """Chooses replicas. A replica is known by its name from `add` to `remove`. Owned by one thread.

    A choice among 64 replicas takes about 90 us for a prompt of 8,000 tokens, more than half of it
    in the index.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: returns the time in seconds."""
        self.index = TokenIndex()
        self._clock = clock
        self._names: dict[int, str] = {}  # by number
        self._routed: dict[str, RoutedRequest] = {}  # by request id
        self._starting: set[str] = set()  # those of `_routed` without a first token
        self._homes: dict[str, str] = {}  # by session: the replica where it ran last
        self._mean_output = 128.0  # tokens per request
        self._mean_work = 0.0  # seconds per request
        self._continued = 0.0  # share of requests that continue another request's prompt
        self._mean_gap_s = 10.0  # between a request and the one that continues it
        self._decayed_at = clock()
        self._resize(8)

    def _resize(self, size: int) -> None:
        """Make room for `size` replicas. All arrays: [size], by number."""
        old = getattr(self, "_state", np.zeros((8, 0)))
        self._state = np.zeros((8, size))
        self._state[:, : old.shape[1]] = old
        (self._prefill_s, self._row_s, self._kv_s) = self._state[:3]  # StepCosts
        (self._work_s, self._queued_s) = self._state[3:5]  # recent work; queued prefill
        self._evicted_at, self._absent = self._state[5:7]  # absent: inf without such a replica
        self._expected_s = self._state[7]  # work that open conversations will bring
        self._evicted_at[old.shape[1] :] = NEVER
        self._absent[old.shape[1] :] = np.inf
        self._lengths = np.zeros(size, np.int32)

    # -- replicas -----------------------------------------------------------------------------

    @property
    def replicas(self) -> Sequence[str]:
        return list(self._names.values())

    def add(self, replica: str, costs: StepCosts | None = None) -> None:
        """Add a replica with an empty cache. Its load begins as that of the least loaded one."""
        number = self.index.add(replica)
        if number >= len(self._lengths):
            self._resize(2 * number)
        others = [self._work_s[other] for other in self._names]
        self._state[:, number] = (*(costs or StepCosts()), min(others, default=0), 0, NEVER, 0, 0)
        self._names[number] = replica

    def remove(self, replica: str) -> None:
        """Remove a replica with its cached tokens and its open requests."""
        for request_id in [
            key for key, request in self._routed.items() if request.replica == replica
        ]:
            self._starting.discard(request_id)
            self.index.release(self._routed.pop(request_id).reservation)
        self._homes = {key: home for key, home in self._homes.items() if home != replica}
        number = self.index.number(replica)
        self.index.remove(replica)
        del self._names[number]
        self._state[:, number] = (0, 0, 0, 0, 0, NEVER, np.inf, 0)

    def take(self, replica: str, batch: EventBatch) -> None:
        """Apply new cache events: what the replica has stored and evicted. See
        `TokenIndex.take`."""
        self.index.now = self._clock()
        self.index.take(replica, batch)
        self._evicted_at[self.index.number(replica)] = self.index.evicted_at(replica)

    def restart(self, replica: str, snapshot: EventSnapshot) -> bool:
        """Replace what is known of the replica's cache by a snapshot. See `TokenIndex.restart`."""
        self.index.now = self._clock()
        is_new = self.index.restart(replica, snapshot)
        self._evicted_at[self.index.number(replica)] = self.index.evicted_at(replica)
        return is_new

    # -- requests -----------------------------------------------------------------------------

    def choose(
        self,
        request_id: str,
        tokens: bytes,
        namespace: str = "",
        *,
        max_output: int = 1 << 30,
        session: str = "",
    ) -> str | None:
        """Choose the replica of a request; None without replicas.

        Until `end`, the request counts as the replica's load, and all of `tokens` (int32) as cached
        there. A request of a known session counts only what the session's replica has cached.
        """
        if not self._names:
            return None
        now = self.index.now = self._clock()
        num_prompt = len(tokens) // TOKEN_BYTES
        self._decay(now)
        share_s = max(float(self._work_s.sum()) / len(self._names), 1e-9)
        needs = (share_s, float(self._prefill_s.max()))
        matched = self.index.match(tokens, namespace, self._lengths, needs)
        spread = 0 if matched is None else matched.spread
        home = self._homes.get(session)
        if home is not None:
            spread = 0
            number = self.index.number(home)
            kept, self._lengths[:] = self._lengths[number], 0
            self._lengths[number] = kept
        missing = num_prompt - self._lengths
        prefill = missing * self._prefill_s
        num_output = min(self._mean_output, max_output)
        work = prefill + num_output * (self._row_s + num_prompt * self._kv_s)
        displaced = (missing + num_output) * self._prefill_s * self._displaced(now)
        wait = _WAIT_SHARE * self._queued_s
        price = self._prices(now, None if matched is None else matched.continued)
        charged = (num_prompt - np.maximum(self._lengths, spread)) * self._prefill_s
        cost = charged * (1.0 + price) + _PRICED_REQUESTS * self._mean_work * price
        number = int((cost + wait + displaced + self._absent).argmin())
        seconds = float(work[number])
        self._mean_work += (seconds - self._mean_work) * (_EMA if self._mean_work else 1.0)
        self._work_s[number] += seconds
        self._queued_s[number] += prefill[number]
        reservation = self.index.reserve(
            tokens, namespace, number, matched, seconds - float(prefill[number])
        )
        self._expect(reservation, now)
        name = self._names[number]
        prefill_s = float(prefill[number])
        self._routed[request_id] = RoutedRequest(
            name, reservation, num_prompt, num_output, prefill_s
        )
        self._starting.add(request_id)
        if session:
            self._homes[session] = name
        return name

    def _decay(self, now: float) -> None:
        elapsed = now - self._decayed_at
        if elapsed > 0.0:
            self._work_s *= 0.5 ** (elapsed / WORK_HALF_LIFE_S)
            self._expected_s *= self._still_running(elapsed)
            self._decayed_at = now

    def _still_running(self, elapsed: float) -> float:
        """The part of a conversation's expected work that remains after `elapsed` seconds."""
        return float(0.5 ** (elapsed / (_OPEN_GAPS * max(self._mean_gap_s, 1e-3))))

    def _prices(self, now: float, continued: IndexNode | None) -> Floats:
        """[size] the price of a second of work on each replica, in seconds. The expected work of
        the conversation that the request continues is taken off its replica's load."""
        self._continued += _EMA * ((continued is not None) - self._continued)
        if continued is not None and continued.conversation is not None:
            number, expected_s, used_at = continued.conversation
            continued.conversation = None
            elapsed = now - used_at
            expected_s = min(expected_s * self._still_running(elapsed), self._expected_s[number])
            self._expected_s[number] -= expected_s
            self._mean_gap_s += _EMA * (elapsed - self._mean_gap_s)
        load = self._work_s + self._expected_s
        mean = float(load.sum()) / len(self._names)
        scale = max(_SCALE_REQUESTS * self._mean_work + _SCALE_SHARE * mean, 1e-9)
        return np.exp(np.minimum((load - mean) / scale, _MAX_EXPONENT))

    def _expect(self, reservation: Reservation, now: float) -> None:
        """Add the expected work of the prompt's continuations to its replica, by how often other
        prompts were continued."""
        number, node = reservation
        if node.conversation is not None:  # an equal prompt was counted
            return
        times = min(self._continued / max(1.0 - self._continued, 1e-9), _MAX_CONTINUED)
        node.conversation = Conversation(number, times * self._mean_work, now)
        self._expected_s[number] += times * self._mean_work

    def _displaced(self, now: float) -> Floats | float:
        """[size] the tokens of prefill that storing a token costs by evictions."""
        ages = now - self._evicted_at
        known = ages[ages < np.inf]
        if not len(known):
            return 0.0
        mean = max(float(known.sum()) / len(known), 1e-9)
        return np.minimum(mean / np.maximum(ages, 1e-9), _MAX_DISPLACED)

    def start(self, request_id: str) -> None:
        """A request's first token has come: its prefill is no longer queued. Idempotent."""
        if request_id in self._starting:
            self._starting.remove(request_id)
            request = self._routed[request_id]
            self._queued_s[request.reservation.number] -= request.prefill_s

    def end(self, request_id: str, num_output: int | None = None) -> None:
        """A request has ended, with `num_output` tokens if that is known. Idempotent.

        Call it after the events of its stored tokens were applied by `take`.
        """
        self.start(request_id)
        request = self._routed.pop(request_id, None)
        if request is None:
            return
        number = request.reservation.number
        if num_output is not None:
            self._mean_output += _EMA * (num_output - self._mean_output)
            token_s = self._row_s[number] + request.num_prompt * self._kv_s[number]
            self._work_s[number] += (num_output - request.num_output) * token_s
        self.index.release(request.reservation)

    def best(self, tokens: bytes, namespace: str = "") -> str | None:
        """The replica that has cached most of `tokens` (int32); None without replicas."""
        if not self._names:
            return None
        self.index.match(tokens, namespace, self._lengths)
        return self._names[max(self._names, key=self._lengths.__getitem__)]

    def of_request(self, request_id: str) -> str | None:
        """The replica of a request that has not ended; None if it is unknown."""
        request = self._routed.get(request_id)
        return None if request is None else request.replica

    def of_session(self, session: str) -> str | None:
        """The replica on which a session ran last; None if it is unknown."""
        return self._homes.get(session)

    def close_session(self, session: str) -> None:
        self._homes.pop(session, None)
