"""POST /v1/responses, and the routes of stored responses."""

from __future__ import annotations

import json
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.server.gate.json_body import JsonRoute, has_large_body
from radixserve.server.gate.request_log import note_skipped
from radixserve.server.gate.response_store import StoredResponse, next_response
from radixserve.server.gate.state import caller_of, request_id_of, server_of
from radixserve.server.prompt.prompt_input import in_thread_if
from radixserve.server.routes.responses.builder import ResponseBuilder
from radixserve.server.routes.responses.schema import ResponseRequest
from radixserve.server.routes.responses.translate import (
    check_calls,
    items_of,
    listed_items,
    messages_of,
    turn_request,
)
from radixserve.server.turn.cache_use import CacheUse
from radixserve.server.turn.chat_turn import ChatTurn, TurnRequest
from radixserve.server.wire.cache_fields import retain_hints
from radixserve.server.wire.errors import ApiError
from radixserve.server.wire.json_response import answer, answer_json, dump

router = APIRouter(route_class=JsonRoute)
_MOST_ITEMS = 100


@router.post("/v1/responses")
async def create_response(request: Request, body: ResponseRequest) -> Response:
    """Answer an input, which may continue an earlier response."""
    server = server_of(request)
    server.check_model(body.model)
    await note_skipped(request, body)
    items = items_of(body)
    known = _previous(request, body)

    may_store = body.store is not False and server.responses.keeps

    def read() -> tuple[tuple[str, ...], list[dict[str, Any]], TurnRequest]:
        new = messages_of(items)
        messages = new if known is None else [*known.messages, *new]
        check_calls(messages[: -len(new)], items)
        hints = retain_hints(
            body.prompt_cache_options, body.prompt_cache_retention, body.breakpoints()
        )
        cache = CacheUse.read(request, body, hints)
        inputs = tuple(map(dump, listed_items(items))) if may_store else ()
        return inputs, new, turn_request(server, body, messages, cache)

    inputs, new, asked = await in_thread_if(has_large_body(request), read)
    turn = await ChatTurn.start(server, request, asked)
    stores = may_store and not turn.prewarms
    body_bytes = request.scope["radixserve.body_bytes"]

    def keep(response: dict[str, Any], message: dict[str, Any]) -> None:
        caller = caller_of(request)
        namespace = caller.namespace(body.cache_salt)
        stored = next_response(known, namespace, response, inputs, [*new, message], body_bytes)
        server.responses.put(caller.tenant, stored)

    builder = ResponseBuilder(turn, request_id_of(request), body, keep if stores else None)
    return await builder.respond()


@router.get("/v1/responses/{response_id}")
async def show_response(
    request: Request, response_id: str, cache_salt: str | None = None
) -> Response:
    """A stored response."""
    _check_query(request, "cache_salt")
    return answer_json(_stored(request, response_id, cache_salt).response)


@router.delete("/v1/responses/{response_id}")
async def delete_response(
    request: Request, response_id: str, cache_salt: str | None = None
) -> Response:
    """Delete a stored response. Responses that continue it keep its messages."""
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
    """The items of a stored response's own input."""
    _check_query(request, "after", "limit", "order", "cache_salt")
    if not 1 <= limit <= _MOST_ITEMS:
        raise ApiError(400, f"limit must be 1 to {_MOST_ITEMS}, got {limit}", param="limit")
    items = _stored(request, response_id, cache_salt).input_items
    ordered = [(f"{response_id}_{index}", item) for index, item in enumerate(items)]
    if order == "desc":
        ordered.reverse()
    if after is not None:
        ids = [item_id for item_id, _ in ordered]
        if after not in ids:
            raise ApiError(400, f"after {after!r} is not an item of this input", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    page = [{**json.loads(item), "id": item_id} for item_id, item in ordered[:limit]]
    ends = {
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }
    has_more = len(page) < len(ordered)
    return answer({"object": "list", "data": page, **ends, "has_more": has_more})


def _previous(request: Request, body: ResponseRequest) -> StoredResponse | None:
    """The response that the request continues; None without one. Raises ApiError 400."""
    name = body.previous_response_id
    if name is None:
        return None
    caller = caller_of(request)
    store = server_of(request).responses
    stored = store.find(caller.tenant, caller.namespace(body.cache_salt), name)
    if stored is None:
        raise ApiError(
            400,
            f"previous_response_id {name!r} is not stored here, or no longer: send its items",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return stored


def _stored(request: Request, response_id: str, cache_salt: str | None) -> StoredResponse:
    """The caller's stored response. Raises ApiError 404."""
    caller = caller_of(request)
    store = server_of(request).responses
    stored = store.find(caller.tenant, caller.namespace(cache_salt), response_id)
    if stored is None:
        raise ApiError(404, f"no response {response_id!r} is stored here", param="response_id")
    return stored


def _check_query(request: Request, *known: str) -> None:
    """Raise ApiError 400 for a query parameter that is not known."""
    for name in request.query_params:
        if name not in known:
            raise ApiError(
                400, f"{name} is not supported by this server", param=name, code="unsupported_field"
            )
