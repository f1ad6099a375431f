"""`RequestHandle`: requests on their way through the engine; a caller blocks for them or awaits."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Self, TypeVar, cast

from radixserve.api.beam_search import BeamTicket
from radixserve.engine.engine_thread import EngineThread
from radixserve.engine.ticket import Event, Ticket
from radixserve.output import Chunk, Completion
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
        worker: EngineThread,
        tokenizer: Tokenizer | None,
        requests: Sequence[Request],
        *,
        streams: bool = False,
        finish: Callable[[list[Output]], Any] | None = None,
    ) -> None:
        """`finish`: the result of `get` from all last outputs; None: these themselves."""
        self._worker = worker
        self._finish: Callable[[list[Output]], Any] | None = finish
        self._queue = _EventQueue()
        self._last: dict[int, Output] = {}  # request's index -> its last output
        self._tickets = [
            Ticket(request, tokenizer, partial(self._queue.put, at), streams=streams)
            if request.beams is None
            else BeamTicket(request, tokenizer, partial(self._queue.put, at))
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
        return self._result()

    async def aget(self) -> Any:
        """`get` for asyncio. Cancelling the task aborts the requests."""
        with self:
            async for _ in self:
                pass
        return self._result()

    def __len__(self) -> int:
        """Requests in all."""
        return len(self._tickets)

    def __enter__(self) -> Self:
        try:
            self._worker.submit(self._tickets)
        except BaseException:  # Ctrl-C
            self._worker.abandon(self._tickets)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self._has_ended:
            self._worker.abandon(self._tickets)

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

    @property
    def _has_ended(self) -> bool:
        return len(self._last) == len(self._tickets)

    def _take(self, at: int, event: Event) -> Output:
        if isinstance(event, BaseException):
            raise event
        output = cast(Output, event)
        if not isinstance(event, Chunk) or event.completion is not None:
            self._last[at] = output
        return output

    def _result(self) -> Any:
        outputs = [self._last[at] for at in range(len(self._tickets))]
        return outputs if self._finish is None else self._finish(outputs)


class _EventQueue:
    """(request's index, event) pairs from the engine's thread to one thread or task.

    Apart from the handle, which the engine's thread must not keep alive.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None  # of the task that waits
        self._arrival = asyncio.Event()  # set in that loop after an item was put

    def put(self, at: int, event: Event) -> None:
        self._items.put((at, event))
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._arrival.set)
            except RuntimeError:  # the loop was closed meanwhile
                if not loop.is_closed():
                    raise

    def get(self) -> tuple[int, Event]:
        return self._items.get()

    async def aget(self) -> tuple[int, Event]:
        self._loop = asyncio.get_running_loop()
        while self._items.empty():
            self._arrival.clear()
            await self._arrival.wait()
        return self._items.get_nowait()
