"""POST /v1/score: how likely the model finds given continuations."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.output import add_usages
from radixserve.server.disconnect import CancelOnDisconnect
from radixserve.server.errors import ApiError, invalid
from radixserve.server.json_response import answer
from radixserve.server.prompts import read_prompts
from radixserve.server.schema import ScoreRequest
from radixserve.server.state import caller_of, server_of
from radixserve.server.usage import usage_body

router = APIRouter()


@router.post("/v1/score")
async def score(request: Request, body: ScoreRequest) -> Response:
    """The log-probability of each of the candidates, texts or token ids, after a prompt.

    The prompt is computed once; the model's own distribution, natural logarithms.
    """
    server = server_of(request)
    server.check_model(body.model)
    namespace = caller_of(request).namespace(body.cache_salt)
    (prompt, *others), _ = await read_prompts(server.runtime, body.prompt, "prompt", 1)
    assert not others
    candidates = body.candidates
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
    server.limits.check(server.runtime.status(), len(candidates), len(prompt))
    try:
        with CancelOnDisconnect(server, request) as watched:
            scores = await server.runtime.ascore(prompt, candidates, namespace=namespace)
    except InvalidRequest as error:
        raise invalid(error, param="candidates") from None
    data: list[dict[str, Any]] = []
    for index, one in enumerate(scores):
        entry = {"index": index, "logprob": one.logprob, "token_logprobs": one.logprobs}
        if body.return_token_ids:
            entry["token_ids"] = one.token_ids
        data.append(entry)
    usage = add_usages([one.usage for one in scores])
    counts = usage_body(usage.prompt_tokens, usage.cached_tokens, 0)
    watched.note_usage(len(scores), counts)
    head = {"object": "list", "model": server.model_name}
    return answer({**head, "data": data, "usage": counts})
