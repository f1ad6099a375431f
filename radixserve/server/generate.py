"""POST /generate: SGLang's native protocol, and the short one of tutorials."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.arrays import IntArray
from radixserve.output import Completion
from radixserve.request import SamplingParams
from radixserve.server.errors import ApiError
from radixserve.server.http_generation import HttpGeneration
from radixserve.server.json_response import answer
from radixserve.server.prompts import read_prompts
from radixserve.server.sampling import keep_last, read_sampling
from radixserve.server.schema import GenerateRequest, NativeSampling, Sampling
from radixserve.server.sse import EventStream, event
from radixserve.server.state import Server, caller_of, request_id_of, server_of
from radixserve.server.structured import NATIVE, with_structured

router = APIRouter()
_RENAMED = {  # in sampling_params -> ours
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}


@router.post("/generate")
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Continue `text` or `input_ids` as SGLang does, or `prompt` with the fields beside it."""
    server = server_of(request)
    namespace = caller_of(request).namespace(body.cache_salt)
    given = [name for name in ("prompt", "text", "input_ids") if getattr(body, name) is not None]
    if len(given) != 1:
        raise ApiError(400, "give one of text, input_ids and prompt", param="text")
    (name,) = given
    prompts, is_list = await read_prompts(
        server.runtime,
        getattr(body, name),
        name,
        server.config.max_prompts,
        keep_last=keep_last(server, body, body.max_tokens or SamplingParams().max_tokens),
    )
    params = _params(server, body, namespace, is_native=name != "prompt")
    params = await with_structured(server, body, params)
    if body.stream and (is_list or params.num_samples > 1):
        raise ApiError(400, "stream takes one prompt and n=1", param="stream")
    generation = HttpGeneration(
        server, request, prompts, params, body, namespace, streams=bool(body.stream)
    )
    builder = _ResponseBuilder(body, request_id_of(request), is_native=name != "prompt")
    if body.stream:
        return EventStream(generation, builder.events)
    with generation:
        groups = await generation.groups()
    found = [
        generation.with_hints(builder.one(one, prompts[at]))
        for at, group in enumerate(groups)
        for one in group
    ]
    return answer(found if is_list or params.n > 1 else found[0])


def _params(
    server: Server, body: GenerateRequest, namespace: str, *, is_native: bool
) -> SamplingParams:
    own: dict[str, Any] = {}
    renamed: dict[str, str] = {}
    if is_native:
        beside = [name for name in Sampling.model_fields if getattr(body, name) is not None]
        if beside and beside != ["priority"]:
            raise ApiError(
                400, f"with text or input_ids {beside[0]} goes into sampling_params",
                param=beside[0],
            )  # fmt: skip
        sampling = body.sampling_params or NativeSampling()
        own = {_RENAMED.get(name, name): value for name, value in sampling if name not in NATIVE}
        renamed = {ours: theirs for theirs, ours in _RENAMED.items()}
    elif body.sampling_params is not None:
        raise ApiError(
            400, "with prompt the sampling fields stand beside it", param="sampling_params"
        )
    if body.top_logprobs_num is not None and not body.return_logprob:
        raise ApiError(400, "top_logprobs_num needs return_logprob", param="top_logprobs_num")
    if body.return_logprob:
        own["logprobs"] = body.top_logprobs_num or 0
        renamed["logprobs"] = "top_logprobs_num"
    return read_sampling(body, namespace, server.config.max_n, renamed=renamed, **own)


class _ResponseBuilder:
    """How one request's answer looks."""

    def __init__(self, body: GenerateRequest, request_id: str, *, is_native: bool) -> None:
        self._body = body
        self._id = request_id
        self._is_native = is_native

    def one(self, one: Completion, prompt: IntArray) -> dict[str, Any]:
        usage = one.usage
        if not self._is_native:
            return {
                "text": one.text,
                "token_ids": one.token_ids,
                "finish_reason": one.finish_reason,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "computed_tokens": usage.computed_tokens,
                "completion_tokens": usage.completion_tokens,
                "time_s": one.metrics.total_s,
                "ttft_s": one.metrics.ttft_s,
            }
        meta = self._meta(len(prompt), one.token_ids)
        meta |= {
            "finish_reason": _finish_reason(one),
            "cached_tokens": usage.cached_tokens,
            "e2e_latency": one.metrics.total_s,
        }
        if one.logprobs is not None and self._body.return_logprob:
            meta |= _logprobs(one.token_ids, one.logprobs, one.top_logprobs)
        return {"text": one.text, "output_ids": one.token_ids, "meta_info": meta}

    async def events(self, generation: HttpGeneration) -> AsyncIterator[str]:
        """SGLang's events carry the whole text so far; those of the short protocol what is new."""
        text, ids = "", list[int]()
        async for ((_, chunk),) in generation.chunks():
            if chunk.completion is not None and self._is_native:
                last = self.one(chunk.completion, generation.prompts[0])
                yield event(generation.with_hints(last))
            elif chunk.completion is not None:
                last = self.one(chunk.completion, generation.prompts[0])
                last |= {"text": chunk.text, "token_ids": chunk.token_ids}
                yield event(generation.with_hints(last))
            elif self._is_native:
                text, ids = text + chunk.text, ids + chunk.token_ids
                meta = {**self._meta(len(generation.prompts[0]), ids), "finish_reason": None}
                yield event({"text": text, "output_ids": ids, "meta_info": meta})
            else:
                yield event({"text": chunk.text, "token_ids": chunk.token_ids})

    def _meta(self, num_prompt: int, ids: Sequence[int]) -> dict[str, Any]:
        return {"id": self._id, "prompt_tokens": num_prompt, "completion_tokens": len(ids)}


def _finish_reason(one: Completion) -> dict[str, Any]:
    if one.finish_reason == "length":
        return {"type": "length", "length": len(one.token_ids)}
    return {"type": one.finish_reason}


def _logprobs(
    ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[dict[int, float]] | None
) -> dict[str, Any]:
    """As [log-probability, token id, text or null] each."""
    own = [[value, token_id, None] for value, token_id in zip(logprobs, ids, strict=True)]
    found: dict[str, Any] = {"output_token_logprobs": own}
    if tops is not None:
        found["output_top_logprobs"] = [
            [[value, token_id, None] for token_id, value in top.items()] for top in tops
        ]
    return found
