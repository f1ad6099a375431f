"""`HttpGeneration`: an HTTP request in the engine, until it ends or its client leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

from starlette.requests import Request

from radixserve.api.request_handle import RequestHandle
from radixserve.arrays import IntArray
from radixserve.output import Chunk, Completion
from radixserve.request import SamplingParams
from radixserve.server.disconnect import CancelOnDisconnect
from radixserve.server.hints import request_hints
from radixserve.server.sampling import session_of
from radixserve.server.schema import GenerateRequest, GenerationFields
from radixserve.server.state import Server
from radixserve.server.usage import Group, as_groups, grouped, usage_of


class HttpGeneration(CancelOnDisconnect):
    """Enter it, then take `groups` or iterate over `chunks`. Leaving aborts what has not ended."""

    def __init__(
        self,
        server: Server,
        request: Request,
        prompts: Sequence[IntArray],
        params: SamplingParams,
        body: GenerationFields | GenerateRequest,
        namespace: str,
        *,
        streams: bool,
    ) -> None:
        """`body` may name a cache session, see `SessionTable.begin`, and hints, which take effect
        when all has ended, before the last chunks are given out.

        Raises ApiError 429 where the queue is full, InvalidRequest for wrong parameters.
        """
        super().__init__(server, request)
        session = session_of(server, body, namespace)
        self._hints = request_hints(request, body.cache_hints, namespace)
        runtime = server.runtime
        num_tokens = sum(map(len, prompts))
        server.limits.check(runtime.status(), len(prompts) * params.num_samples, num_tokens)
        self.prompts = prompts
        self._handle: RequestHandle[Any] = runtime.submit(
            prompts, params, streams=streams, session=session
        )
        self._session = session
        self._supersedes = bool(body.supersede)
        self._num_samples = params.num_samples
        self.hint_answers: list[dict[str, Any]] = []  # after the end, one a hint
        self._completions: dict[int, Completion] = {}  # of a stream, by index

    def __enter__(self) -> Self:
        super().__enter__()
        if self._session:
            self.server.sessions.begin(self._session, self, supersedes=self._supersedes)
        self._handle.__enter__()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._session:
            self.server.sessions.finish(self._session, self)
        self._handle.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)

    @property
    def has_generated(self) -> bool:
        return self._handle.has_generated

    async def groups(self) -> list[list[Completion]]:
        """The completions of each prompt, when all have ended."""
        async for _ in self._handle:
            pass
        groups = as_groups(self._handle.result())
        self._note(groups)
        await self._apply_hints()
        return groups

    async def _apply_hints(self) -> None:
        if self._hints.hints:
            self.hint_answers = await self._hints.apply(self.prompts)

    def with_hints(self, body: dict[str, Any]) -> dict[str, Any]:
        """`body`, with the answers to the request's hints where it gave any."""
        return {**body, "cache_hints": self.hint_answers} if self.hint_answers else body

    async def chunks(self) -> AsyncIterator[list[tuple[int, Chunk]]]:
        """What came since the last time, each with its index: prompts in order, samples of each."""
        async for events in self._handle.joined():
            for at, chunk in events:
                if chunk.completion is not None:
                    self._completions[at] = chunk.completion
            if len(self._completions) == len(self.prompts) * self._num_samples:
                await self._apply_hints()
            yield events
        self._note(self.streamed_groups())

    def streamed_groups(self) -> list[list[Completion]]:
        """The completions of each prompt, after the last chunk."""
        return grouped(self._completions, self._num_samples)

    def _note(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self.server.counters.add(group)
        self.note_usage(sum(map(len, groups)), usage_of(groups))
