"""/v1/branches: token sequences that clients open, fork, extend, continue and roll back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.checks import check_int
from radixserve.errors import BranchBusy, InvalidRequest
from radixserve.server.gate.branch_table import OpenBranch
from radixserve.server.gate.disconnect import CancelOnDisconnect
from radixserve.server.gate.json_body import JsonRoute, has_large_body
from radixserve.server.gate.request_log import note_skipped
from radixserve.server.gate.state import AppState, caller_of, namespace_of, request_id_of, server_of
from radixserve.server.prompt.chat_prompt import read_chat
from radixserve.server.prompt.prompt_input import in_thread_if, read_prompts
from radixserve.server.routes.completions import CompletionBuilder, completion_params
from radixserve.server.routes.scores import check_room, read_candidates, scores_answer
from radixserve.server.turn.cache_use import CacheUse
from radixserve.server.turn.http_generation import HttpGeneration
from radixserve.server.turn.request_hints import RequestHints
from radixserve.server.turn.structured_outputs import read_constraint
from radixserve.server.wire.body import Ids, Short
from radixserve.server.wire.errors import ApiError, invalid
from radixserve.server.wire.json_response import answer
from radixserve.server.wire.sampling import check_stream
from radixserve.server.wire.schema import (
    CacheFields,
    CompletionRequest,
    Messages,
    Prompts,
    ResponseFormat,
    SingleSampling,
    StreamOptions,
    StructuredOutputs,
    TemplateFields,
)

router = APIRouter(route_class=JsonRoute)


class BranchRequest(TemplateFields, CacheFields):
    """Where the branch begins: text or token ids, or messages as a chat would render them."""

    model: Short | None = None
    prompt: Prompts = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None


class ForkRequest(CacheFields):
    n: int | None = None


class ExtendRequest(CacheFields):
    tokens: Prompts


class TruncateRequest(CacheFields):
    length: int


class BranchScoreRequest(CacheFields):
    candidates: Prompts
    return_token_ids: bool | None = None


class BranchGenerateRequest(SingleSampling, CacheFields):
    """The fields of completions that apply to a single answer."""

    max_tokens: int | None = None
    logprobs: int | None = None
    logprob_token_ids: Ids | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


@router.post("/v1/branches")
async def create_branch(request: Request, body: BranchRequest) -> Response:
    """Open a branch at the end of a prompt. Nothing is computed yet."""
    server = server_of(request)
    server.check_model(body.model)
    await note_skipped(request, body)
    namespace = namespace_of(request, body)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give one of prompt and messages", param="prompt")
    if body.messages is not None:
        ids = (
            await read_chat(
                server,
                body,
                body.messages,
                namespace,
                add_special_tokens=bool(body.add_special_tokens),
            )
        ).token_ids
    else:
        (ids, *others), _ = await read_prompts(
            server.runtime,
            body.prompt,
            "prompt",
            1,
            add_special_tokens=body.add_special_tokens is not False,
        )
        assert not others
    branch = server.runtime.branch(ids, namespace=namespace)
    (opened,) = server.branches.add([branch])
    return answer(_state(opened))


@router.get("/v1/branches/{branch_id}")
async def show_branch(
    request: Request, branch_id: str, cache_salt: str | None = None, tokens: bool = False
) -> Response:
    """The branch's length, and how much of it is cached; with `tokens`, its token ids and text."""
    opened = _opened_branch(request, branch_id, cache_salt)
    lookup = await asyncio.to_thread(opened.branch.lookup)
    body = _state(opened) | {"cached_tokens": lookup.cached_len, "reason": lookup.reason}
    if tokens:
        ids = opened.branch.tokens
        tokenizer = server_of(request).runtime.tokenizer
        text = (
            None if tokenizer is None else await asyncio.to_thread(tokenizer.decode, ids.tolist())
        )
        body |= {"token_ids": ids.tolist(), "text": text}
    return answer(body)


@router.delete("/v1/branches/{branch_id}")
async def delete_branch(
    request: Request, branch_id: str, cache_salt: str | None = None
) -> Response:
    """Close the branch. K/V that only this branch used is evicted first from now on."""
    opened = _opened_branch(request, branch_id, cache_salt)
    server_of(request).branches.close(opened.branch.namespace, branch_id)
    return answer({"id": branch_id, "object": "branch", "deleted": True})


@router.post("/v1/branches/{branch_id}/fork")
async def fork_branch(request: Request, branch_id: str, body: ForkRequest) -> Response:
    """Open `n` branches at the same position. Nothing is copied or computed."""
    server = server_of(request)
    opened = _opened_branch(request, branch_id, body.cache_salt)
    with _naming("n"):
        count = check_int("n", 1 if body.n is None else body.n, 1, server.config.max_n)
        forks = opened.branch.fork(count)
    data = [_state(fork) for fork in server.branches.add(forks, branch_id)]
    return answer({"object": "list", "data": data})


@router.post("/v1/branches/{branch_id}/extend")
async def extend_branch(request: Request, branch_id: str, body: ExtendRequest) -> Response:
    """Append text or token ids to the branch. Nothing is computed yet."""
    opened = _opened_branch(request, branch_id, body.cache_salt)
    given = body.tokens
    tokens = np.frombuffer(given, np.int64) if isinstance(given, array) else given
    is_large = has_large_body(request)
    return await _moved(request, opened, "tokens", lambda: opened.branch.extend(tokens), is_large)


@router.post("/v1/branches/{branch_id}/truncate")
async def truncate_branch(request: Request, branch_id: str, body: TruncateRequest) -> Response:
    """Roll the branch back to its first `length` tokens."""
    opened = _opened_branch(request, branch_id, body.cache_salt)
    return await _moved(
        request, opened, "length", lambda: opened.branch.truncate(body.length), False
    )


@router.post("/v1/branches/{branch_id}/generate")
async def generate_branch(
    request: Request, branch_id: str, body: BranchGenerateRequest
) -> Response:
    """Continue the branch, as a completion, and append the answer to it."""
    server = server_of(request)
    opened = _opened_branch(request, branch_id, body.cache_salt)
    given = {name: getattr(body, name) for name in body.model_fields_set}
    asked = CompletionRequest.model_construct(**given)
    params, constraint = await in_thread_if(
        has_large_body(request),
        lambda: (
            completion_params(server, asked, opened.branch.namespace, opened.branch.length),
            read_constraint(body.response_format, body.structured_outputs),
        ),
    )
    if constraint is not None:
        structured = await constraint.compile(server, opened.branch.namespace)
        params = replace(params, structured=structured)
    streams = check_stream(body.stream, body.stream_options, params)
    generation = _BranchGeneration(server, request, opened, params, streams=streams)
    name = f"cmpl-{request_id_of(request)}"
    builder = _BranchBuilder(generation, asked, 1, answer_id=name, streams=streams)
    builder.opened = opened
    return await builder.respond()


@router.post("/v1/branches/{branch_id}/score")
async def score_branch(request: Request, branch_id: str, body: BranchScoreRequest) -> Response:
    """The log-probability of each candidate after the branch, which does not change."""
    server = server_of(request)
    opened = _opened_branch(request, branch_id, body.cache_salt)
    candidates = await read_candidates(request, body.candidates)
    check_room(request, candidates, opened.branch.length)
    watched = CancelOnDisconnect(server, request)
    watched.num_requests = len(candidates)
    with _naming("candidates"), watched:
        scores = await opened.branch.ascore(candidates)
    name, with_ids = server.name_of(opened.branch.namespace), bool(body.return_token_ids)
    return await scores_answer(watched, scores, name, with_ids=with_ids)


class _BranchBuilder(CompletionBuilder):
    """Formats a completion with the state of the branch after it."""

    opened: OpenBranch

    def final_members(self) -> dict[str, Any]:
        return {**super().final_members(), "branch": _state(self.opened)}


class _BranchGeneration(HttpGeneration):
    """The generation of a branch's answer. The branch grows by the tokens that are returned."""

    def __init__(
        self, server: AppState, request: Request, opened: OpenBranch, params: Any, *, streams: bool
    ) -> None:
        self._opened = opened
        branch = opened.branch
        super().__init__(
            server,
            request,
            [branch.tokens],
            params,
            CacheUse(branch.namespace, None, False, RequestHints(server, ())),
            streams=streams,
            submit=functools.partial(branch.submit, params, streams=streams),
        )

    def __enter__(self) -> Self:
        super().__enter__()
        self.server.branches.begin(self._opened, self)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.server.branches.finish(self._opened, self)
        super().__exit__(kind, error, trace)


def _opened_branch(request: Request, branch_id: str, cache_salt: str | None) -> OpenBranch:
    """The branch with this id. Raises ApiError 404 if the caller, with this salt, has not opened
    it."""
    namespace = caller_of(request).namespace(cache_salt)
    return server_of(request).branches.find(namespace, branch_id)


async def _moved(
    request: Request, opened: OpenBranch, param: str, move: Callable[[], None], is_large: bool
) -> Response:
    with _naming(param):
        await in_thread_if(is_large, move)
    server_of(request).branches.note_length(opened)
    return answer(_state(opened))


@contextlib.contextmanager
def _naming(param: str) -> Iterator[None]:
    """A context manager: InvalidRequest in the block becomes an ApiError about the field `param`.
    BranchBusy, for a branch that another call is changing, stays as it is and is answered 409."""
    try:
        yield
    except BranchBusy:
        raise
    except InvalidRequest as error:
        raise invalid(error, param=param) from None


def _state(opened: OpenBranch) -> dict[str, Any]:
    """The branch as JSON. `usage` is the sum of its answers and scores."""
    usage = opened.branch.usage
    return {
        "id": opened.id,
        "object": "branch",
        "created": opened.created,
        "parent": opened.parent_id,
        "length": opened.branch.length,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "computed_tokens": usage.computed_tokens,
            "completion_tokens": usage.completion_tokens,
        },
    }
