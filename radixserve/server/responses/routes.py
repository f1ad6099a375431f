"""POST /v1/responses, and what is stored of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.output import Completion
from radixserve.server.answer_parts import Part, parts_of, reasoning_of
from radixserve.server.chat_turn import ChatTurn
from radixserve.server.errors import ApiError
from radixserve.server.http_generation import HttpGeneration
from radixserve.server.items import errors_in_terms
from radixserve.server.json_response import answer
from radixserve.server.reasoning_tokens import count_reasoning
from radixserve.server.rendering import tokenizer_of
from radixserve.server.responses.builder import ResponseBuilder, said
from radixserve.server.responses.schema import ResponseRequest
from radixserve.server.responses.store import StoredResponse, next_response
from radixserve.server.responses.translate import (
    chat_fields,
    check_calls,
    read_input,
    shown_items,
)
from radixserve.server.schema import ChatRequest
from radixserve.server.sse import EventStream
from radixserve.server.state import caller_of, request_id_of, server_of

router = APIRouter()
_MOST_ITEMS = 100
_TERMS = [
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"max_tokens\b", "max_output_tokens"),
    (r"messages\b", "input"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"tool_choice\.function", "tool_choice"),
]


@router.post("/v1/responses")
async def create_response(request: Request, body: ResponseRequest) -> Response:
    """Answer an input, or go on from an earlier response."""
    server = server_of(request)
    server.check_model(body.model)
    items, new = read_input(body.input)
    known = _previous(request, body)
    messages = new if known is None else [*known.messages, *new]
    check_calls(messages[: -len(new)], items)
    with errors_in_terms(_TERMS):
        chat = ChatRequest.model_validate(chat_fields(body, messages))
        turn = await ChatTurn.start(server, request, chat)
    stores = body.store is not False and server.responses.keeps
    builder = ResponseBuilder(
        request_id_of(request), server.model_name, body, turn.params, stores=stores
    )
    tokenizer = tokenizer_of(server.runtime)

    def finish(parts: Sequence[Part], one: Completion) -> dict[str, Any]:
        num_reasoning = count_reasoning(tokenizer, reasoning_of(parts), one)
        response = builder.response(parts, one, num_reasoning)
        if stores:
            caller = caller_of(request)
            namespace = caller.namespace(body.cache_salt)
            inputs = shown_items(items, builder.response_id)
            stored = next_response(known, namespace, response, inputs, [*new, said(parts)])
            server.responses.put(caller.tenant, stored)
        return response

    async def events(_generation: HttpGeneration) -> AsyncIterator[str]:
        text = builder.begin()
        async for batch in turn.deltas():
            for _, delta, chunk in batch:
                text += builder.more(delta)
                if chunk.completion is not None:
                    ending, parts = builder.end_parts(chunk.completion)
                    text += ending + builder.end(finish(parts, chunk.completion))
            yield text
            text = ""

    if turn.streams:
        return EventStream(turn.generation, events, done="", failed=builder.failed)
    ((parsed, one),) = await turn.answers()
    return answer(finish(parts_of(parsed), one))


@router.get("/v1/responses/{response_id}")
async def show_response(
    request: Request, response_id: str, cache_salt: str | None = None
) -> Response:
    """A response that is stored."""
    _check_query(request, "cache_salt")
    return answer(_stored(request, response_id, cache_salt).response)


@router.delete("/v1/responses/{response_id}")
async def delete_response(
    request: Request, response_id: str, cache_salt: str | None = None
) -> Response:
    """Forget it. Responses that go on from it keep what was said."""
    _check_query(request, "cache_salt")
    _stored(request, response_id, cache_salt)
    caller = caller_of(request)
    server_of(request).responses.delete(caller.tenant, caller.namespace(cache_salt), response_id)
    return answer({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    request: Request,
    response_id: str,
    after: str | None = None,
    limit: int = 20,
    order: Literal["asc", "desc"] = "desc",
    cache_salt: str | None = None,
) -> Response:
    """The items of its own input."""
    _check_query(request, "after", "limit", "order", "cache_salt")
    if not 1 <= limit <= _MOST_ITEMS:
        raise ApiError(400, f"limit must be 1 to {_MOST_ITEMS}, got {limit}", param="limit")
    items = _stored(request, response_id, cache_salt).input_items
    found = items if order == "asc" else items[::-1]
    if after is not None:
        places = [at for at, item in enumerate(found) if item["id"] == after]
        if not places:
            raise ApiError(400, f"after {after!r} is no item of this input", param="after")
        found = found[places[0] + 1 :]
    page = found[:limit]
    ends = {
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }
    has_more = len(page) < len(found)
    return answer({"object": "list", "data": page, **ends, "has_more": has_more})


def _previous(request: Request, body: ResponseRequest) -> StoredResponse | None:
    name = body.previous_response_id
    if name is None:
        return None
    caller = caller_of(request)
    store = server_of(request).responses
    found = store.find(caller.tenant, caller.namespace(body.cache_salt), name)
    if found is None:
        raise ApiError(
            400,
            f"previous_response_id {name!r} is not stored here, or not any more: send its items",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found


def _stored(request: Request, response_id: str, cache_salt: str | None) -> StoredResponse:
    caller = caller_of(request)
    store = server_of(request).responses
    found = store.find(caller.tenant, caller.namespace(cache_salt), response_id)
    if found is None:
        raise ApiError(404, f"no response {response_id!r} is stored here", param="response_id")
    return found


def _check_query(request: Request, *known: str) -> None:
    for name in request.query_params:
        if name not in known:
            raise ApiError(
                400, f"{name} is not supported by this server", param=name, code="unsupported_field"
            )
