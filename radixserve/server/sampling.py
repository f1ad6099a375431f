"""SamplingParams from a request's fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.request import SamplingParams
from radixserve.server.errors import ApiError, invalid
from radixserve.server.schema import GenerationFields, Sampling
from radixserve.server.session_table import check_session_id
from radixserve.server.state import Server


def read_sampling(
    body: BaseModel, namespace: str, max_n: int, *, renamed: dict[str, str], **own: Any
) -> SamplingParams:
    """`own` fields come first, then those of the body that are not null.

    `renamed`: names that errors have to call otherwise, {ours: theirs}. Raises ApiError.
    """
    fields = {name: getattr(body, name, None) for name in Sampling.model_fields}
    fields |= own
    given = {name: value for name, value in fields.items() if value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = _by_id(given["logit_bias"])
    try:
        params = SamplingParams(**given, namespace=namespace)
    except InvalidRequest as error:
        found = invalid(error)
        theirs = renamed.get(found.param or "")
        if theirs is not None:
            found = ApiError(400, found.message.replace(str(found.param), theirs, 1), param=theirs)
        raise found from None
    if params.num_samples > max_n:
        name = "best_of" if params.num_samples > params.n else "n"
        raise ApiError(
            400, f"{name} must be at most {max_n} here, got {params.num_samples}", param=name
        )
    # The prompts were cut when they were read.
    return (
        params
        if params.truncate_prompt_tokens is None
        else replace(params, truncate_prompt_tokens=None)
    )


def keep_last(server: Server, body: Any, max_tokens: int) -> int | None:
    """How many of a prompt's last tokens truncate_prompt_tokens leaves; None: all of them."""
    count: int | None = body.truncate_prompt_tokens
    if count == -1:
        return max(1, server.runtime.max_seq_len - max_tokens)
    return count if count is not None and count > 0 else None  # others are refused later


def _by_id(bias: dict[str, float]) -> dict[int, float]:
    """JSON's keys are texts."""
    try:
        return {int(name): value for name, value in bias.items()}
    except ValueError:
        message = f"logit_bias must be a map from token ids to numbers, got {shown(bias)}"
        raise ApiError(400, message, param="logit_bias") from None


def check_stream(body: GenerationFields, params: SamplingParams) -> bool:
    """Whether an answer is to be streamed. Raises ApiError for what cannot be."""
    if not body.stream:
        if body.stream_options is not None:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        return False
    if params.num_samples > params.n:
        raise ApiError(
            400, "best_of cannot be streamed: the best are known at the end", param="best_of"
        )
    if params.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs cannot be streamed", param="prompt_logprobs")
    return True


def session_of(server: Server, body: Any, namespace: str) -> str:
    """The cache session that a body names, opened or renewed; "" without one. Raises ApiError."""
    check_session_id(body.session_id)
    if body.session_id is None:
        if body.supersede:
            raise ApiError(400, "supersede needs a session_id", param="supersede")
        return ""
    return server.sessions.use(namespace, body.session_id)
