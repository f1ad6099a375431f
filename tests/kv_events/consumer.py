"""A consumer of vLLM's KV events, written against vLLM's format alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from radixserve.kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

Prefix = tuple[int, ...]
_TIMEOUT_MS = 200_000


class Index:
    """What a consumer knows of the blocks: prefixes by hash."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.prefixes: dict[int, tuple[str, Prefix]] = {}

    def take(self, changes: list[Any]) -> None:
        for change in changes:
            if isinstance(change, AllBlocksCleared):
                self.prefixes.clear()
            elif isinstance(change, BlockRemoved):
                assert change.block_hashes
                for one in change.block_hashes:
                    del self.prefixes[one]
            else:
                assert isinstance(change, BlockStored)
                self.store(change)

    def store(self, change: BlockStored) -> None:
        size, above = self.block_size, ()
        assert change.block_size == size
        assert len(change.token_ids) == size * len(change.block_hashes) > 0
        salt = change.cache_salt or ""
        if change.parent_block_hash is None:
            keys = change.extra_keys or [None] * len(change.block_hashes)
            assert keys == [(salt,) if salt else None, *[None] * (len(change.block_hashes) - 1)]
        else:
            parent_salt, above = self.prefixes[change.parent_block_hash]
            assert salt == parent_salt
        for i, one in enumerate(change.block_hashes):
            above += tuple(change.token_ids[i * size : (i + 1) * size])
            assert self.prefixes.get(one, (salt, above)) == (salt, above)
            self.prefixes[one] = salt, above

    def known(self) -> set[tuple[str, Prefix]]:
        found = set(self.prefixes.values())
        assert len(found) == len(self.prefixes), "one prefix has one hash"
        return found


class Follower:
    """Follows one stream; asks for what it has missed."""

    def __init__(self, pub: str, replay: str, block_size: int, topic: bytes = b"") -> None:
        self.index = Index(block_size)
        self.topic = topic
        self.number = self.seen = -1  # of the last batch applied, and of the last one read
        self.asked: list[tuple[int, list[int]]] = []  # numbers asked for, and those answered
        self._context = zmq.Context()
        self._sub, self._dealer = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._sub.subscribe(topic)
        self._sub.connect(pub)
        self._dealer.connect(replay)

    def has_news(self, timeout_ms: int = _TIMEOUT_MS) -> bool:
        return bool(self._sub.poll(timeout_ms))

    def read(self, *, lose: bool = False) -> int:
        """The next live batch that is not known, with those missing before it; its number."""
        number = -1
        while number <= self.seen:
            assert self.has_news(), "nothing comes"
            topic, number_bytes, payload = self._sub.recv_multipart()
            number = int.from_bytes(number_bytes)
            assert topic == self.topic
        self.seen = number
        if not lose:
            if number > self.number + 1:
                for one, other in self.replay(self.number + 1):
                    self._take(one, other)
            if number > self.number:
                self._take(number, payload)
        return number

    def replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        """(number, payload) of the batches from `first` on."""
        self.asked.append((first, []))
        self._dealer.send_multipart((b"", first.to_bytes(8)))
        while True:
            assert self._dealer.poll(_TIMEOUT_MS), "no answer"
            empty, topic, number, payload = self._dealer.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, signed=True) == -1:
                assert (topic, payload) == (b"", b"")
                return
            assert topic == self.topic
            self.asked[-1][1].append(int.from_bytes(number))
            yield int.from_bytes(number), payload

    def _take(self, number: int, payload: bytes) -> None:
        """vLLM's batch is an array, its events are maps."""
        raw = msgspec.msgpack.decode(payload)
        assert isinstance(raw, list)
        assert all(event["type"] in _NAMES for event in raw[1])
        assert raw[2] == 0, "the rank"
        self.index.take(
            msgspec.convert(raw[1], list[BlockStored | BlockRemoved | AllBlocksCleared])
        )
        self.number = number
        self.seen = max(self.seen, number)

    def close(self) -> None:
        self._context.destroy(0)


_NAMES = {kind.__name__ for kind in KVCacheEvent.__subclasses__()}
