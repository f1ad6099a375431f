"""`KVEventPublisher`: sends a cache's events as vLLM does.

    PUB      topic | sequence number, 8 bytes big-endian | KVEventBatch in msgpack
    ROUTER   a request is the first number wanted; the answer repeats PUB's messages from
             there on, and ends with an empty message with number -1

If the wanted messages are no longer kept, the answer is one batch with all stored blocks, under the
last number. Numbers start at the log's epoch. Those of a restarted process are greater: consumers
notice the gap, request a replay, and drop their old state.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from radixserve.adapters.table import AdapterTable
from radixserve.cache import EventBatch, EventLog, EventSnapshot
from radixserve.engine.extension import EngineExtension
from radixserve.errors import InvalidRequest
from radixserve.kv_events.blocks import BlockView
from radixserve.kv_events.schema import KVCacheEvent, KVEventBatch

_END = (-1).to_bytes(8, signed=True)
_MAX_KEPT = 10_000  # most batches kept for replay
_MAX_KEPT_BYTES = 1 << 26  # most bytes of them
_MAX_UNREAD = 1_000  # batches that wait for the thread; further events stay in the log
_MAX_UNSENT = 100_000  # messages that wait for a slow consumer; it misses further ones
_CLOSE_S = 30.0  # until the thread is given up


class KVEventPublisher(EngineExtension):
    """Publishes the events of a log. `publish` passes the events since the last call, in the
    cache's thread, to the publisher's own thread, which hashes, encodes and sends them.

    An error in that thread is raised by the next `publish`, and ends the publishing only.
    """

    name = "kv_events"

    def __init__(
        self,
        log: EventLog,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        block_size: int = 16,
        adapters: AdapterTable | None = None,
    ) -> None:
        """`endpoint`: a ZeroMQ address, which as in vLLM is bound if it has a * or :: or begins
        with ipc: or inproc:, else connected to. `replay_endpoint`: an address to bind.
        `block_size`: in tokens. `adapters`: those that compute some of the blocks. Raises
        InvalidRequest if an address cannot be opened."""
        self._log = log
        self._topic = topic.encode()
        self._view = BlockView(block_size, adapters)
        self._number = log.epoch - 1  # of the last batch sent
        self._kept: deque[tuple[bytes, bytes]] = deque()  # (number, payload)
        self._num_kept_bytes = 0
        self._inbox: queue.SimpleQueue[EventBatch | EventSnapshot | None] = queue.SimpleQueue()
        self._failure: Exception | None = None  # of the thread
        self._next = log.take().end  # of the log's events
        self._inbox.put(log.snapshot())
        self._context = zmq.Context()
        try:
            self._open(endpoint, replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise InvalidRequest(
                f"kv_events {endpoint!r}, replay {replay_endpoint!r} cannot be opened: {error}"
            ) from None
        self._thread = threading.Thread(target=self._run, name="radixserve-kv-events", daemon=True)
        self._thread.start()
        self._signal.send(b"")

    def _open(self, endpoint: str, replay_endpoint: str | None) -> None:
        self._signal, self._wake_up = self._socket(zmq.PAIR), self._socket(zmq.PAIR)
        self._wake_up.bind("inproc://wake-up")
        self._signal.connect("inproc://wake-up")
        self._pub, self._router = self._socket(zmq.PUB), self._socket(zmq.ROUTER)
        self._pub.setsockopt(zmq.SNDHWM, _MAX_UNSENT)
        self._router.setsockopt(zmq.SNDHWM, 2 * _MAX_KEPT)
        is_ours = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc:", "inproc:"))
        (self._pub.bind if is_ours else self._pub.connect)(endpoint)
        if replay_endpoint is not None:
            self._router.bind(replay_endpoint)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def publish(self) -> None:
        """Pass the events since the last call to the thread. O(1); never waits. Raises what has
        ended the thread."""
        if self._failure is not None:
            raise self._failure
        if self._inbox.qsize() < _MAX_UNREAD:
            batch = self._log.take()
            if batch.first != self._next:  # the log has discarded events
                self._put(self._log.snapshot())
            elif batch.events:
                self._put(batch)
            self._next = batch.end

    def after_step(self, *, is_idle: bool) -> None:  # noqa: ARG002
        self.publish()

    def on_reset(self, namespace: str | None) -> None:  # noqa: ARG002
        self.publish()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Send the pending batches and stop. Call it after the last `publish`."""
        if self._context.closed:
            return
        self._log.close()
        self._put(None)
        self._thread.join(max(0.1, timeout_s))
        if not self._thread.is_alive():
            self._context.destroy(500)  # milliseconds to send pending messages

    def _put(self, item: EventBatch | EventSnapshot | None) -> None:
        self._inbox.put(item)
        with contextlib.suppress(zmq.Again):  # enough signals are pending
            self._signal.send(b"", zmq.NOBLOCK)

    # -- in its own thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._wake_up, zmq.POLLIN)
            poller.register(self._router, zmq.POLLIN)
            while True:
                ready = dict(poller.poll())
                if self._router in ready:
                    self._answer(self._router.recv_multipart())
                if self._wake_up in ready:
                    self._wake_up.recv()
                    if not self._read_inbox():
                        return
        except Exception as error:
            self._failure = error

    def _read_inbox(self) -> bool:
        """Send the waiting events as one batch. Returns False when the publisher is closed."""
        changes: list[KVCacheEvent] = []
        item: Any = ()
        with contextlib.suppress(queue.Empty):
            while (item := self._inbox.get_nowait()) is not None:
                if isinstance(item, EventSnapshot):
                    changes += self._view.restart(item)
                else:
                    changes += self._view.apply(item)
        if changes:
            self._send(changes)
        return item is not None

    def _send(self, changes: list[KVCacheEvent]) -> None:
        self._number += 1
        number, payload = self._number.to_bytes(8), _encode(changes)
        self._pub.send_multipart((self._topic, number, payload))
        self._kept.append((number, payload))
        self._num_kept_bytes += len(payload)
        while len(self._kept) > _MAX_KEPT or self._num_kept_bytes > _MAX_KEPT_BYTES:
            self._num_kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # no request
        client, _, first = frames
        number = self._number.to_bytes(8)
        batches = [batch for batch in self._kept if batch[0] >= first]
        if (
            first <= number
            and len(batches) == len(self._kept)
            and (not batches or batches[0][0] > first)
        ):
            batches = [(number, _encode(self._view.stored()))]
        for batch in batches:
            self._router.send_multipart((client, b"", self._topic, *batch))
        self._router.send_multipart((client, b"", b"", _END, b""))


def _encode(changes: list[Any]) -> bytes:
    return msgspec.msgpack.encode(KVEventBatch(time.time(), changes, 0))
