"""`AdviceExtension`: follows an engine's traffic, and says what more memory would be worth."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from radixserve.advice.fingerprints import Fingerprints, Hashes, Piece, namespace_salt
from radixserve.advice.messages import GetAdvice
from radixserve.advice.report import advice_line
from radixserve.advice.reuse_curve import LEAST_BLOCK, ReuseCurve, Use
from radixserve.arrays import IntArray
from radixserve.cache import PrefixCache
from radixserve.engine.extension import EngineExtension
from radixserve.engine.messages import EngineMessage
from radixserve.output import Finish, Usage
from radixserve.reports import AdviceStats, CacheAdvice, CurvePoint
from radixserve.request import Request

MOST_BLOCKS = 150_000  # of the curve, and as many chunks of text: together under 48 MiB
REACH = 4  # the curve remembers this many times the pool
ENOUGH = 0.95  # part of the reusable tokens that the advised size reuses
REGRET_S = 60.0
GIB = 1 << 30
_MOST_QUEUED, _MOST_QUEUED_TOKENS = 128, 1 << 13  # arrivals and ends, and tokens, before a look
_MOST_SALTS = 16  # namespaces that are compared: those used last
_SHARES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # of the pool, in the curve


@dataclass(slots=True)
class ComputedTokens:
    """Prompt tokens that were computed, by reason. Each is in one of them.

    new        not seen before, as far as is remembered
    evicted    cached before, in the same namespace and behind the same tokens
    twice      the same, by a request that was still open when this one arrived
    page       the same, in a block of cache="hash" that did not match in whole
    namespace  cached in another namespace behind the same tokens
    diverged   the same text was cached behind other tokens: something before it has changed
    """

    new: int = 0
    evicted: int = 0
    twice: int = 0
    page: int = 0
    namespace: int = 0
    diverged: int = 0


class _Arrival(NamedTuple):
    request: Request
    time: float


class _End(NamedTuple):
    request: Request
    output_ids: Sequence[int]
    usage: Usage


class _Open(NamedTuple):
    """A request that has arrived and has not ended."""

    use: Use
    hashes: Hashes  # of its prompt
    num_elsewhere: int  # leading blocks that another namespace has
    was_open: bool  # whether the last user of its known blocks had not ended
    is_recent: bool  # whether that one arrived within REGRET_S before


class AdviceExtension(EngineExtension):
    """Keeps the reuse distances of prompts, and counts why tokens were computed. Requests are noted
    when they arrive and end, and looked at some at a time, which costs a fraction.

    bytes_per_token  of K/V
    has_blocks       whether the cache matches whole pages only
    clock            seconds
    """

    name = "advice"

    def __init__(
        self,
        cache: PrefixCache,
        bytes_per_token: int,
        *,
        has_blocks: bool = False,
        clock: Callable[[], float] = time.monotonic,
        most_blocks: int = MOST_BLOCKS,
    ) -> None:
        self._cache, self._bytes_per_token, self._clock = cache, bytes_per_token, clock
        self._has_blocks = has_blocks
        self._pool_tokens = cache.num_pages * cache.page_size
        block = LEAST_BLOCK
        while block * most_blocks < REACH * self._pool_tokens:
            block *= 2
        self._curve = ReuseCurve(block, most_blocks)
        self._most_chunks = most_blocks
        self._chunks: tuple[set[int], set[int]] = (set(), set())  # young and old, of text cached
        self._prints = Fingerprints()
        self._queue: list[_Arrival | _End] = []  # in order, not looked at yet
        self._num_queued = 0  # tokens
        self._salts: dict[int, None] = {}  # of namespaces, the last used one last
        self._open: dict[str, _Open] = {}
        self._open_numbers: set[int] = set()
        self._recent: deque[tuple[float, int]] = deque()  # (second, its first request's number)
        self._began, self._num_requests = clock(), 0
        self._computed = ComputedTokens()
        self._reused_tokens = self._regretted_tokens = 0

    # -- calls of the engine ------------------------------------------------------------------

    def hold(
        self,
        request: Request,
        queued_at: float,  # noqa: ARG002
        release: Callable[[int], None],  # noqa: ARG002
    ) -> bool:
        """Notes that a request arrives; holds none back."""
        self._queue.append(_Arrival(request, self._clock()))
        self._num_queued += len(request.token_ids)
        if self._num_queued >= _MOST_QUEUED_TOKENS:
            self._follow()
        return False

    def on_finish(
        self,
        request: Request,
        output_ids: Sequence[int],
        finish: Finish,
        arrived_at: float,  # noqa: ARG002
    ) -> None:
        """Notes that a request has ended: why its tokens were computed, what it leaves cached."""
        self._queue.append(_End(request, output_ids, finish.usage))
        if len(self._queue) >= _MOST_QUEUED:
            self._follow()

    def on_reset(self, namespace: str | None) -> None:
        self._follow()
        if namespace is None:
            self._curve.forget()
            self._chunks = (set(), set())

    def on_epoch(self, weights: str) -> None:  # noqa: ARG002
        self.on_reset(None)

    def answer(self, message: EngineMessage[Any], answer: Any) -> Any:
        return self.advice() if isinstance(message, GetAdvice) else answer

    def stats(self) -> dict[str, Any]:
        report: AdviceStats = {
            "computed": asdict(self.computed),
            "regretted_tokens": self._regretted_tokens,
            "lines": [self.advice()["line"]],
        }
        return dict(report)

    @property
    def computed(self) -> ComputedTokens:
        """The computed tokens so far, by reason."""
        self._follow()
        return self._computed

    # -- the advice ---------------------------------------------------------------------------

    def advice(self) -> CacheAdvice:
        """See `Runtime.advice`. O(1)."""
        self._follow()
        curve, pool, each = self._curve, self._pool_tokens, self._bytes_per_token
        now = self.point(pool)
        advice: CacheAdvice = {
            "seconds": self._clock() - self._began,
            "requests": self._num_requests,
            "prompt_tokens": curve.prompt_tokens,
            "reused_tokens": self._reused_tokens,
            "pool": now,
            "enough": self.point(curve.smallest(ENOUGH * curve.reusable_tokens)),
            "next_gib": self.point(pool + GIB / each)["hit_rate"] - now["hit_rate"],
            "most_reusable": curve.reusable_tokens / max(1, curve.prompt_tokens),
            "curve": [self.point(share * pool) for share in _SHARES],
            "computed": asdict(self.computed),
            "evicted_tokens": self._cache.stats()["evicted_tokens"],
            "regretted_tokens": self._regretted_tokens,
            "line": "",
        }
        return {**advice, "line": advice_line(advice)}

    def point(self, tokens: float) -> CurvePoint:
        """A cache size, and the hit rate that LRU would have had so far."""
        self._follow()
        count = round(tokens)
        rate = self._curve.hit_tokens(tokens) / max(1, self._curve.prompt_tokens)
        return {"tokens": count, "bytes": count * self._bytes_per_token, "hit_rate": rate}

    # -- inside -------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Look at the noted requests. Hashing many at once is what makes it cheap."""
        if not self._queue:
            return
        queue, self._queue, self._num_queued = self._queue, [], 0
        arrivals = [event for event in queue if isinstance(event, _Arrival)]
        pieces = [Piece(asked.keyed_tokens(), _salt_of(asked.namespace)) for asked, _ in arrivals]
        prompts = iter(self._hash(pieces))
        hashes: dict[int, Hashes] = {}  # by the event's place: a request id may be given again
        latest: dict[str, Hashes] = {}  # by request id, of the prompts that arrive in the queue
        answered, pieces = [], []
        for number, event in enumerate(queue):
            name = event.request.request_id
            if isinstance(event, _Arrival):
                latest[name] = hashes[number] = next(prompts)
            elif len(event.output_ids) > 1:
                opened = self._open.get(name)
                prompt = latest.get(name) or (opened and opened.hashes)
                if prompt is not None:
                    answered.append(number)
                    pieces.append(prompt.end._replace(tokens=_answer(event)))
        hashes.update(zip(answered, self._hash(pieces), strict=True))
        for number, event in enumerate(queue):
            name = event.request.request_id
            if isinstance(event, _Arrival):
                self._arrive(event, hashes[number])
            elif name in self._open:
                self._end(self._open.pop(name), event.usage, hashes.get(number))

    def _hash(self, pieces: list[Piece]) -> list[Hashes]:
        if not pieces:
            return []
        curve = self._curve
        spans = [(piece.start, piece.start + len(piece.tokens)) for piece in pieces]
        blocks = [slice(curve.num_blocks(low), curve.num_blocks(high)) for low, high in spans]
        return self._prints.hash_all(pieces, curve.ends(max(high for _, high in spans)), blocks)

    def _arrive(self, arrival: _Arrival, hashes: Hashes) -> None:
        curve, salt, num_prompt = self._curve, hashes.end.salt, hashes.end.start
        usable = hashes.blocks[: curve.num_blocks(num_prompt - 1)]
        use = curve.arrive(usable, num_prompt)
        unknown = usable[use.num_known :]
        num_elsewhere = use.num_known
        if unknown and len(self._salts) > (salt in self._salts):
            num_elsewhere += self._num_elsewhere(unknown, salt)
        self._note_salt(salt)
        was_open = use.last_user in self._open_numbers
        is_recent = use.last_user >= self._first_recent(use.number, arrival.time)
        name = arrival.request.request_id
        self._open[name] = _Open(use, hashes, num_elsewhere, was_open, is_recent)
        self._open_numbers.add(use.number)

    def _end(self, opened: _Open, usage: Usage, answer: Hashes | None) -> None:
        self._open_numbers.discard(opened.use.number)
        self._num_requests += 1
        self._count(opened, usage, answer)
        curve, hashes = self._curve, opened.hashes
        num_usable = curve.num_blocks(hashes.end.start - 1)
        blocks = hashes.blocks[num_usable:] + ([] if answer is None else answer.blocks)
        curve.extend(opened.use.number, blocks, num_usable)

    def _count(self, opened: _Open, usage: Usage, answer: Hashes | None) -> None:
        counts, num_prompt = self._computed, opened.hashes.end.start
        cached = usage.cached_tokens
        end = cached + usage.computed_tokens
        self._reused_tokens += cached
        num_known = self._curve.end(opened.use.num_known)
        self._curve.match_further(opened.use, self._num_further(opened.use, cached, num_prompt))
        known = min(max(cached, num_known), end)
        lost = known - cached
        if lost and self._has_blocks and lost < self._cache.page_size:
            counts.page += lost
        elif lost and opened.was_open:
            counts.twice += lost
        elif lost:
            counts.evicted += lost
            self._regretted_tokens += lost if opened.is_recent else 0
        elsewhere = min(max(known, self._curve.end(opened.num_elsewhere)), end)
        counts.namespace += elsewhere - known
        seen = self._note_text(opened.hashes, answer, elsewhere, end)
        counts.diverged += seen
        counts.new += end - elsewhere - seen

    def _num_further(self, use: Use, cached: int, num_prompt: int) -> int:
        """Tokens behind the known blocks that an unlimited cache would have: as found; or half a
        block, as on average, where even the known ones were evicted."""
        num_known, next_end = self._curve.end(use.num_known), self._curve.end(use.num_known + 1)
        found = cached - num_known if cached >= num_known else (next_end - num_known) // 2
        return min(found, num_prompt - 1 - num_known)

    def _note_text(self, prompt: Hashes, answer: Hashes | None, start: int, end: int) -> int:
        """Remember the chunks behind position `start`. Returns the prompt's tokens before `end` in
        chunks that were remembered already. Those of the block that begins there do not count: the
        same tokens may stand before them."""
        ends, ids = prompt.chunk_ends, prompt.chunks
        first = bisect_left(ends, start + LEAST_BLOCK) + 1
        ids = ids[first:]
        young, old = self._chunks
        num_seen = 0
        if not (young.isdisjoint(ids) and old.isdisjoint(ids)):
            before = ends[first - 1]
            for stop, chunk in zip(ends[first:], ids, strict=True):
                if stop <= end and (chunk in young or chunk in old):
                    num_seen += stop - before
                before = stop
        young.update(ids)
        if answer is not None:
            young.update(answer.chunks)
        if 2 * len(young) >= self._most_chunks:
            self._chunks = (set(), young)
        return num_seen

    def _note_salt(self, salt: int) -> None:
        self._salts.pop(salt, None)
        self._salts[salt] = None
        if len(self._salts) > _MOST_SALTS:
            del self._salts[next(iter(self._salts))]

    def _num_elsewhere(self, blocks: list[int], salt: int) -> int:
        """The most of these leading blocks that another namespace has."""
        most = 0
        for other in self._salts:
            change = salt ^ other
            if change and self._curve.knows(blocks[0] ^ change):
                low, high = 1, len(blocks)
                while low < high:  # a prefix is known whenever a longer one is
                    middle = (low + high + 1) // 2
                    is_known = self._curve.knows(blocks[middle - 1] ^ change)
                    low, high = (middle, high) if is_known else (low, middle - 1)
                most = max(most, low)
        return most

    def _first_recent(self, number: int, now: float) -> int:
        """The first request that arrived within REGRET_S, to a second. `number`: of this one."""
        if not self._recent or now >= self._recent[-1][0] + 1.0:
            self._recent.append((now, number))
        while self._recent[0][0] < now - REGRET_S:
            self._recent.popleft()
        return self._recent[0][1]


def _answer(end: _End) -> IntArray:
    """The output without the last token, which has no K/V."""
    tokens = np.asarray(end.output_ids[:-1], np.int32)
    adapter = end.request.adapter
    return tokens if adapter is None else tokens + adapter.token_mark


@lru_cache(1024)
def _salt_of(namespace: object) -> int:
    return namespace_salt(str(namespace))
