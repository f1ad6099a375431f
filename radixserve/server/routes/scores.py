"""POST /v1/score: the log-probabilities of given continuations of a prompt."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.checks import shown
from radixserve.completion import Score
from radixserve.errors import InvalidRequest
from radixserve.output import add_usages
from radixserve.server.gate.disconnect import CancelOnDisconnect
from radixserve.server.gate.json_body import JsonRoute
from radixserve.server.gate.state import AppState, caller_of, namespace_of, server_of
from radixserve.server.prompt.prompt_input import are_long, in_thread_if, read_prompts
from radixserve.server.prompt.rendering import tokenizer_of
from radixserve.server.wire.errors import ApiError, invalid
from radixserve.server.wire.json_response import answer_of
from radixserve.server.wire.schema import ScoreRequest
from radixserve.server.wire.usage import usage_body

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/score")
async def score(request: Request, body: ScoreRequest) -> Response:
    """The natural log-probability of each candidate, a text or token ids, after a prompt, by the
    model's distribution at temperature 1. The prompt is computed once.
    """
    server = server_of(request)
    server.check_model(body.model)
    namespace = namespace_of(request, body)
    (prompt, *others), _ = await read_prompts(server.runtime, body.prompt, "prompt", 1)
    assert not others
    ids = await read_candidates(request, body.candidates)
    check_room(request, ids, len(prompt))
    watched = CancelOnDisconnect(server, request)
    watched.num_requests = len(ids)
    try:
        with watched:
            scores = await server.runtime.ascore(prompt, ids, namespace=namespace)
    except InvalidRequest as error:
        raise invalid(error, param="candidates") from None
    name, with_ids = server.name_of(namespace), bool(body.return_token_ids)
    return await scores_answer(watched, scores, name, with_ids=with_ids)


async def read_candidates(request: Request, given: object) -> list[Any]:
    """The candidates as token ids: texts are tokenised, lists of ids are returned as they are, for
    `ascore` to check. Raises ApiError."""
    server = server_of(request)
    candidates = _check_candidates(server, given)

    def read(candidate: Any) -> Any:
        if isinstance(candidate, str):
            server.runtime.check_length(candidate)
            return tokenizer_of(server.runtime).encode_more(candidate)
        return np.frombuffer(candidate, np.int64) if isinstance(candidate, array) else candidate

    try:
        return await in_thread_if(are_long(candidates), lambda: list(map(read, candidates)))
    except InvalidRequest as error:
        raise invalid(error, param="candidates") from None


def check_room(request: Request, candidates: Sequence[Any], num_tokens: int) -> None:
    """Raise ApiError 429 if the queue does not have room for a request for each candidate.
    `num_tokens`: tokens before the candidates."""
    server, tenant = server_of(request), caller_of(request).tenant
    num_tokens += sum(len(ids) for ids in candidates if isinstance(ids, list | np.ndarray))
    server.check_room(tenant, len(candidates), num_tokens)


def _check_candidates(server: AppState, candidates: object) -> list[Any]:
    """The candidates, if they are a list that is not too long. Raises ApiError."""
    if not isinstance(candidates, list) or not candidates:
        raise ApiError(
            400,
            f"candidates must be a list of texts or lists of token ids, got {shown(candidates)}",
            param="candidates",
        )
    limit = server.config.max_prompts
    if len(candidates) > limit:
        raise ApiError(
            400,
            f"candidates has {len(candidates)} items; at most {limit} are allowed",
            param="candidates",
        )
    return candidates


async def scores_answer(
    watched: CancelOnDisconnect, scores: Sequence[Score], model: str, *, with_ids: bool
) -> Response:
    """The response. Counts its usage for the tenant. `model`: its name. `with_ids`: with the
    candidates' ids."""
    usage = add_usages([candidate_score.usage for candidate_score in scores])
    counts = usage_body(usage.prompt_tokens, usage.cached_tokens, 0, usage.loaded_tokens)
    watched.note_usage(len(scores), counts)

    def body() -> dict[str, Any]:
        data = [_entry(*indexed, with_ids=with_ids) for indexed in enumerate(scores)]
        return {"object": "list", "model": model, "data": data, "usage": counts}

    return await answer_of(body, sum(len(candidate_score.logprobs) for candidate_score in scores))


def _entry(index: int, score: Score, *, with_ids: bool) -> dict[str, Any]:
    entry = {"index": index, "logprob": score.logprob, "token_logprobs": score.logprobs}
    return {**entry, "token_ids": score.token_ids} if with_ids else entry
