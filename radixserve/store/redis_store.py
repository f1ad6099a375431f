"""`RedisStore`: runs in a server that speaks the protocol of Redis, such as Valkey.

An example of a foreign store, which several machines can share. The extra `radixserve[redis]` has
the client. The server bounds its memory itself: set its `maxmemory`, and `maxmemory-policy
allkeys-lru`. Keys are radixserve:MODEL/NAMESPACE/RUN.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

from radixserve.errors import InvalidRequest
from radixserve.store.run_file import Buffer
from radixserve.store.run_store import RunStore, StoredFile

SCHEMES = ("redis://", "rediss://", "unix://")
_KEYS = "radixserve:"
_TIMEOUT_S = 5.0  # of a call; a load is given up sooner
_LISTED = 500  # keys at a time


class RedisStore(RunStore):
    """Files as keys of a server. The client keeps a pool of connections and connects again."""

    def __init__(self, url: str) -> None:
        """Raises InvalidRequest where the client is not installed or the URL is wrong, OSError
        where the server does not answer."""
        try:
            import redis
        except ImportError as error:
            raise InvalidRequest(
                f'kv_store="{url}" needs the package redis: pip install "radixserve[redis]"'
            ) from error
        self._error = redis.RedisError
        settings: dict[str, Any] = {
            "protocol": 2,  # all servers know it
            "socket_timeout": _TIMEOUT_S,
            "socket_connect_timeout": _TIMEOUT_S,
        }
        try:
            self._client: Any = redis.Redis.from_url(url, **settings)
        except ValueError as error:
            raise InvalidRequest(f'kv_store="{url}": {error}') from error
        with self._as_os_errors():
            self._client.ping()

    def put(self, name: str, parts: Iterable[Buffer]) -> int:
        content = b"".join(parts)
        with self._as_os_errors():
            self._client.set(_KEYS + name, content)
        return len(content)

    def get(
        self,
        name: str,
        num_bytes: int | None = None,
        into: memoryview | None = None,  # noqa: ARG002
    ) -> memoryview | None:
        with self._as_os_errors():
            if num_bytes is None:
                content = self._client.get(_KEYS + name)
            else:
                content = self._client.getrange(_KEYS + name, 0, num_bytes - 1)
        return memoryview(content) if content else None

    def has(self, name: str) -> bool:
        with self._as_os_errors():
            return bool(self._client.exists(_KEYS + name))

    def drop(self, name: str) -> None:
        with contextlib.suppress(OSError), self._as_os_errors():
            self._client.delete(_KEYS + name)

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        pattern = f"{_KEYS}{prefix}/*" if prefix else f"{_KEYS}*"
        with self._as_os_errors():
            keys = [bytes(key) for key in self._client.scan_iter(match=pattern, count=_LISTED)]
            for begin in range(0, len(keys), _LISTED):
                some = keys[begin : begin + _LISTED]
                calls = self._client.pipeline(transaction=False)
                for key in some:
                    calls.strlen(key)
                    calls.object("idletime", key)
                answers, now = calls.execute(raise_on_error=False), time.time()
                for key, size, idle_s in zip(some, answers[::2], answers[1::2], strict=True):
                    if isinstance(size, int) and size:
                        used_at = now - idle_s if isinstance(idle_s, int) else 0.0
                        yield StoredFile(key.decode()[len(_KEYS) :], size, used_at)

    @contextlib.contextmanager
    def _as_os_errors(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise OSError(f"the store of K/V: {error}") from error
