"""/v1/branches: positions in the tree that clients fork, extend, continue and roll back."""

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
from radixserve.server.gate.branch_table import HeldBranch
from radixserve.server.gate.disconnect import CancelOnDisconnect
from radixserve.server.gate.json_body import JsonRoute, has_large_body
from radixserve.server.gate.request_log import note_skipped
from radixserve.server.gate.state import (
    AppState,
    caller_of,
    request_id_of,
    server_of,
)
from radixserve.server.prompt.chat_prompt import read_chat
from radixserve.server.prompt.prompt_input import in_thread_if, read_prompts
from radixserve.server.routes.completions import CompletionBuilder, completion_params
from radixserve.server.routes.scores import check_room, read_candidates, scores_body
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
    """Text or token ids, or messages as a chat would render them."""

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
    """Fields of completions, for one answer."""

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
    """Open a branch behind a prompt. Nothing is computed yet."""
    server = server_of(request)
    server.check_model(body.model)
    await note_skipped(request, body)
    namespace = caller_of(request).namespace(body.cache_salt)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give one of prompt and messages", param="prompt")
    if body.messages is not None:
        ids = (await read_chat(server, body, body.messages, namespace)).token_ids
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
    (held,) = server.branches.add([branch])
    return answer(_state(held))


@router.get("/v1/branches/{branch_id}")
async def show_branch(
    request: Request, branch_id: str, cache_salt: str | None = None, tokens: bool = False
) -> Response:
    """Its length, and how much of it is cached; with `tokens` its token ids and its text."""
    held = _held(request, branch_id, cache_salt)
    lookup = await asyncio.to_thread(held.branch.lookup)
    body = _state(held) | {"cached_tokens": lookup.cached_len, "reason": lookup.reason}
    if tokens:
        ids = held.branch.tokens
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
    """Release it: what only it holds in the cache is evicted first from now on."""
    held = _held(request, branch_id, cache_salt)
    server_of(request).branches.close(held.branch.namespace, branch_id)
    return answer({"id": branch_id, "object": "branch", "deleted": True})


@router.post("/v1/branches/{branch_id}/fork")
async def fork_branch(request: Request, branch_id: str, body: ForkRequest) -> Response:
    """Open `n` branches at the same position. Nothing is copied or computed."""
    server = server_of(request)
    held = _held(request, branch_id, body.cache_salt)
    with _naming("n"):
        count = check_int("n", 1 if body.n is None else body.n, 1, server.config.max_n)
        forks = held.branch.fork(count)
    data = [_state(fork) for fork in server.branches.add(forks, branch_id)]
    return answer({"object": "list", "data": data})


@router.post("/v1/branches/{branch_id}/extend")
async def extend_branch(request: Request, branch_id: str, body: ExtendRequest) -> Response:
    """Append text or token ids. Nothing is computed yet."""
    held = _held(request, branch_id, body.cache_salt)
    given = body.tokens
    tokens = np.frombuffer(given, np.int64) if isinstance(given, array) else given
    is_large = has_large_body(request)
    return await _moved(request, held, "tokens", lambda: held.branch.extend(tokens), is_large)


@router.post("/v1/branches/{branch_id}/truncate")
async def truncate_branch(request: Request, branch_id: str, body: TruncateRequest) -> Response:
    """Roll back to the first `length` tokens."""
    held = _held(request, branch_id, body.cache_salt)
    return await _moved(request, held, "length", lambda: held.branch.truncate(body.length), False)


@router.post("/v1/branches/{branch_id}/generate")
async def generate_branch(
    request: Request, branch_id: str, body: BranchGenerateRequest
) -> Response:
    """Continue it, as a completion, and move it to the end of the answer."""
    server = server_of(request)
    held = _held(request, branch_id, body.cache_salt)
    given = {name: getattr(body, name) for name in body.model_fields_set}
    asked = CompletionRequest.model_construct(**given)
    params, constraint = await in_thread_if(
        has_large_body(request),
        lambda: (
            completion_params(server, asked, held.branch.namespace),
            read_constraint(body.response_format, body.structured_outputs),
        ),
    )
    if constraint is not None:
        structured = await constraint.compile(server, held.branch.namespace)
        params = replace(params, structured=structured)
    streams = check_stream(body.stream, body.stream_options, params)
    generation = _BranchGeneration(server, request, held, params, streams=streams)
    name = f"cmpl-{request_id_of(request)}"
    builder = _BranchBuilder(generation, asked, 1, answer_id=name, streams=streams)
    builder.held = held
    return await builder.respond()


@router.post("/v1/branches/{branch_id}/score")
async def score_branch(request: Request, branch_id: str, body: BranchScoreRequest) -> Response:
    """The log-probability of each of the candidates after it. The branch does not move."""
    server = server_of(request)
    held = _held(request, branch_id, body.cache_salt)
    candidates = await read_candidates(request, body.candidates)
    check_room(request, candidates, held.branch.length)
    watched = CancelOnDisconnect(server, request)
    watched.num_requests = len(candidates)
    with _naming("candidates"), watched:
        scores = await held.branch.ascore(candidates)
    return answer(scores_body(server, watched, scores, with_ids=bool(body.return_token_ids)))


class _BranchBuilder(CompletionBuilder):
    """Formats a completion with the branch after it."""

    held: HeldBranch

    def final_members(self) -> dict[str, Any]:
        return {**super().final_members(), "branch": _state(self.held)}


class _BranchGeneration(HttpGeneration):
    """A branch's answer: the branch is moved by what was handed out."""

    def __init__(
        self, server: AppState, request: Request, held: HeldBranch, params: Any, *, streams: bool
    ) -> None:
        self._held = held
        branch = held.branch
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
        self.server.branches.begin(self._held, self)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.server.branches.finish(self._held, self)
        super().__exit__(kind, error, trace)


def _held(request: Request, branch_id: str, cache_salt: str | None) -> HeldBranch:
    """Raises ApiError 404 for a branch of another tenant or under another salt."""
    namespace = caller_of(request).namespace(cache_salt)
    return server_of(request).branches.find(namespace, branch_id)


async def _moved(
    request: Request, held: HeldBranch, param: str, move: Callable[[], None], is_large: bool
) -> Response:
    with _naming(param):
        await in_thread_if(is_large, move)
    server_of(request).branches.note_length(held)
    return answer(_state(held))


@contextlib.contextmanager
def _naming(param: str) -> Iterator[None]:
    """InvalidRequest in the block is the error of a field; 409 where another call moves the
    branch."""
    try:
        yield
    except BranchBusy:
        raise
    except InvalidRequest as error:
        raise invalid(error, param=param) from None


def _state(held: HeldBranch) -> dict[str, Any]:
    """`usage`: the sum of its answers and scores."""
    usage = held.branch.usage
    return {
        "id": held.id,
        "object": "branch",
        "created": held.created,
        "parent": held.parent_id,
        "length": held.branch.length,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "computed_tokens": usage.computed_tokens,
            "completion_tokens": usage.completion_tokens,
        },
    }
