"""`RequestHandle`: requests on their way through the engine; a caller blocks for them or awaits."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Generic, Self, TypeVar, cast

from radixserve.api.beam_search import BeamCollector
from radixserve.api.loop_waker import LoopWaker, LoopWakers
from radixserve.engine.core_client import EngineCoreClient
from radixserve.engine.output_collector import Event, OutputCollector
from radixserve.errors import RequestFailed, request_failed
from radixserve.output import Chunk, Completion, join_chunks
from radixserve.request import Request
from radixserve.text.tokenizer import Tokenizer

Output = TypeVar("Output", Chunk, Completion, tuple[Completion, ...])


class RequestHandle(Generic[Output]):
    """Requests that arrive at the engine together; one thread or task takes their outputs.

        with client.submit(requests) as handle:      # from here on the engine has them
            for completion in handle: ...            # as they end; or `async for`
        client.submit(requests).get()                # in the requests' order; or `await ...aget()`

    A streaming handle yields Chunks, another one a Completion a request, or for a beam search a
    tuple of them. The first error is raised at once. Leaving the block aborts what has not ended.
    """

    def __init__(
        self,
        core: EngineCoreClient,
        tokenizer: Tokenizer | None,
        requests: Sequence[Request],
        *,
        wakers: LoopWakers,
        streams: bool = False,
        finish: Callable[[list[Output]], Any] | None = None,
        owners: Sequence[int] | None = None,
    ) -> None:
        """`finish`: the result of `get` from all last outputs; None: these themselves. `owners`:
        the index of each request's prompt in a batch, which its error then names. `wakers`: those
        of the client's loops.
        """
        self._owners = owners
        self._core = core
        self._finish: Callable[[list[Output]], Any] | None = finish
        self._queue = _EventQueue(wakers)
        self._last: dict[int, Output] = {}  # request's index -> its last output
        self._collectors = [
            OutputCollector(request, tokenizer, partial(self._queue.put, at), streams=streams)
            if request.beams is None
            else BeamCollector(request, tokenizer, partial(self._queue.put, at))
            for at, request in enumerate(requests)
        ]

    def get(self, note: Callable[[Output], object] | None = None) -> Any:
        """Block until all have ended; the last output of each, in the requests' order.

        `note` is called with each output when it comes.
        """
        with self:
            for output in self:
                if note is not None:
                    note(output)
        return self.result()

    async def aget(self, note: Callable[[Output], object] | None = None) -> Any:
        """`get` for asyncio. Cancelling the task aborts the requests."""
        with self:
            async for output in self:
                if note is not None:
                    note(output)
        return self.result()

    def __len__(self) -> int:
        """Requests in all."""
        return len(self._collectors)

    def __enter__(self) -> Self:
        try:
            self._core.submit(self._collectors)
        except BaseException:  # Ctrl-C
            self._core.abandon(self._collectors)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self._has_ended:
            self._core.abandon(self._collectors)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Output:
        if self._has_ended:
            raise StopIteration
        return self._take(*self._queue.get())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        if self._has_ended:
            raise StopAsyncIteration
        return self._take(*await self._queue.aget())

    async def joined(self) -> AsyncIterator[list[tuple[int, Output]]]:
        """All that came since the last time, each with the index of its request: of a request that
        streams one Chunk, joined from those that came while the caller was busy.

        What waits for a slow caller takes the memory of the answers, never more.
        """
        while not self._has_ended:
            events = await self._queue.aget_joined()
            yield [(at, self._take(at, event)) for at, event in events]

    def abort(self) -> None:
        """End what has not ended, with finish_reason "abort"; its outputs still come."""
        self._core.abandon(self._collectors)

    @property
    def has_generated(self) -> bool:
        """Whether any of the requests has sampled a token."""
        return any(collector.token_ids for collector in self._collectors)

    @property
    def _has_ended(self) -> bool:
        return len(self._last) == len(self._collectors)

    def _take(self, at: int, event: Event) -> Output:
        if isinstance(event, RequestFailed) and self._owners is not None:
            event = request_failed(f"prompt {self._owners[at]}: {event}", event.__cause__ or event)
        if isinstance(event, BaseException):
            try:
                raise event
            finally:
                del event  # else its traceback holds this frame, which holds it: what the caller
                # had would live until the cyclic collector runs
        output = cast(Output, event)
        if not isinstance(event, Chunk) or event.completion is not None:
            self._last[at] = output
        return output

    def result(self) -> Any:
        """What `get` returns, after all have ended."""
        outputs = [self._last[at] for at in range(len(self._collectors))]
        return outputs if self._finish is None else self._finish(outputs)


class _EventQueue:
    """(request's index, event) pairs from the engine's thread to one thread or task.

    Apart from the handle, which the engine's thread must not keep alive.
    """

    def __init__(self, wakers: LoopWakers) -> None:
        self._items: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._wakers = wakers
        self._waker: LoopWaker | None = None  # of the loop of the task that waits
        self._arrival = asyncio.Event()  # set in that loop after an item was put
        self._joined: dict[int, Event] | None = None  # where the task takes joined chunks

    def put(self, at: int, event: Event) -> None:
        self._items.put((at, event))
        waker = self._waker
        if waker is not None:
            waker.call(self._note_arrival)

    def get(self) -> tuple[int, Event]:
        return self._items.get()

    async def aget(self) -> tuple[int, Event]:
        self._waker = self._wakers.running()
        while self._items.empty():
            self._arrival.clear()
            await self._arrival.wait()
        return self._items.get_nowait()

    async def aget_joined(self) -> list[tuple[int, Event]]:
        """Everything that has come, at least one event; the chunks of a request as one."""
        self._waker = self._wakers.running()
        if self._joined is None:
            self._joined = {}
        self._note_arrival()
        while not self._joined:
            self._arrival.clear()
            await self._arrival.wait()
        events, self._joined = self._joined, {}
        return list(events.items())

    def _note_arrival(self) -> None:
        """In the loop: join what has come, also while the task waits for something else."""
        joined = self._joined
        if joined is not None:
            while not self._items.empty():
                at, event = self._items.get_nowait()
                before = joined.get(at)
                if isinstance(before, Chunk) and isinstance(event, Chunk):
                    event = join_chunks(before, event)
                joined[at] = event
            if not joined:
                return
        self._arrival.set()
