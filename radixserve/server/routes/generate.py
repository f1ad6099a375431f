"""POST /generate: SGLang's native protocol, and the short protocol of the tutorials."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.arrays import IntArray
from radixserve.completion import Completion
from radixserve.request import SamplingParams
from radixserve.server.gate.json_body import JsonRoute, has_large_body
from radixserve.server.gate.request_log import note_skipped
from radixserve.server.gate.state import AppState, request_id_of, server_of
from radixserve.server.prompt.prompt_input import in_thread_if, read_prompts
from radixserve.server.turn.answer_builder import AnswerBuilder
from radixserve.server.turn.cache_use import CacheUse
from radixserve.server.turn.http_generation import HttpGeneration
from radixserve.server.turn.structured_outputs import NATIVE, read_constraint
from radixserve.server.wire.errors import ApiError
from radixserve.server.wire.json_response import event
from radixserve.server.wire.sampling import keep_last, read_sampling
from radixserve.server.wire.schema import GenerateRequest, NativeSampling, Sampling
from radixserve.server.wire.usage import Group, epochs_body, loaded_field

router = APIRouter(route_class=JsonRoute)
_TOP_LEVEL = {"priority", "logprob_start_len"}  # stand beside sampling_params
_RENAMED = {  # names of SamplingParams by SGLang's names in sampling_params
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}


@router.post("/generate")
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Continue `text` or `input_ids` as SGLang does, or `prompt` with the fields beside it."""
    server = server_of(request)
    await note_skipped(request, body)
    cache = CacheUse.read(request, body)
    given = [name for name in ("prompt", "text", "input_ids") if getattr(body, name) is not None]
    if len(given) != 1:
        raise ApiError(400, "give one of text, input_ids and prompt", param="text")
    (name,) = given
    prompts, is_list = await read_prompts(
        server.runtime,
        getattr(body, name),
        name,
        server.config.max_prompts,
        truncation_side=body.truncation_side,
        keep_last=keep_last(
            body.truncate_prompt_tokens,
            server.runtime.max_seq_len,
            body.max_tokens or SamplingParams().max_tokens,
        ),
    )
    params, constraint = await in_thread_if(
        has_large_body(request),
        lambda: (
            _params(server, body, cache.namespace, is_native=name != "prompt"),
            read_constraint(None, None, body.sampling_params),
        ),
    )
    if constraint is not None:
        params = replace(params, structured=await constraint.compile(server, cache.namespace))
    if body.stream and (is_list or params.num_samples > 1):
        raise ApiError(400, "stream takes one prompt and n=1", param="stream")
    generation = HttpGeneration(server, request, prompts, params, cache, streams=bool(body.stream))
    builder = _GenerateBuilder(
        generation,
        body,
        request_id_of(request),
        is_list=is_list or params.n > 1,
        is_native=name != "prompt",
    )
    return await builder.respond()


def _params(
    server: AppState, body: GenerateRequest, namespace: str, *, is_native: bool
) -> SamplingParams:
    own: dict[str, Any] = {}
    renamed: dict[str, str] = {}
    if is_native:
        names = Sampling.model_fields.keys() - _TOP_LEVEL
        beside = [name for name in names if getattr(body, name) is not None]
        if beside:
            message = f"with text or input_ids {beside[0]} goes into sampling_params"
            raise ApiError(400, message, param=beside[0])
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
    own |= _prompt_logprobs(body)
    return read_sampling(server.runtime, body, namespace, server.config, renamed=renamed, **own)


def _prompt_logprobs(body: GenerateRequest) -> dict[str, int | None]:
    """The fields of SamplingParams for log-probabilities of the prompt. SGLang has them for the
    tokens after logprob_start_len, as many best ones as for the answer's; -1: for none."""
    start = body.logprob_start_len
    if start is None or start == -1:
        return {"logprob_start_len": None}
    if not body.return_logprob:
        raise ApiError(400, "logprob_start_len needs return_logprob", param="logprob_start_len")
    return {"logprob_start_len": start, "prompt_logprobs": body.top_logprobs_num or 0}


class _GenerateBuilder(AnswerBuilder):
    """Formats SGLang's answers, and those of the short protocol."""

    def __init__(
        self,
        generation: HttpGeneration,
        body: GenerateRequest,
        request_id: str,
        *,
        is_list: bool,
        is_native: bool,
    ) -> None:
        super().__init__(generation, streams=bool(body.stream))
        self._request = body
        self._id = request_id
        self._is_list = is_list
        self._is_native = is_native

    async def full_body(self) -> Callable[[], Any]:
        with self.generation as generation:
            groups = await generation.groups()
        return lambda: self._whole(groups)

    def _whole(self, groups: Sequence[Group]) -> Any:
        generation = self.generation
        bodies = [
            generation.with_hints(self._body(completion, prompt))
            for prompt, group in zip(generation.prompts, groups, strict=True)
            for completion in group
        ]
        return bodies if self._is_list else bodies[0]

    def _body(self, completion: Completion, prompt: IntArray) -> dict[str, Any]:
        usage = completion.usage
        if not self._is_native:
            return {
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                **loaded_field(usage.loaded_tokens),
                "computed_tokens": usage.computed_tokens,
                "completion_tokens": usage.completion_tokens,
                "time_s": completion.metrics.total_s,
                "ttft_s": completion.metrics.ttft_s,
            }
        meta = self._meta(len(prompt), completion.token_ids)
        meta |= {
            "finish_reason": _finish_reason(completion),
            "cached_tokens": usage.cached_tokens,
            **loaded_field(usage.loaded_tokens),
            "e2e_latency": completion.metrics.total_s,
            "weight_epochs": epochs_body(completion),
        }
        if completion.logprobs is not None and self._request.return_logprob:
            meta |= _logprobs(completion.token_ids, completion.logprobs, completion.top_logprobs)
            if self._request.logprob_start_len is not None:
                meta |= _input_logprobs(prompt, completion, self._request.logprob_start_len)
        return {"text": completion.text, "output_ids": completion.token_ids, "meta_info": meta}

    async def events(self) -> AsyncIterator[str]:
        """SGLang's events contain the whole text so far; the short protocol's only the new text."""
        generation = self.generation
        text, ids = "", list[int]()
        async for ((_, chunk),) in generation.chunks():
            if chunk.completion is not None and self._is_native:
                last = self._body(chunk.completion, generation.prompts[0])
                yield event(generation.with_hints(last))
            elif chunk.completion is not None:
                last = self._body(chunk.completion, generation.prompts[0])
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


def _finish_reason(completion: Completion) -> dict[str, Any]:
    if completion.finish_reason == "length":
        return {"type": "length", "length": len(completion.token_ids)}
    return {"type": completion.finish_reason}


def _logprobs(
    ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[dict[int, float]] | None
) -> dict[str, Any]:
    """SGLang's members of `meta_info`, with [log-probability, token id, null] for each token."""
    own = [[value, token_id, None] for value, token_id in zip(logprobs, ids, strict=True)]
    fields: dict[str, Any] = {"output_token_logprobs": own}
    if tops is not None:
        fields["output_top_logprobs"] = [
            [[value, token_id, None] for token_id, value in top.items()] for top in tops
        ]
    return fields


def _input_logprobs(prompt: IntArray, completion: Completion, start: int) -> dict[str, Any]:
    """Those of the prompt's tokens from position `start` on; the first one has none."""
    if completion.prompt_logprobs is None or start < 0:
        return {}
    own, ids = completion.prompt_logprobs[start:], prompt[start:].tolist()
    fields: dict[str, Any] = {
        "input_token_logprobs": [
            [value, token_id, None] for value, token_id in zip(own, ids, strict=True)
        ]
    }
    if completion.prompt_top_logprobs is not None:
        fields["input_top_logprobs"] = [
            None if top is None else [[value, token_id, None] for token_id, value in top.items()]
            for top in completion.prompt_top_logprobs[start:]
        ]
    return fields
