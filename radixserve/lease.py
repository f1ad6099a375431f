"""`Lease`: a branch's hold of the cache, which outlives the branch until the engine has let go."""

from __future__ import annotations

from radixserve.arrays import IntArray
from radixserve.engine import Engine
from radixserve.worker import EngineThread


class Lease:
    """A holder in the engine, opened by the first request that names it.

    A holder claims what its own requests reached. So that a branch keeps what only its forks
    computed, a fork that goes hands its claim on: to the nearest open lease above it.
    """

    __slots__ = ("_held_len", "_is_known", "_namespace", "_parent", "_worker", "is_open", "name",
                 "tokens")  # fmt: skip

    def __init__(
        self,
        worker: EngineThread,
        number: int,
        tokens: IntArray,
        namespace: str,
        parent: Lease | None,
    ) -> None:
        self.name = f"branch {number}"
        self.tokens = tokens  # where the branch stands
        self.is_open = True
        self._worker = worker
        self._namespace = namespace
        self._parent = parent
        self._held_len = 0  # tokens that the holder claims, as far as they are cached
        self._is_known = False  # whether the engine may have a holder of that name
        if parent is not None:
            parent.nearest_above()  # keeps chains of forks of forks short

    def take(self) -> str:
        """The name for a request, which opens the holder."""
        self._is_known = True
        return self.name

    def nearest_above(self) -> Lease | None:
        """The next lease above that is open."""
        above = self._parent
        while above is not None and not above.is_open:
            above = above._parent
        self._parent = above
        return above

    def move(self, tokens: IntArray, *, is_reached: bool) -> None:
        """The branch stands at `tokens` now; `is_reached`: a request of the holder did."""
        self.tokens = tokens
        if is_reached:
            self._held_len = len(tokens)
        elif len(tokens) < self._held_len:
            self._held_len = len(tokens)
            self._worker.post(lambda engine: self._cut(engine, tokens))

    def close(self) -> None:
        """Returns at once; may be called from the garbage collector, in any thread, twice."""
        if self.is_open:
            self.is_open = False
            if self._is_known:
                self._worker.post(self._let_go)

    # -- in the engine's thread ---------------------------------------------------------------

    def _let_go(self, engine: Engine) -> None:
        above = self.nearest_above()
        if above is not None and above._held_len < len(above.tokens):
            above._hold(engine)
        engine.close_holder(self.name)

    def _hold(self, engine: Engine) -> None:
        self._is_known = (
            True  # before looking whether it is open: `close` looks the other way round
        )
        if self.is_open:
            tokens = self.tokens
            _claim(engine, self.name, tokens, self._namespace)
            self._held_len = len(tokens)

    def _cut(self, engine: Engine, tokens: IntArray) -> None:
        engine.close_holder(self.name)
        if self.is_open:
            _claim(engine, self.name, tokens, self._namespace)


def _claim(engine: Engine, name: str, tokens: IntArray, namespace: str) -> None:
    """Let the holder claim the whole pages that are cached of `tokens`. O(their number)."""
    cache, holders = engine._cache, engine._scheduler._holders
    cached_len = cache.lookup(tokens, namespace, allow_full=True).cached_len
    whole = cached_len - cached_len % cache.page_size  # no head of a page has to be copied
    if whole:
        holder = holders.get(name)
        cache.acquire(tokens[:whole], namespace, allow_full=True, holder=holder).release()
