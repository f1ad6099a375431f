"""`GenerationMixin`: the calls of a `Runtime` that generate: whole, streamed, by beam search."""

# mypy: disable-error-code="overload-overlap"
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, Unpack, overload

from radixserve.api.beam_search import read_options
from radixserve.api.client import EngineClient
from radixserve.api.progress import BatchProgress
from radixserve.api.request_handle import RequestHandle
from radixserve.api.samples import gather
from radixserve.api.settings import (
    BeamSearchSettings,
    ChatSettings,
    GenerateSettings,
    Params,
    chat_options,
)
from radixserve.checks import check_str, shown
from radixserve.engine.messages import GetStats
from radixserve.errors import InvalidRequest
from radixserve.output import Chunk, Completion
from radixserve.request import BeamParams, Request, SamplingParams
from radixserve.text.prompts import Prompt, as_prompts


class GenerationMixin:
    """Every call checks all that it is given before anything is started.

    Overloads: a text is an iterable of texts to a type checker, so that the two forms of a call
    overlap; the first one that fits counts, which is the one for a single prompt.
    """

    _client: EngineClient

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

        A prompt is text, a list of token ids, or a list of chat messages, whose last one is
        continued where it is of the assistant; several are any iterable of these. All prompts are
        checked before any is started; an error of one of several names its index. With n > 1 in
        its params a prompt has a list of n Completions, and is computed once: the first one's usage
        counts it, the others count all but its last token as cached. `progress` shows a bar: by
        default for batches on a terminal. `request_id` names a single request for `abort`. `chat`:
        tools and chat_template_kwargs, see `ChatSettings`.
        """
        handle, is_list = self._generate(prompts, params, request_id, chat)
        core = self._client.core
        with _bar(handle, is_list, progress, lambda: core.call(GetStats())) as bar:
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
        await self._compile_grammars(params)
        handle, is_list = self._generate(prompts, params, request_id, chat)
        core = self._client.core  # its status is there at once: nothing blocks the loop
        with _bar(handle, is_list, progress, lambda: core.status().stats) as bar:
            return await handle.aget(bar.add)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **chat: Unpack[ChatSettings],
    ) -> Iterator[Chunk]:
        """The answer piece by piece; the last Chunk carries the whole Completion.

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
        """The `width` best answers that a beam search finds, best first, each with its score.

        -> a list of Completions, or a list of these for a list of prompts. `beams` is the search's
        shape, `params` say when an answer ends, its penalties, logprobs, priority and namespace;
        or give the fields of both as keywords: `beam_width` (4), `length_penalty`,
        `early_stopping`, `max_tokens` (64), `min_tokens`, `repetition_penalty`, `stop`, ...

        Answers and scores are those of transformers' beam search: `score` is the sum of the tokens'
        log-probabilities, changed by the penalties and not normalised again, divided by (number of
        tokens) ** length_penalty; `cumulative_logprob` is the sum of the model's own. `min_tokens`
        forbids end tokens; a stop string ends a beam at any length.

        The prompt is computed once and the beams share all that they have in common. The first
        answer's usage counts the prompt, the others' count it as cached. An aborted search returns
        the best of what there is, at least one.
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
        await self._compile_grammars(fields.get("params"))
        handle = self._beam_search(prompts, beam_width=beam_width, max_tokens=max_tokens, **fields)
        return await handle.aget()

    def abort(self, request_id: str | None = None) -> int:
        """End one request, or all; their callers get what there is, finish_reason "abort".

        Returns how many were still running.
        """
        ids = None if request_id is None else [check_str("request_id", request_id)]
        return self._client.core.abort(ids)

    # -- inside -------------------------------------------------------------------------------

    def _generate(
        self, prompts: Any, params: Params, request_id: str | None, chat: Mapping[str, Any]
    ) -> tuple[RequestHandle[Completion], bool]:
        """The requests, not submitted yet, and whether they are of several prompts."""
        self._client.core.check_alive()
        given, is_list = as_prompts(prompts)
        requests, each = self._client.builder.build(
            given, params, request_id, chat_options(chat), is_batch=is_list
        )

        def finish(completions: list[Completion]) -> Any:
            found = gather(completions, each)
            return found if is_list else found[0]

        owners = [at for at, one in enumerate(each) for _ in range(one.num_samples)]
        return self._client.submit(requests, finish, owners if is_list else None), is_list

    async def _compile_grammars(self, params: Params) -> None:
        """Compile the grammars of `params` that are new, outside the event loop."""
        several = params if isinstance(params, list | tuple) else [params]
        grammars = self._client.builder.grammars
        for one in several:
            structured = one.structured_output if isinstance(one, SamplingParams) else None
            if structured is not None and not grammars.has(structured):
                await asyncio.to_thread(grammars.compile, structured)

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
        """The searches, not submitted yet."""
        self._client.core.check_alive()
        params, beams = read_options(params, beams, fields)
        given, is_list = as_prompts(prompts)
        requests = self._client.builder.beam_search(
            given, params, beams, request_id, is_batch=is_list
        )

        def finish(found: list[tuple[Completion, ...]]) -> Any:
            return list(map(list, found)) if is_list else list(found[0])

        owners = list(range(len(requests))) if is_list else None
        return self._client.submit(requests, finish, owners)

    def _stream(self, request: Request) -> Iterator[Chunk]:
        with self._client.stream(request) as chunks:
            yield from chunks

    async def _astream(self, request: Request) -> AsyncIterator[Chunk]:
        with self._client.stream(request) as chunks:
            async for chunk in chunks:
                yield chunk


def _bar(
    handle: RequestHandle[Any],
    is_list: bool,
    progress: bool | None,
    stats: Callable[[], Mapping[str, Any]],
) -> BatchProgress:
    if progress is not None and not isinstance(progress, bool):
        raise InvalidRequest(f"progress must be True, False or None, got {shown(progress)}")
    return BatchProgress(len(handle), stats, wanted=progress if is_list else progress is True)
