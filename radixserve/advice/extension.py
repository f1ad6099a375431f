"""`AdviceExtension`: follows an engine's traffic, and says what more memory would be worth."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from radixserve.advice.fingerprints import Fingerprints, namespace_salt, prefix_ids
from radixserve.advice.messages import GetAdvice
from radixserve.advice.report import advice_line
from radixserve.advice.reuse_curve import LEAST_BLOCK, ReuseCurve, Use
from radixserve.arrays import IntArray
from radixserve.cache import PrefixCache
from radixserve.engine.extension import EngineExtension
from radixserve.engine.messages import EngineMessage
from radixserve.output import Finish
from radixserve.reports import AdviceStats, CacheAdvice, CurvePoint
from radixserve.request import Request

MOST_BLOCKS = 150_000  # of the curve, and as many chunks of text: together under 48 MiB
REACH = 4  # the curve remembers this many times the pool
ENOUGH = 0.95  # part of the reusable tokens that the advised size reuses
REGRET_S = 60.0
GIB = 1 << 30
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


class _Open(NamedTuple):
    """A request that has arrived and has not ended."""

    use: Use
    salt: int
    last_sum: int  # `Fingerprints.sums` of its prompt
    end_blocks: list[int]  # of its prompt, behind those that could be reused: one or none
    num_elsewhere: int  # leading blocks that another namespace has
    was_open: bool  # whether the last user of its known blocks had not ended
    is_recent: bool  # whether that one arrived within REGRET_S before


class AdviceExtension(EngineExtension):
    """Keeps the reuse distances of prompts, and counts why tokens were computed.

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
        self._salts: dict[int, None] = {}  # of namespaces, the last used one last
        self._open: dict[str, _Open] = {}
        self._open_numbers: set[int] = set()
        self._recent: deque[tuple[float, int]] = deque()  # (second, its first request's number)
        self._began, self._num_requests = clock(), 0
        self.computed = ComputedTokens()
        self._reused_tokens = self._regretted_tokens = 0

    # -- calls of the engine ------------------------------------------------------------------

    def hold(
        self,
        request: Request,
        queued_at: float,  # noqa: ARG002
        release: Callable[[int], None],  # noqa: ARG002
    ) -> bool:
        """Notes that a request arrives; holds none back."""
        tokens, curve = request.keyed_tokens(), self._curve
        salt = namespace_salt(str(request.namespace))
        sums = self._prints.sums(tokens)
        blocks: list[int] = prefix_ids(sums[curve.ends(len(tokens)) - 1], salt).tolist()
        num_usable = curve.num_blocks(len(tokens) - 1)
        usable = blocks[:num_usable]
        use = curve.arrive(usable, len(tokens))
        unknown = usable[use.num_known :]
        num_elsewhere = use.num_known
        if unknown and len(self._salts) > (salt in self._salts):
            num_elsewhere += self._num_elsewhere(unknown, salt)
        self._note_salt(salt)
        was_open = use.last_user in self._open_numbers
        is_recent = use.last_user >= self._first_recent(use.number)
        last_sum, end_blocks = int(sums[-1]), blocks[num_usable:]
        self._open[request.request_id] = _Open(
            use, salt, last_sum, end_blocks, num_elsewhere, was_open, is_recent
        )
        self._open_numbers.add(use.number)
        return False

    def on_finish(
        self,
        request: Request,
        output_ids: Sequence[int],
        finish: Finish,
        arrived_at: float,  # noqa: ARG002
    ) -> None:
        """Count why the request's tokens were computed, and note what it leaves in the cache."""
        opened = self._open.pop(request.request_id, None)
        if opened is None:
            return
        self._open_numbers.discard(opened.use.number)
        self._num_requests += 1
        prompt, output = request.keyed_tokens(), np.asarray(output_ids[:-1], np.int32)
        if request.adapter is not None:
            output += request.adapter.token_mark
        self._count(opened, prompt, output, finish)
        curve, blocks, num_prompt = self._curve, opened.end_blocks, len(prompt)
        if len(output):
            sums = self._prints.sums(output, num_prompt, opened.last_sum)
            ends = curve.ends(num_prompt + len(output), num_prompt) - num_prompt
            blocks = blocks + prefix_ids(sums[ends - 1], opened.salt).tolist()
        curve.extend(opened.use.number, blocks, curve.num_blocks(num_prompt - 1))

    def on_reset(self, namespace: str | None) -> None:
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

    # -- the advice ---------------------------------------------------------------------------

    def advice(self) -> CacheAdvice:
        """See `Runtime.advice`. O(1)."""
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
        count = round(tokens)
        rate = self._curve.hit_tokens(tokens) / max(1, self._curve.prompt_tokens)
        return {"tokens": count, "bytes": count * self._bytes_per_token, "hit_rate": rate}

    # -- inside -------------------------------------------------------------------------------

    def _count(self, opened: _Open, prompt: IntArray, output: IntArray, finish: Finish) -> None:
        usage, counts = finish.usage, self.computed
        cached = usage.cached_tokens
        end = cached + usage.computed_tokens
        self._reused_tokens += cached
        num_known = self._curve.end(opened.use.num_known)
        self._curve.match_further(opened.use, self._num_further(opened.use, cached, len(prompt)))
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
        seen = self._note_text(prompt, output, elsewhere, end)
        counts.diverged += seen
        counts.new += end - elsewhere - seen

    def _num_further(self, use: Use, cached: int, num_prompt: int) -> int:
        """Tokens behind the known blocks that an unlimited cache would have: as found; or half a
        block, as on average, where even the known ones were evicted."""
        num_known, next_end = self._curve.end(use.num_known), self._curve.end(use.num_known + 1)
        found = cached - num_known if cached >= num_known else (next_end - num_known) // 2
        return min(found, num_prompt - 1 - num_known)

    def _note_text(self, prompt: IntArray, output: IntArray, start: int, end: int) -> int:
        """Remember the chunks from position `start` on. Returns the prompt's tokens before `end` in
        chunks that were remembered already."""
        ends, found = self._prints.chunks(np.concatenate((prompt[start:], output)))
        ids: list[int] = found.tolist()
        young, old = self._chunks
        num_seen, before = 0, 0
        for stop, chunk in zip(ends.tolist(), ids, strict=True):
            if start + stop <= end and (chunk in young or chunk in old):
                num_seen += stop - before
            before = stop
        young.update(ids)
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

    def _first_recent(self, number: int) -> int:
        """The first request that arrived within REGRET_S, to a second. `number`: of this one."""
        now = self._clock()
        if not self._recent or now >= self._recent[-1][0] + 1.0:
            self._recent.append((now, number))
        while self._recent[0][0] < now - REGRET_S:
            self._recent.popleft()
        return self._recent[0][1]
