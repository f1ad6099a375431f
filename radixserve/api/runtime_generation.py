# mypy: disable-error-code="overload-overlap"
"""`RuntimeGeneration`: the methods of `Runtime` that generate answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Unpack, overload

from radixserve.api.beam_search import read_options
from radixserve.api.client import RequestHandle, RuntimeMethods
from radixserve.api.progress import BatchProgress
from radixserve.api.request_builder import check_params, gather
from radixserve.api.settings import (
    BeamSearchSettings,
    ChatSettings,
    GenerateSettings,
    Params,
    chat_options,
)
from radixserve.checks import check_int, check_str, shown
from radixserve.completion import Chunk, Completion
from radixserve.engine.messages import GetStats
from radixserve.errors import EngineDead, InvalidRequest
from radixserve.request import BeamParams, Request, SamplingParams
from radixserve.text.prompts import Prompt, as_prompts, check_prompts


class RuntimeGeneration(RuntimeMethods):
    """Generating: whole answers, streams, beam searches, and requests as handles."""

    # For a type checker a text is an iterable of texts, so the two overloads of a call overlap. It
    # takes the first that fits, the one for a single prompt.

    @overload
    def generate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[GenerateSettings],
    ) -> Completion: ...

    @overload
    def generate(
        self, prompts: Iterable[Prompt], params: Params = None, **options: Unpack[GenerateSettings]
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Any,
        params: Params = None,
        *,
        progress: bool | None = None,
        request_id: str | None = None,
        **chat: Unpack[ChatSettings],
    ) -> Any:
        """Complete one prompt (-> Completion) or several (-> list, in order).

        A prompt is text, a list of token ids, or a list of chat messages; the answer continues the
        last message if that is the assistant's. Several prompts are any iterable of these. All are
        checked before any is started; an error of one of several names its index. With n > 1 in
        its params a prompt has a list of n Completions, and is computed once: the first one's usage
        counts it, the others count all but its last token as cached.

        `progress` shows a bar, by default for batches on a terminal. `request_id` names a single
        request for `abort`. `chat`: tools and chat_template_kwargs, see `ChatSettings`. Raises
        InvalidRequest, RequestFailed and EngineDead.
        """
        handle, is_list = self._generate(prompts, params, request_id, chat)
        core = self._client.core
        bar = _progress_bar(handle, is_list, progress, lambda: core.call(GetStats()))
        if bar is None:
            return handle.get()
        with bar:
            return handle.get(bar.add)

    @overload
    async def agenerate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[GenerateSettings],
    ) -> Completion: ...

    @overload
    async def agenerate(
        self, prompts: Iterable[Prompt], params: Params = None, **options: Unpack[GenerateSettings]
    ) -> list[Completion]: ...

    async def agenerate(
        self,
        prompts: Any,
        params: Params = None,
        *,
        progress: bool | None = None,
        request_id: str | None = None,
        **chat: Unpack[ChatSettings],
    ) -> Any:
        """`generate` for asyncio. Cancelling the task aborts its requests."""
        await self._client.compile_grammars(params)
        handle, is_list = self._generate(prompts, params, request_id, chat)
        core = self._client.core  # its status does not wait: nothing blocks the loop
        bar = _progress_bar(handle, is_list, progress, lambda: core.status().stats)
        if bar is None:
            return await handle.aget()
        with bar:
            if bar.is_shown:  # the status may be older than answers that have come
                stats = await asyncio.wrap_future(core.ask(GetStats()))
                bar.begin(stats)
            completions = await handle.aget(bar.add)
            if bar.is_shown:
                with suppress(EngineDead):  # the Runtime was closed meanwhile
                    stats = await asyncio.wrap_future(core.ask(GetStats()))
                    bar.refresh(stats)
        return completions

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **chat: Unpack[ChatSettings],
    ) -> Iterator[Chunk]:
        """Yields the answer in chunks; the last Chunk has the whole Completion.

        The request is checked now and starts with the first iteration; leaving the loop aborts it.
        """
        return self._stream(self._single(prompt, params, request_id, chat))

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **chat: Unpack[ChatSettings],
    ) -> AsyncIterator[Chunk]:
        """`stream` for asyncio. Leaving the loop or cancelling the task aborts the request."""
        return self._astream(self._single(prompt, params, request_id, chat))

    @overload
    def beam_search(
        self,
        prompts: Prompt,
        beam_width: int | None = None,
        max_tokens: int | None = None,
        **fields: Unpack[BeamSearchSettings],
    ) -> list[Completion]: ...

    @overload
    def beam_search(
        self,
        prompts: Iterable[Prompt],
        beam_width: int | None = None,
        max_tokens: int | None = None,
        **fields: Unpack[BeamSearchSettings],
    ) -> list[list[Completion]]: ...

    def beam_search(
        self,
        prompts: Any,
        beam_width: int | None = None,
        max_tokens: int | None = None,
        **fields: Any,
    ) -> Any:
        """Returns the `width` best answers that a beam search finds, best first, with their scores.

        -> a list of Completions, or a list of these for a list of prompts. `beams` has the width
        and the rules of the search; `params` has the end of an answer, penalties, logprobs,
        priority and namespace. Or give the fields of both as keywords: `beam_width` (4),
        `length_penalty`, `early_stopping`, `max_tokens` (64), `min_tokens`, `repetition_penalty`,
        `stop`, ...

        Answers and scores are those of transformers' beam search: `score` is the sum of the tokens'
        log-probabilities, changed by the penalties and not normalised again, divided by (number of
        tokens) ** length_penalty; `cumulative_logprob` is the sum of the model's own. `min_tokens`
        forbids end tokens; a stop string ends a beam at any length.

        The prompt is computed once and the beams share all that they have in common. The first
        answer's usage counts the prompt, the others' count it as cached. An aborted search returns
        the best answers so far, at least one.
        """
        return self._beam_search(
            prompts, beam_width=beam_width, max_tokens=max_tokens, **fields
        ).get()

    @overload
    async def abeam_search(
        self,
        prompts: Prompt,
        beam_width: int | None = None,
        max_tokens: int | None = None,
        **fields: Unpack[BeamSearchSettings],
    ) -> list[Completion]: ...

    @overload
    async def abeam_search(
        self,
        prompts: Iterable[Prompt],
        beam_width: int | None = None,
        max_tokens: int | None = None,
        **fields: Unpack[BeamSearchSettings],
    ) -> list[list[Completion]]: ...

    async def abeam_search(
        self,
        prompts: Any,
        beam_width: int | None = None,
        max_tokens: int | None = None,
        **fields: Any,
    ) -> Any:
        """`beam_search` for asyncio. Cancelling the task aborts it."""
        records = ("params", "beams", "request_id")
        params, beams, request_id = (fields.pop(name, None) for name in records)
        settings = {"beam_width": beam_width, "max_tokens": max_tokens, **fields}
        params, beams = read_options(params, beams, settings)
        await self._client.compile_grammars(params)
        return await self._beam_search(prompts, params, beams, request_id).aget()

    def abort(self, request_id: str | None = None) -> int:
        """End one request, or all. Their callers get the tokens so far, with finish_reason "abort".

        Returns how many were still running.
        """
        ids = None if request_id is None else [check_str("request_id", request_id)]
        return self._client.core.abort(ids)

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        streams: bool = False,
        session: str = "",
        beams: BeamParams | None = None,
        max_in_flight: int | None = None,
    ) -> RequestHandle[Any]:
        """Returns the requests of a list of prompts as a handle, see `RequestHandle`.

        The requests are in order of their prompts, `num_samples` per prompt; `get` and `aget`
        return one entry per prompt, as `generate` does. With `streams` the handle yields Chunks.
        `session` names a cache session that claims their cached tokens until `close_session`.
        `beams`: each prompt is a beam search, whose answers come together as a tuple; not streamed.
        `max_in_flight`: most requests in the engine at a time; the others follow as these end.
        """
        several = check_prompts(prompts)
        check_str("session", session)
        if max_in_flight is not None:
            check_int("max_in_flight", max_in_flight, 1)
        if beams is not None:
            given = SamplingParams() if params is None else check_params(params)
            own, beams = read_options(given, beams, {})
            requests = self._client.builder.beam_search(several, own, beams, None)
            requests = [replace(request, session=session) for request in requests]
            return self._client.submit(requests, max_in_flight=max_in_flight)
        requests, each = self._client.builder.build(several, params)
        if session:
            requests = [replace(request, session=session) for request in requests]
        finish = None if streams else lambda completions: gather(completions, each)
        return self._client.submit(requests, finish, streams=streams, max_in_flight=max_in_flight)

    # -- inside -------------------------------------------------------------------------------

    def _generate(
        self, prompts: Any, params: Params, request_id: str | None, chat: Mapping[str, Any]
    ) -> tuple[RequestHandle[Completion], bool]:
        """Returns the handle of the requests, not submitted yet, and whether several prompts were
        given."""
        self._client.core.check_alive()
        given, is_list = as_prompts(prompts)
        requests, each = self._client.builder.build(
            given, params, request_id, chat_options(chat), is_batch=is_list
        )

        def finish(completions: list[Completion]) -> Any:
            entries = gather(completions, each)
            return entries if is_list else entries[0]

        prompt_indices = [
            index for index, own_params in enumerate(each) for _ in range(own_params.num_samples)
        ]
        return self._client.submit(requests, finish, prompt_indices if is_list else None), is_list

    def _single(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        chat: Mapping[str, Any],
    ) -> Request:
        self._client.core.check_alive()
        return self._client.builder.single(prompt, params, request_id, chat_options(chat))

    def _beam_search(
        self,
        prompts: Any,
        params: SamplingParams | None = None,
        beams: BeamParams | None = None,
        request_id: str | None = None,
        **fields: Any,
    ) -> RequestHandle[tuple[Completion, ...]]:
        """Returns the handle of the searches, not submitted yet."""
        self._client.core.check_alive()
        params, beams = read_options(params, beams, fields)
        given, is_list = as_prompts(prompts)
        requests = self._client.builder.beam_search(
            given, params, beams, request_id, is_batch=is_list
        )

        def finish(answers: list[tuple[Completion, ...]]) -> Any:
            return list(map(list, answers)) if is_list else list(answers[0])

        prompt_indices = list(range(len(requests))) if is_list else None
        return self._client.submit(requests, finish, prompt_indices)

    def _stream(self, request: Request) -> Iterator[Chunk]:
        with self._client.stream(request) as chunks:
            yield from chunks

    async def _astream(self, request: Request) -> AsyncIterator[Chunk]:
        with self._client.stream(request) as chunks:
            async for chunk in chunks:
                yield chunk


def _progress_bar(
    handle: RequestHandle[Any],
    is_list: bool,
    progress: bool | None,
    stats: Callable[[], Mapping[str, Any]],
) -> BatchProgress | None:
    """Returns the bar of a batch; None for a single prompt, unless a bar is requested. Raises
    InvalidRequest."""
    if progress is not None and not isinstance(progress, bool):
        raise InvalidRequest(f"progress must be True, False or None, got {shown(progress)}")
    if not is_list and not progress:
        return None
    return BatchProgress(len(handle), stats, wanted=progress)
