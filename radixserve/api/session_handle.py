"""`SessionHandle`: a branch's session in the cache; the engine closes it after the branch."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from radixserve.arrays import IntArray
from radixserve.engine.core_client import EngineCoreClient
from radixserve.engine.messages import CloseSession, SessionClaim

_LEAST_PRUNED = 16  # minimum number of forks of a branch before dead references are pruned


class SessionHandle:
    """A session in the engine, opened by the first request that names it.

    A session claims what its own requests reached. On close it passes its claims to the nearest
    open ancestor and descendants, so that an open branch keeps what others computed for it. May be
    called from any thread, `close` also from the garbage collector; nothing blocks.
    """

    __slots__ = ("__weakref__", "_below", "_engine", "_held_len", "_is_known", "_namespace",
                 "_parent", "_prune_at", "_reached_len", "is_open", "name", "tokens")  # fmt: skip

    def __init__(
        self,
        engine: EngineCoreClient,
        number: int,
        tokens: IntArray,
        namespace: str,
        parent: SessionHandle | None,
    ) -> None:
        """`parent`: that of the branch forked from, which is open."""
        self.name = f"branch {number}"
        self.tokens = tokens  # of the branch, prompt and output
        self.is_open = True
        self._engine = engine
        self._namespace = namespace
        self._parent = parent
        self._below: list[weakref.ref[SessionHandle]] = []
        self._prune_at = _LEAST_PRUNED
        self._reached_len = 0  # tokens that a request of its own reached
        self._held_len = 0  # most tokens that the session claims
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
            self._reached_len = self._held_len = len(tokens)
        elif len(tokens) < self._held_len:  # rolled back: give up what was cut off
            successors = list(self._forks())
            claims = _claims(successors)
            self._reached_len = self._held_len = 0
            self._engine.post(CloseSession(self.name, claims, self._claim()))
            self._close_again(successors)

    def close(self) -> None:
        """Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        parent = self._nearest_open_parent()
        successors = list(self._forks())
        for fork in successors:
            fork._parent = parent
            if parent is not None:
                parent._adopt(fork)
        if not self._is_known:
            return
        if parent is not None:
            successors.append(parent)
        self._engine.post(CloseSession(self.name, _claims(successors)))
        self._close_again(successors)

    def _claim(self) -> SessionClaim | None:
        """What the session is to claim; None where its own requests did, or it is closed."""
        tokens = self.tokens
        if self._reached_len >= len(tokens):
            return None
        self._is_known = True  # before looking whether it is open: `close` looks in that order, too
        if not self.is_open:
            return None
        self._held_len = max(self._held_len, len(tokens))
        return SessionClaim(self.name, tokens, self._namespace)

    def _close_again(self, successors: Sequence[SessionHandle]) -> None:
        """Some may have closed, in another thread, just before a claim of theirs was posted."""
        for successor in successors:
            if not successor.is_open:
                self._engine.post(CloseSession(successor.name))

    # -- related sessions ---------------------------------------------------------------------

    def _adopt(self, fork: SessionHandle) -> None:
        if len(self._below) >= self._prune_at:
            self._below = [weakref.ref(fork) for fork in self._forks()]
            self._prune_at = max(_LEAST_PRUNED, 2 * len(self._below))
        self._below.append(weakref.ref(fork))

    def _forks(self) -> Iterator[SessionHandle]:
        """The nearest open descendants, one per path."""
        for reference in list(self._below):
            fork = reference()
            if fork is not None and fork.is_open:
                yield fork

    def _nearest_open_parent(self) -> SessionHandle | None:
        parent = self._parent
        while parent is not None and not parent.is_open:
            parent = parent._parent
        self._parent = parent  # keeps chains of forks of forks short
        return parent


def _claims(successors: Sequence[SessionHandle]) -> tuple[SessionClaim, ...]:
    claims = (successor._claim() for successor in successors)
    return tuple(claim for claim in claims if claim is not None)
