"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.arrays import IntArray
from radixserve.output import Chunk, Completion
from radixserve.request import SamplingParams
from radixserve.server import logprobs
from radixserve.server.errors import ApiError
from radixserve.server.http_generation import HttpGeneration
from radixserve.server.json_response import answer, dump
from radixserve.server.prompts import read_prompts
from radixserve.server.sampling import check_stream, keep_last, read_sampling
from radixserve.server.schema import CompletionRequest
from radixserve.server.sse import EventStream, event, quote
from radixserve.server.state import Server, caller_of, request_id_of, server_of
from radixserve.server.stream_usage import StreamUsage
from radixserve.server.structured import with_structured
from radixserve.server.usage import usage_of

router = APIRouter()
_MAX_TOKENS = 16  # by default, as OpenAI has it


@router.post("/v1/completions")
async def complete(request: Request, body: CompletionRequest) -> Response:
    """Continue texts or token ids."""
    server = server_of(request)
    server.check_model(body.model)
    namespace = caller_of(request).namespace(body.cache_salt)
    prompts, _ = await read_prompts(
        server.runtime,
        body.prompt,
        "prompt",
        server.config.max_prompts,
        add_special_tokens=body.add_special_tokens is not False,
        keep_last=keep_last(server, body, body.max_tokens or _MAX_TOKENS),
    )
    builder = _ResponseBuilder(server, body, prompts, request_id_of(request))
    if body.stream and body.echo and (body.logprobs is not None or body.max_tokens == 0):
        raise ApiError(
            400, "echo with logprobs or with max_tokens 0 cannot be streamed", param="echo"
        )
    params = builder.params(namespace)
    params = await with_structured(server, body, params)
    streams = check_stream(body, params)
    generation = HttpGeneration(server, request, prompts, params, body, namespace, streams=streams)
    if streams:
        return EventStream(generation, builder.events)
    with generation:
        groups = await generation.groups()
    return answer(generation.with_hints(builder.response(groups)))


class _ResponseBuilder:
    """How one request's answer looks."""

    def __init__(
        self, server: Server, body: CompletionRequest, prompts: Sequence[IntArray], request_id: str
    ) -> None:
        self._server = server
        self._body = body
        self._prompts = prompts
        self._num_samples = 1
        # Only the prompt is wanted: one token is generated, and left out.
        self._drops_output = body.max_tokens == 0 and bool(body.echo)
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": server.model_name,
        }

    def params(self, namespace: str) -> SamplingParams:
        body = self._body
        prompt_logprobs = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            if prompt_logprobs not in (None, body.logprobs):
                raise ApiError(
                    400, "prompt_logprobs must equal logprobs with echo", param="prompt_logprobs"
                )
            prompt_logprobs = body.logprobs
        max_tokens = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
        own = {
            "max_tokens": 1 if self._drops_output else max_tokens,
            "logprobs": body.logprobs,
            "prompt_logprobs": prompt_logprobs,
            "best_of": body.best_of,
        }
        params = read_sampling(body, namespace, self._server.config.max_n, renamed={}, **own)
        self._num_samples = params.n
        return params

    # -- whole answers ------------------------------------------------------------------------

    def response(self, groups: list[list[Completion]]) -> dict[str, Any]:
        choices = [
            self._choice(at * self._num_samples + sample, prompt, one)
            for at, (prompt, group) in enumerate(zip(self._prompts, groups, strict=True))
            for sample, one in enumerate(group)
        ]
        usage = usage_of(groups)
        if self._drops_output:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return {**self._head, "choices": choices, "usage": usage}

    def _choice(self, index: int, prompt: IntArray, one: Completion) -> dict[str, Any]:
        body, texts = self._body, self._server.token_texts
        text = "" if self._drops_output else one.text
        ids = [] if self._drops_output else one.token_ids
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echoed(prompt) + text,
            "logprobs": None,
            "finish_reason": "length" if self._drops_output else one.finish_reason,
            "stop_reason": None if self._drops_output else one.stop_reason,
        }
        if body.logprobs is not None:
            assert one.logprobs is not None
            shown = list(ids)
            own: list[float | None] = list(one.logprobs[: len(ids)])
            tops: list[dict[int, float] | None] = list((one.top_logprobs or [])[: len(ids)])
            if body.echo:
                assert one.prompt_logprobs is not None
                shown = [*prompt.tolist(), *shown]
                own = [*one.prompt_logprobs, *own]
                tops = [*(one.prompt_top_logprobs or []), *tops]
            choice["logprobs"] = logprobs.of_completion(
                texts, shown, own, tops, by_id=body.return_tokens_as_token_ids is True
            )
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = logprobs.of_prompt(texts, prompt.tolist(), one)
        if body.return_token_ids:
            choice["token_ids"] = list(ids)
            choice["prompt_token_ids"] = prompt.tolist()
        return choice

    def _echoed(self, prompt: IntArray) -> str:
        """The prompt's text, with the special tokens that a client named itself."""
        if not self._body.echo:
            return ""
        given = self._body.prompt
        if self._body.truncate_prompt_tokens is not None:
            given = [[]]  # only a part of it is the prompt
        if isinstance(given, str):
            return given
        at = next(at for at, one in enumerate(self._prompts) if one is prompt)
        if isinstance(given[0], str):
            return str(given[at])
        tokenizer = self._server.runtime.tokenizer
        return "" if tokenizer is None else tokenizer.decode(prompt.tolist(), keep_special=True)

    # -- streams ------------------------------------------------------------------------------

    async def events(self, generation: HttpGeneration) -> AsyncIterator[str]:
        """A text of server-sent events for all that came meanwhile."""
        size = self._num_samples
        usage = StreamUsage(self._body.stream_options, self._prompts, size)
        head = dump(self._head)[:-1] + ',"choices":[{"index":'
        offsets: dict[int, int] = {}  # characters of the tokens so far, by index
        async for found in generation.chunks():
            usage.add(found)
            frames = []
            for at, chunk in found:
                before = ""
                if at not in offsets:
                    before, offsets[at] = self._echoed(self._prompts[at // size]), 0
                frames.append(self._frame(head, at, chunk, before, offsets, usage))
            yield "".join(frames)
        last = usage.last_event(generation.streamed_groups())
        if last is not None:
            yield event({**self._head, "choices": [], "usage": last})
        if generation.hint_answers:
            yield event(generation.with_hints({**self._head, "choices": []}))

    def _frame(
        self,
        head: str,
        at: int,
        chunk: Chunk,
        before: str,
        offsets: dict[int, int],
        usage: StreamUsage,
    ) -> str:
        body, done = self._body, chunk.completion
        ids = chunk.token_ids
        parts = [f'data: {head}{at},"text":{quote(before + chunk.text)},"logprobs":']
        if body.logprobs is None or chunk.logprobs is None:
            parts.append("null")
        else:
            found = logprobs.of_completion(
                self._server.token_texts,
                ids,
                chunk.logprobs,
                chunk.top_logprobs,
                start=offsets[at],
                by_id=body.return_tokens_as_token_ids is True,
            )
            offsets[at] += sum(len(self._server.token_texts.text(one)) for one in ids)
            parts.append(dump(found))
        if body.return_token_ids:
            parts.append(f',"token_ids":{dump(ids)}')
        reason = "null" if done is None else quote(done.finish_reason)
        if done is not None:
            reason += f',"stop_reason":{dump(done.stop_reason)}'
        parts.append(f',"finish_reason":{reason}}}]{usage.field(at, chunk)}}}\n\n')
        return "".join(parts)
