"""`SessionHandle`: a branch's session in the cache; the engine closes it after the branch."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from radixserve.arrays import IntArray
from radixserve.engine.engine import Engine
from radixserve.engine.engine_thread import EngineThread

_LEAST_PRUNED = 16  # minimum number of forks of a branch before dead references are pruned


class SessionHandle:
    """A session in the engine, opened by the first request that names it.

    A session claims what its own requests reached. On close, the nearest open ancestor and the
    nearest open descendants claim the cached part of their own tokens. Every method returns at once
    and may be called from any thread, `close` also from the garbage collector.
    """

    __slots__ = ("__weakref__", "_below", "_held_len", "_is_known", "_namespace", "_parent",
                 "_prune_at", "_worker", "is_open", "name", "tokens")  # fmt: skip

    def __init__(
        self,
        worker: EngineThread,
        number: int,
        tokens: IntArray,
        namespace: str,
        parent: SessionHandle | None,
    ) -> None:
        """`parent`: that of the branch forked from, which is open."""
        self.name = f"branch {number}"
        self.tokens = tokens  # of the branch, prompt and output
        self.is_open = True
        self._worker = worker
        self._namespace = namespace
        self._parent = parent
        self._below: list[weakref.ref[SessionHandle]] = []
        self._prune_at = _LEAST_PRUNED
        self._held_len = 0  # tokens that the session claims, if they are cached still
        self._is_known = False  # whether the engine may have a session of that name
        if parent is not None:
            parent._adopt(self)

    def take(self) -> str:
        """The name for a request, which opens the session."""
        self._is_known = True
        return self.name

    def move(self, tokens: IntArray, *, is_reached: bool) -> None:
        """Set the branch's tokens; `is_reached`: a request of the session computed them."""
        self.tokens = tokens
        if is_reached:
            self._held_len = len(tokens)
        elif len(tokens) < self._held_len:
            self._held_len = len(tokens)
            self._worker.post(self._cut)

    def claim(self) -> None:
        """Claim the cached part of the branch's tokens, also where another request computed it."""
        self._held_len = 0
        self._worker.post(self._hold)

    def close(self) -> None:
        """Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        above = self._nearest_above()
        for handle in self._forks():
            handle._parent = above
            if above is not None:
                above._adopt(handle)
        if self._is_known:
            self._worker.post(self._close_in_engine)

    # -- related sessions ---------------------------------------------------------------------

    def _adopt(self, handle: SessionHandle) -> None:
        if len(self._below) >= self._prune_at:
            self._below = [weakref.ref(fork) for fork in self._forks()]
            self._prune_at = max(_LEAST_PRUNED, 2 * len(self._below))
        self._below.append(weakref.ref(handle))

    def _forks(self) -> Iterator[SessionHandle]:
        """The nearest open descendants, one per path."""
        for reference in list(self._below):
            handle = reference()
            if handle is not None and handle.is_open:
                yield handle

    def _nearest_above(self) -> SessionHandle | None:
        above = self._parent
        while above is not None and not above.is_open:
            above = above._parent
        self._parent = above  # keeps chains of forks of forks short
        return above

    # -- in the engine's thread ---------------------------------------------------------------

    def _close_in_engine(self, engine: Engine) -> None:
        above = self._nearest_above()
        for handle in (*self._forks(), *([] if above is None else [above])):
            handle._hold(engine)
        engine.close_session(self.name)

    def _cut(self, engine: Engine) -> None:
        """The branch was rolled back: end the claim of the tokens after its end."""
        for handle in self._forks():
            handle._hold(engine)
        engine.close_session(self.name)
        self._held_len = 0
        self._hold(engine)

    def _hold(self, engine: Engine) -> None:
        """Claim the cached part of the branch's tokens, unless already claimed."""
        tokens = self.tokens
        if self._held_len >= len(tokens):
            return
        self._is_known = True  # before looking whether it is open: `close` looks in that order, too
        if self.is_open:
            self._held_len = engine.claim(self.name, tokens, self._namespace)
