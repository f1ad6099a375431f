"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.arrays import IntArray
from radixserve.completion import Chunk, Completion
from radixserve.request import SamplingParams
from radixserve.server.answer.output_parser import Delta
from radixserve.server.gate.json_body import JsonRoute, has_large_body
from radixserve.server.gate.request_log import note_skipped
from radixserve.server.gate.state import AppState, request_id_of, server_of
from radixserve.server.prompt.prompt_input import in_thread_if, read_prompts
from radixserve.server.turn.answer_builder import ChoicesBuilder
from radixserve.server.turn.cache_use import CacheUse
from radixserve.server.turn.http_generation import HttpGeneration
from radixserve.server.turn.structured_outputs import read_constraint
from radixserve.server.wire import logprobs
from radixserve.server.wire.errors import ApiError
from radixserve.server.wire.json_response import dump, quote
from radixserve.server.wire.sampling import (
    check_stream,
    keep_last,
    read_beams,
    read_sampling,
    token_limit,
)
from radixserve.server.wire.schema import CompletionRequest
from radixserve.server.wire.usage import Group, epochs_body

router = APIRouter(route_class=JsonRoute)
_MAX_TOKENS = 16  # OpenAI's default


@router.post("/v1/completions")
async def complete(request: Request, body: CompletionRequest) -> Response:
    """Continue texts or token ids."""
    server = server_of(request)
    server.check_model(body.model)
    await note_skipped(request, body)
    cache = CacheUse.read(request, body)
    prompts, _ = await read_prompts(
        server.runtime,
        body.prompt,
        "prompt",
        server.config.max_prompts,
        add_special_tokens=body.add_special_tokens is not False,
        truncation_side=body.truncation_side,
        keep_last=keep_last(
            body.truncate_prompt_tokens, server.runtime.max_seq_len, _limit(body)[1] or 1
        ),
    )
    if body.stream and body.echo and (body.logprobs is not None or _drops_output(body)):
        raise ApiError(
            400, "echo with logprobs or with max_tokens 0 cannot be streamed", param="echo"
        )
    params, constraint = await in_thread_if(
        has_large_body(request),
        lambda: (
            completion_params(server, body, cache.namespace, min(map(len, prompts))),
            read_constraint(body.response_format, body.structured_outputs),
        ),
    )
    if constraint is not None:
        params = replace(params, structured=await constraint.compile(server, cache.namespace))
    streams = check_stream(body.stream, body.stream_options, params)
    generation = HttpGeneration(
        server, request, prompts, params, cache, streams=streams, beams=read_beams(body)
    )
    builder = CompletionBuilder(
        generation, body, params.n, answer_id=f"cmpl-{request_id_of(request)}", streams=streams
    )
    return await builder.respond()


def completion_params(
    server: AppState, body: CompletionRequest, namespace: str, num_prompt: int
) -> SamplingParams:
    """The sampling parameters of a completion of a prompt of `num_prompt` tokens. Raises
    ApiError."""
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        if prompt_logprobs not in (None, body.logprobs):
            raise ApiError(
                400, "prompt_logprobs must equal logprobs with echo", param="prompt_logprobs"
            )
        prompt_logprobs = body.logprobs
    if body.logprob_token_ids and body.logprobs is None:
        raise ApiError(400, "logprob_token_ids needs logprobs", param="logprob_token_ids")
    limit_name, max_tokens = _limit(body)
    if max_tokens is None:
        max_tokens = max(1, server.runtime.max_seq_len - num_prompt)
    own: dict[str, Any] = {
        "max_tokens": 1 if _drops_output(body) else max_tokens,
        "logprobs": None if body.logprob_token_ids else body.logprobs,
        "logprob_token_ids": body.logprob_token_ids or None,
        "prompt_logprobs": prompt_logprobs,
        "best_of": body.best_of,
    }
    renamed = {"max_tokens": limit_name}
    return read_sampling(server.runtime, body, namespace, server.config, renamed=renamed, **own)


def _limit(body: CompletionRequest) -> tuple[str, int | None]:
    """The field that limits the answer, and the most tokens; None: the rest of the context."""
    return token_limit(body, "max_tokens", "n_predict", default=_MAX_TOKENS)


def _drops_output(body: CompletionRequest) -> bool:
    """Whether max_tokens is 0 with echo: one token is generated and left out of the answer."""
    return bool(body.echo) and _limit(body)[1] == 0


class CompletionBuilder(ChoicesBuilder):
    """Formats completions, whole and as chunks."""

    chunk_object = "text_completion"

    def __init__(
        self,
        generation: HttpGeneration,
        body: CompletionRequest,
        num_samples: int,
        *,
        answer_id: str,
        streams: bool,
    ) -> None:
        super().__init__(
            generation,
            body,
            num_samples,
            answer_id=answer_id,
            object_name="text_completion",
            streams=streams,
        )
        self._request = body
        self._prompts = generation.prompts
        self._drops_output = _drops_output(body)
        generation.returns_output = not self._drops_output
        self._offsets: dict[int, int] = {}  # by index: characters of a stream's tokens so far

    # -- whole answers ------------------------------------------------------------------------

    async def full_body(self) -> Callable[[], dict[str, Any]]:
        with self.generation:
            groups = await self.generation.groups()
        return lambda: self._whole(groups)

    def _whole(self, groups: Sequence[Group]) -> dict[str, Any]:
        choices = [
            self._choice(prompt_index * self._num_samples + sample, prompt, completion)
            for prompt_index, (prompt, group) in enumerate(zip(self._prompts, groups, strict=True))
            for sample, completion in enumerate(group)
        ]
        body = self._body(choices, groups)
        if self._drops_output:
            num_prompt = body["usage"]["prompt_tokens"]
            body["usage"] |= {"completion_tokens": 0, "total_tokens": num_prompt}
        return body

    def _choice(self, index: int, prompt: IntArray, completion: Completion) -> dict[str, Any]:
        body, texts = self._request, self.server.token_texts
        text = "" if self._drops_output else completion.text
        ids = [] if self._drops_output else completion.token_ids
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echoed(prompt) + text,
            "logprobs": None,
            "finish_reason": "length" if self._drops_output else completion.finish_reason,
            "stop_reason": None if self._drops_output else completion.stop_reason,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "token_ids": None,
        }
        if completion.score is not None:
            choice["score"] = completion.score
        if body.logprobs is not None:
            assert completion.logprobs is not None
            shown = list(ids)
            own: list[float | None] = list(completion.logprobs[: len(ids)])
            tops: list[dict[int, float] | None] = list((completion.top_logprobs or [])[: len(ids)])
            if body.echo:
                assert completion.prompt_logprobs is not None
                shown = [*prompt.tolist(), *shown]
                own = [*completion.prompt_logprobs, *own]
                tops = [*(completion.prompt_top_logprobs or []), *tops]
            choice["logprobs"] = logprobs.of_completion(texts, shown, own, tops, by_id=self._by_id)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = logprobs.of_prompt(texts, prompt.tolist(), completion)
        if body.return_token_ids:
            choice["token_ids"] = list(ids)
            choice["prompt_token_ids"] = prompt.tolist()
            choice["weight_epochs"] = epochs_body(completion)
        return choice

    def _echoed(self, prompt: IntArray) -> str:
        """The prompt's text as the client gave it, or decoded from its ids; "" without echo."""
        if not self._request.echo:
            return ""
        given = self._request.prompt
        if self._request.truncate_prompt_tokens is not None:
            given = [[]]  # the prompt is a part of what was given, so it is decoded
        if isinstance(given, str):
            return given
        index = next(
            index for index, own_prompt in enumerate(self._prompts) if own_prompt is prompt
        )
        if isinstance(given[0], str):
            return str(given[index])
        tokenizer = self.server.runtime.tokenizer
        return "" if tokenizer is None else tokenizer.decode(prompt.tolist(), keep_special=True)

    # -- streams ------------------------------------------------------------------------------

    async def _batches(self) -> AsyncIterator[list[tuple[int, Chunk, Delta | None]]]:
        async for chunks in self.generation.chunks():
            yield [(index, chunk, None) for index, chunk in chunks]

    def _frames(self, index: int, chunk: Chunk, delta: Delta | None) -> Iterator[str]:
        del delta  # only chats have deltas
        body, texts, text = self._request, self.server.token_texts, chunk.text
        prompt_ids = ""
        if index not in self._offsets:
            self._offsets[index] = 0
            prompt_ids = self._prompt_ids(index)
            text = self._echoed(self._prompts[index // self._num_samples]) + text
        logprobs_text = "null"
        if body.logprobs is not None and chunk.logprobs is not None:
            logprobs_text = dump(
                logprobs.of_completion(
                    texts,
                    chunk.token_ids,
                    chunk.logprobs,
                    chunk.top_logprobs,
                    start=self._offsets[index],
                    by_id=self._by_id,
                )
            )
            self._offsets[index] += sum(len(texts.text(token_id)) for token_id in chunk.token_ids)
        reason = "" if chunk.completion is None else chunk.completion.finish_reason
        member = f'"text":{quote(text)}{prompt_ids}'
        yield self._frame(index, member, logprobs_text, chunk, reason)
