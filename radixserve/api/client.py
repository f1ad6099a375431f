"""`EngineClient`: submits requests to the engine, for Runtime, branches and chats."""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Generic, Self, TypeVar, cast

from radixserve.api.beam_search import BeamCollector
from radixserve.api.request_builder import RequestBuilder
from radixserve.arrays import IntArray
from radixserve.cache import Lookup
from radixserve.checks import check_text
from radixserve.completion import Chunk, Completion, join_chunks
from radixserve.engine.core_client import EngineCoreClient
from radixserve.engine.messages import LookUpPrompt
from radixserve.engine.output_collector import Event, OutputCollector
from radixserve.engine.output_notifier import LoopWaker, OutputNotifier
from radixserve.errors import InvalidRequest, RequestFailed, request_failed
from radixserve.logits_digest import with_digest
from radixserve.request import Request, SamplingParams
from radixserve.text.prompts import PromptReader
from radixserve.text.tokenizer import Tokenizer

Output = TypeVar("Output", Chunk, Completion, tuple[Completion, ...])


class RequestHandle(Generic[Output]):
    """Requests that are submitted together. One thread or task takes their outputs.

        with client.submit(requests) as handle:      # from here on the engine has them
            for completion in handle: ...            # as they end; or `async for`
        client.submit(requests).get()                # in the requests' order; or `await ...aget()`

    A streaming handle yields Chunks. Other handles yield one Completion per request, or a tuple of
    them for a beam search. The first error is raised at once: RequestFailed for a request that the
    engine could not answer, EngineDead if the engine has ended. Leaving the block aborts requests
    that have not ended.
    """

    def __init__(
        self,
        core: EngineCoreClient,
        tokenizer: Tokenizer | None,
        requests: Sequence[Request],
        *,
        notifier: OutputNotifier,
        streams: bool = False,
        finish: Callable[[list[Output]], Any] | None = None,
        prompt_indices: Sequence[int] | None = None,
        max_in_flight: int | None = None,
    ) -> None:
        """`finish`: makes the result of `get` from the last output of each request; None: `get`
        returns these. `prompt_indices`: the index of each request's prompt in a batch, for its
        error. `notifier`: wakes the task that waits. `max_in_flight`: most requests in the engine
        at a time; the others follow as these end.
        """
        self._prompt_indices = prompt_indices
        self._core = core
        self._finish: Callable[[list[Output]], Any] | None = finish
        self._queue = _EventQueue(notifier)
        self._last: dict[int, Output] = {}  # request's index -> its last output
        self._collectors = [
            OutputCollector(request, tokenizer, partial(self._queue.put, index), streams=streams)
            if request.beams is None
            else BeamCollector(request, tokenizer, partial(self._queue.put, index))
            for index, request in enumerate(requests)
        ]
        self._max_in_flight = len(self._collectors) if max_in_flight is None else max_in_flight
        self._parts: list[range] = []  # indices of requests that were submitted together

    def get(self, note: Callable[[Output], object] | None = None) -> Any:
        """Block until all requests have ended. Returns the last output of each, in the requests'
        order, or the result of `finish`. `note` is called with each output.
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
        """Number of requests."""
        return len(self._collectors)

    def __enter__(self) -> Self:
        try:
            self._submit(self._max_in_flight)
        except BaseException:  # Ctrl-C
            self._abandon()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self._has_ended:
            self._abandon()

    @property
    def _num_submitted(self) -> int:
        return self._parts[-1].stop if self._parts else 0

    @property
    def unsubmitted(self) -> Sequence[Request]:
        """The requests that wait here until others have ended."""
        return [collector.request for collector in self._collectors[self._num_submitted :]]

    def _submit(self, count: int) -> None:
        """Submit the next `count` requests together."""
        start = self._num_submitted
        part = range(start, min(start + count, len(self._collectors)))
        self._parts.append(part)
        self._core.submit(self._collectors[part.start : part.stop])

    def _abandon(self) -> None:
        for part in self._parts:
            if not all(index in self._last for index in part):
                self._core.abandon(self._collectors[part.start : part.stop])

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
        """Yields lists of the outputs since the last list, each with the index of its request. The
        Chunks of a request that came meanwhile are joined into one, so that a slow caller needs no
        more memory than the answers.
        """
        while not self._has_ended:
            events = await self._queue.aget_joined()
            yield [(index, self._take(index, event)) for index, event in events]

    def abort(self) -> None:
        """End the requests that have not ended, with finish_reason "abort". Their last outputs
        still arrive."""
        if self._num_submitted < len(self._collectors):
            self._submit(len(self._collectors))
        self._abandon()

    @property
    def has_generated(self) -> bool:
        """Whether any of the requests has sampled a token."""
        return any(collector.token_ids for collector in self._collectors)

    @property
    def _has_ended(self) -> bool:
        return len(self._last) == len(self._collectors)

    def _take(self, index: int, event: Event) -> Output:
        if isinstance(event, RequestFailed) and self._prompt_indices is not None:
            event = request_failed(
                f"prompt {self._prompt_indices[index]}: {event}", event.__cause__ or event
            )
        if isinstance(event, BaseException):
            try:
                raise event
            finally:
                del event  # else its traceback holds this frame, which holds it: what the caller
                # had would live until the cyclic collector runs
        output = cast(Output, event)
        if not isinstance(event, Chunk) or event.completion is not None:
            self._last[index] = output
            if self._num_submitted < len(self._collectors):
                self._submit(1)
        return output

    def result(self) -> Any:
        """Returns the result of `get`, after all requests have ended."""
        outputs = [self._last[index] for index in range(len(self._collectors))]
        return outputs if self._finish is None else self._finish(outputs)


class _EventQueue:
    """A queue of (request's index, event) from the engine's thread to one thread or task.

    Separate from the handle, which the engine's thread must not keep alive.
    """

    def __init__(self, notifier: OutputNotifier) -> None:
        self._items: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._notifier = notifier
        self._waker: LoopWaker | None = None  # of the loop of the task that waits
        self._arrival = asyncio.Event()  # set in that loop after an item was put
        self._joined: dict[int, Event] | None = None  # where the task takes joined chunks

    def put(self, index: int, event: Event) -> None:
        self._items.put((index, event))
        waker = self._waker
        if waker is not None:
            waker.call(self._note_arrival)

    def get(self) -> tuple[int, Event]:
        return self._items.get()

    async def aget(self) -> tuple[int, Event]:
        if self._waker is None:
            self._waker = self._notifier.running()
        while self._items.empty():
            self._arrival.clear()
            await self._arrival.wait()
        return self._items.get_nowait()

    async def aget_joined(self) -> list[tuple[int, Event]]:
        """Returns all events so far, at least one; the chunks of a request are joined."""
        if self._joined is None:
            self._waker, self._joined = self._notifier.running(), {}
        self._note_arrival()
        while not self._joined:
            self._arrival.clear()
            await self._arrival.wait()
        events, self._joined = self._joined, {}
        return list(events.items())

    def _note_arrival(self) -> None:
        """Wake the task. Joins the events so far, even while the task awaits something else. Called
        in the loop."""
        joined = self._joined
        if joined is not None:
            while not self._items.empty():
                index, event = self._items.get_nowait()
                before = joined.get(index)
                if isinstance(before, Chunk) and isinstance(event, Chunk):
                    event = join_chunks(before, event)
                joined[index] = event
            if not joined:
                return
        self._arrival.set()


class EngineClient:
    """Builds requests and submits them to the engine's thread. May be used from any thread."""

    def __init__(
        self, core: EngineCoreClient, builder: RequestBuilder, notifier: OutputNotifier
    ) -> None:
        """`notifier`: the notifier that `core` pauses while it prepares a step."""
        self.core = core
        self.builder = builder
        self.notifier = notifier
        self.session_numbers = itertools.count()  # for the names of branches' sessions

    @property
    def reader(self) -> PromptReader:
        return self.builder.reader

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises InvalidRequest without one."""
        if self.reader.tokenizer is None:
            raise InvalidRequest("the model has no tokenizer: it knows token ids, but no text")
        return self.reader.tokenizer

    async def compile_grammars(self, params: object) -> None:
        """Compile the grammars of params, one or several, that are new, outside the event loop."""
        grammars = self.builder.grammars
        for own_params in params if isinstance(params, list | tuple) else [params]:
            if isinstance(own_params, SamplingParams):
                structured = own_params.structured_outputs
                if structured is not None and not grammars.has(structured):
                    await asyncio.to_thread(grammars.compile, structured)

    def submit(
        self,
        requests: Sequence[Request],
        finish: Callable[[list[Any]], Any] | None = None,
        prompt_indices: Sequence[int] | None = None,
        *,
        streams: bool = False,
        max_in_flight: int | None = None,
    ) -> RequestHandle[Any]:
        """Returns a handle. Its requests, or the first `max_in_flight` of them, are submitted when
        it is entered or its `get` or `aget` is called.

        `finish`: makes the result of `get` from all outputs, in the requests' order.
        `prompt_indices`: the index of each request's prompt, for errors. `streams`: the handle
        yields Chunks.
        """
        return RequestHandle(
            self.core,
            self.reader.tokenizer,
            [with_digest(request) for request in requests],
            streams=streams,
            finish=finish,
            prompt_indices=prompt_indices,
            notifier=self.notifier,
            max_in_flight=max_in_flight,
        )

    def stream(self, request: Request) -> RequestHandle[Chunk]:
        """Returns a handle that yields Chunks, to be entered and iterated over."""
        return self.submit([request], streams=True)

    def namespace(self, namespace: object, adapter: object) -> str:
        """Returns the namespace of requests with an adapter, "": none. Raises InvalidRequest."""
        name, own = check_text("namespace", namespace), check_text("adapter", adapter)
        return self.builder.adapters.namespace(name, own)

    def lookup(
        self, token_ids: IntArray, namespace: str, *, compare_namespaces: bool = True
    ) -> Lookup:
        """Returns how much of a prompt is cached now, and why not more."""
        place = self.cache_place(token_ids, namespace)
        return self.core.call(LookUpPrompt(*place, compare_namespaces))

    def cache_place(self, token_ids: IntArray, namespace: str) -> tuple[IntArray, str]:
        """Returns a prompt's tokens and namespace as the cache has them. Raises InvalidRequest."""
        if namespace.startswith("\0"):  # of an adapter
            return self.builder.adapters.cache_place(token_ids, namespace)
        return token_ids, namespace


class RuntimeMethods:
    """Base of the groups of methods that make up a `Runtime`."""

    _client: EngineClient
