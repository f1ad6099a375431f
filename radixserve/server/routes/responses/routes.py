"""POST /v1/responses, and the routes of stored responses."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.server.gate.background_responses import BackgroundResponse
from radixserve.server.gate.json_body import JsonRoute, has_large_body
from radixserve.server.gate.request_log import log_request, note, note_skipped
from radixserve.server.gate.response_store import StoredResponse, next_response
from radixserve.server.gate.state import AppState, caller_of, request_id_of, server_of
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
from radixserve.server.wire.errors import ApiError, wrong_field
from radixserve.server.wire.json_response import answer, answer_json, dump

router = APIRouter(route_class=JsonRoute)
_MOST_ITEMS = 100


@router.post("/v1/responses")
async def create_response(request: Request, body: ResponseRequest) -> Response:
    """Answer an input, which may continue an earlier response. With `background` the answer has
    only the state of the response."""
    server = server_of(request)
    server.check_model(body.model)
    _check_background(server, body)
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

    def record(response: dict[str, Any], *answer: dict[str, Any]) -> StoredResponse:
        namespace = caller_of(request).namespace(body.cache_salt)
        return next_response(known, namespace, response, inputs, [*new, *answer], body_bytes)

    def keep(response: dict[str, Any], message: dict[str, Any]) -> bool:
        is_kept = server.responses.put(caller_of(request).tenant, record(response, message))
        if body.background and not is_kept:
            raise ApiError(500, "the response is too large to be stored (max_response_bytes)")
        return is_kept

    builder = ResponseBuilder(turn, request_id_of(request), body, keep if stores else None)
    if not body.background:
        return await builder.respond()
    queued = builder.unfinished("queued")
    await _start_in_background(request, builder, record(queued))
    return answer(queued)


def _check_background(server: AppState, body: ResponseRequest) -> None:
    """Raise ApiError 400 for a response that cannot be generated in the background."""
    if not body.background:
        return
    problem = None
    if body.store is False:
        problem = "can only be used when `store` is true"
    elif not server.responses.keeps:
        problem = "needs stored responses, and this server stores none (max_responses)"
    elif body.stream:
        problem = "cannot be streamed by this server: leave out stream, and retrieve the response"
    elif body.prompt_cache_options is not None and body.prompt_cache_options.prewarm:
        problem = "cannot be used with prewarm, which stores nothing"
    if problem is not None:
        raise wrong_field("background", problem)


async def _start_in_background(
    request: Request, builder: ResponseBuilder, queued: StoredResponse
) -> None:
    """Generate a response without its client. A second line of the log tells its end. Raises
    ApiError."""
    server, started = server_of(request), time.perf_counter()

    def report(status: str) -> None:
        note(request.scope, background=status)
        if server.config.log_requests:
            log_request(request.scope, 200, time.perf_counter() - started)

    response = BackgroundResponse(
        caller_of(request).tenant, queued, builder.generation, builder.unfinished, report
    )
    await server.background.start(response, builder.full_body)
    note(request.scope, background="queued")


@router.get("/v1/responses/{response_id}")
async def show_response(
    request: Request,
    response_id: str,
    cache_salt: str | None = None,
    stream: bool = False,
) -> Response:
    """A stored response, or the state of one that is being generated in the background."""
    _check_query(request, "cache_salt", "stream")
    if stream:
        message = "stream is not supported by this server for stored responses"
        raise ApiError(400, message, param="stream", code="unsupported_field")
    return answer_json(_stored(request, response_id, cache_salt).response)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(
    request: Request, response_id: str, cache_salt: str | None = None
) -> Response:
    """Cancel a response that is being generated in the background. One that has ended stays as it
    is."""
    _check_query(request, "cache_salt")
    if not _stored(request, response_id, cache_salt).is_background:
        message = "Cannot cancel a synchronous response. It was not created with background: true"
        raise ApiError(400, message, param="response_id")
    await _end_in_background(request, response_id, cache_salt)
    return answer_json(_stored(request, response_id, cache_salt).response)


@router.delete("/v1/responses/{response_id}")
async def delete_response(
    request: Request, response_id: str, cache_salt: str | None = None
) -> Response:
    """Delete a stored response, and cancel it if it is being generated. Responses that continue it
    keep its messages."""
    _check_query(request, "cache_salt")
    _stored(request, response_id, cache_salt)
    await _end_in_background(request, response_id, cache_salt)
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
    stored = _find(request, name, body.cache_salt)
    if stored is None:
        raise ApiError(
            400,
            f"previous_response_id {name!r} is not stored here, or no longer: send its items",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if not stored.is_answered:
        problem = f"{name!r} is {stored.status}: it has no answer to continue"
        raise wrong_field("previous_response_id", problem)
    return stored


def _stored(request: Request, response_id: str, cache_salt: str | None) -> StoredResponse:
    """The caller's response, stored or running in the background. Raises ApiError 404."""
    stored = _find(request, response_id, cache_salt)
    if stored is None:
        raise ApiError(404, f"no response {response_id!r} is stored here", param="response_id")
    return stored


def _find(request: Request, response_id: str, cache_salt: str | None) -> StoredResponse | None:
    server, caller = server_of(request), caller_of(request)
    place = (caller.tenant, caller.namespace(cache_salt), response_id)
    running = server.background.find(*place)
    return server.responses.find(*place) if running is None else running.stored


async def _end_in_background(request: Request, response_id: str, cache_salt: str | None) -> None:
    """Cancel the caller's response if it is being generated in the background."""
    caller = caller_of(request)
    running = server_of(request).background.find(
        caller.tenant, caller.namespace(cache_salt), response_id
    )
    if running is not None:
        await running.cancel()


def _check_query(request: Request, *known: str) -> None:
    """Raise ApiError 400 for a query parameter that is not known."""
    for name in request.query_params:
        if name not in known:
            raise ApiError(
                400, f"{name} is not supported by this server", param=name, code="unsupported_field"
            )
