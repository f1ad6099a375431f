"""`Sessions`: the open sessions of a scheduler, by name."""

from __future__ import annotations

from collections.abc import Callable

from radixserve.arrays import IntArray
from radixserve.cache import CacheSession, PrefixCache
from radixserve.checks import check_str
from radixserve.errors import InvalidRequest


class Sessions:
    """The open sessions by name. A closed session's name can be opened again."""

    def __init__(
        self, cache: PrefixCache, on_close: Callable[[str], None] = lambda _: None
    ) -> None:
        """on_close(name) is called when a session is closed."""
        self._cache = cache
        self._on_close = on_close
        self._open: dict[str, CacheSession] = {}
        self._claimed: dict[str, IntArray] = {}  # a read-only array that a session claimed whole

    def __len__(self) -> int:
        return len(self._open)

    def open(self, name: str, lease_s: float | None = None) -> CacheSession:
        """The open session of that name, created if missing.

        `lease_s` (seconds; None: the cache's default) counts when it is made. Raises InvalidRequest
        for an empty name, and what the cache raises.
        """
        if not check_str("session", name):
            raise InvalidRequest("a session's name must not be empty")
        session = self._open.get(name)
        if session is None:
            session = self._open[name] = self._cache.open_session(name, lease_s=lease_s)
        return session

    def find(self, name: str) -> CacheSession | None:
        """The open session of that name."""
        return self._open.get(name)

    def claim(self, name: str, tokens: IntArray, namespace: str) -> int:
        """Let the session of that name claim the cached whole pages of `tokens`.

        Returns the number of cached tokens. Computes nothing. O(tokens); O(1) if the session has
        claimed all of the same read-only array before.
        """
        cache = self._cache
        if self._claimed.get(name) is tokens:
            return len(tokens)
        cached_len = cache.lookup(tokens, namespace, allow_full=True).cached_len
        whole = cached_len - cached_len % cache.page_size  # no page prefix has to be copied
        if whole:
            session = self.open(name)
            cache.acquire(tokens[:whole], namespace, allow_full=True, session=session).release()
            if cached_len == len(tokens) and not tokens.flags.writeable:
                self._claimed[name] = tokens
        return cached_len

    def forget_claims(self) -> None:
        """Claim anew what sessions name from now on: the cache has lost what was claimed."""
        self._claimed.clear()

    def close(self, name: str) -> None:
        """Close a session: pages that no open session claims are evicted first. An unknown name
        does nothing. Queued requests lose the session, even if its name is opened again; running
        requests keep it."""
        self._claimed.pop(name, None)
        session = self._open.pop(name, None)
        if session is not None:
            session.close()
            self._on_close(name)
