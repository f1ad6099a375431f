"""`HttpGeneration`: runs an HTTP request in the engine until it ends or its client disconnects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, Self

from starlette.requests import Request

from radixserve.api.client import RequestHandle
from radixserve.arrays import IntArray
from radixserve.completion import Chunk, Completion
from radixserve.request import BeamParams, SamplingParams
from radixserve.request import Request as EngineRequest
from radixserve.server.gate.disconnect import CancelOnDisconnect
from radixserve.server.gate.request_log import add_header
from radixserve.server.gate.state import AppState, caller_of
from radixserve.server.gate.tenants import check_priority
from radixserve.server.turn.cache_use import CacheUse
from radixserve.server.turn.request_hints import HintAnswers
from radixserve.server.wire.sampling import check_logprobs
from radixserve.server.wire.usage import Group, as_groups, completion_usage, grouped

# Header of an answer whose max_tokens exceeds the context: the tokens that it can have.
MAX_TOKENS_HEADER = "x-radixserve-max-tokens"


class HttpGeneration(CancelOnDisconnect):
    """The engine requests of one HTTP request, as a context manager.

    Inside it, await `groups` for whole answers or iterate over `chunks` for a stream. Leaving it
    aborts the engine requests that have not ended, as after a disconnect. Texts come from
    `engine/output_collector.py`, already cut at stop strings.
    """

    def __init__(
        self,
        server: AppState,
        request: Request,
        prompts: Sequence[IntArray],
        params: SamplingParams,
        cache: CacheUse,
        *,
        streams: bool,
        beams: BeamParams | None = None,
        submit: Callable[[], RequestHandle[Any]] | None = None,
        outlives_client: bool = False,
    ) -> None:
        """Check the limits and build the engine's requests. Entering the context submits them.

        cache   the session (see `SessionTable.begin`) and the hints of the request. Hints are
                applied when all answers have ended, before the last chunks are returned
        beams   each prompt is a beam search with `params.n` beams
        submit  makes the engine requests instead of `Runtime.submit`
        outlives_client  a disconnect does not abort the requests

        Raises ApiError: 429 if the queue is full, also on entering, since others may have filled it
        meanwhile; 403 for a priority without an admin key. Raises InvalidRequest for wrong
        parameters.
        """
        super().__init__(server, request, outlives_client=outlives_client)
        session = ""
        if cache.session_id is not None:
            session = server.sessions.use(cache.namespace, cache.session_id)
        self._hints = cache.hints
        self.model = server.name_of(cache.namespace)  # its name in answers
        runtime = server.runtime
        check_priority(server.tenants, caller_of(request), params.priority)
        self.prompts = prompts
        self.num_requests = len(prompts) * params.num_samples
        self._check_room()  # building requests for a full queue would hold up the others
        room = min(runtime.max_seq_len - len(prompt) for prompt in prompts)
        check_logprobs(params, prompts, min(params.max_tokens, room))
        if params.max_tokens > room:
            add_header(request, MAX_TOKENS_HEADER, str(room))
        self._handle: RequestHandle[Any] = (
            self._submit(prompts, params, beams, session, streams=streams)
            if submit is None
            else submit()
        )
        self._is_search = beams is not None
        self._session = session
        self._supersedes = cache.supersede
        self._num_samples = params.num_samples
        self.returns_output = True  # False: one token is sampled, and left out of the answer
        self.num_missing = 0  # answers that beam searches did not find: a grammar may allow fewer
        self.hint_answers = HintAnswers()  # empty until all answers have ended
        self.num_logprobs = 0  # in whole answers that have ended
        self._completions: dict[int, Completion] = {}  # of a stream, by index

    def _submit(
        self,
        prompts: Sequence[IntArray],
        params: SamplingParams,
        beams: BeamParams | None,
        session: str,
        *,
        streams: bool,
    ) -> RequestHandle[Any]:
        runtime = self.server.runtime
        max_in_flight = self.server.num_at_once(self.tenant)
        if beams is None:
            return runtime.submit(
                prompts, params, streams=streams, session=session, max_in_flight=max_in_flight
            )
        return runtime.submit(
            prompts, replace(params, n=1), beams=beams, session=session, max_in_flight=max_in_flight
        )

    def _check_room(self) -> None:
        num_tokens = sum(map(len, self.prompts))
        self.server.check_room(self.tenant, self.num_requests, num_tokens)

    def __enter__(self) -> Self:
        self._check_room()
        super().__enter__()
        if self._session:
            self.server.sessions.begin(self._session, self, supersedes=self._supersedes)
        try:
            self._handle.__enter__()
        except BaseException as error:
            self._leave(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._handle.__exit__(kind, error, trace)
        self._leave(kind, error, trace)

    def _leave(self, kind: object, error: object, trace: object) -> None:
        if self._session:
            self.server.sessions.finish(self._session, self)
        super().__exit__(kind, error, trace)

    @property
    def unsubmitted(self) -> Sequence[EngineRequest]:
        return self._handle.unsubmitted

    @property
    def has_generated(self) -> bool:
        return self._handle.has_generated

    async def groups(self) -> list[list[Completion]]:
        """Wait until all completions have ended. Returns those of each prompt."""
        async for _ in self._handle:
            pass
        groups = as_groups(self._handle.result())
        self.num_missing = len(self.prompts) * self._num_samples - sum(map(len, groups))
        self.num_logprobs = sum(_num_logprobs(each) for group in groups for each in group)
        self._note(groups)
        await self._apply_hints()
        return groups

    async def _apply_hints(self) -> None:
        if self._hints.hints or self._hints.envelope is not None:
            self.hint_answers = await self._hints.apply(self.prompts)

    def with_hints(self, body: dict[str, Any]) -> dict[str, Any]:
        """`body` with the answers to the request's hints, if it had any."""
        return self.hint_answers.added_to(body)

    async def chunks(self) -> AsyncIterator[list[tuple[int, Chunk]]]:
        """Batches of new chunks, each with its index: prompt index * samples + sample."""
        async for events in self._handle.joined():
            if self._is_search:
                events = self._as_chunks(events)
            for index, chunk in events:
                if chunk.completion is not None:
                    self._completions[index] = chunk.completion
            num_completions = len(self._completions) + self.num_missing
            if num_completions == len(self.prompts) * self._num_samples:
                await self._apply_hints()
            yield events
        self._note(self.streamed_groups())

    def _as_chunks(
        self, events: Sequence[tuple[int, tuple[Completion, ...]]]
    ) -> list[tuple[int, Chunk]]:
        """The answers of beam searches that have ended, each as a single chunk."""
        chunks = []
        for index, answers in events:
            self.num_missing += self._num_samples - len(answers)
            for rank, completion in enumerate(answers):
                chunk = Chunk(
                    completion.request_id,
                    completion.text,
                    completion.token_ids,
                    completion,
                    completion.logprobs,
                    completion.top_logprobs,
                )
                chunks.append((index * self._num_samples + rank, chunk))
        return chunks

    def streamed_groups(self) -> list[list[Completion]]:
        """The completions of each prompt, after the last chunk."""
        return grouped(self._completions, self._num_samples)

    def _note(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self.server.counters.add(group)
        usage = completion_usage(groups)
        if not self.returns_output:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        self.note_usage(sum(map(len, groups)), usage)


def _num_logprobs(completion: Completion) -> int:
    """Log-probabilities that the completion has for its answer and its prompt. O(tokens)."""
    num_own = len(completion.logprobs or ()) + len(completion.prompt_logprobs or ())
    tops = (*(completion.top_logprobs or ()), *(completion.prompt_top_logprobs or ()))
    return num_own + sum(len(top or ()) for top in tops)
