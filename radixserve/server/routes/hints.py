"""POST /v1/cache/hints: retain, pin, demote, prefetch, share."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.hints.hint import Hint
from radixserve.server.gate.json_body import JsonRoute
from radixserve.server.gate.session_table import check_session_id
from radixserve.server.gate.state import AppState, caller_of, server_of
from radixserve.server.gate.tenants import Caller
from radixserve.server.prompt.chat_prompt import read_chat
from radixserve.server.prompt.prompt_input import read_prompts
from radixserve.server.turn.request_hints import (
    answers_body,
    check_count,
    close_demoted,
    read_hint,
)
from radixserve.server.wire.errors import ApiError
from radixserve.server.wire.json_response import answer
from radixserve.server.wire.schema import HintsRequest, PrefixHint

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/cache/hints")
async def hints(request: Request, body: HintsRequest) -> Response:
    """Apply hints in order, and answer each. If one of them is not valid, none is applied.

    They apply to the caller's own part of the cache; an admin may name another `tenant`.
    """
    server, caller = server_of(request), caller_of(request)
    server.check_model(body.model)
    if body.tenant is not None and body.tenant != caller.tenant:
        if not caller.is_admin:
            message = "hints for another tenant need an admin key"
            raise ApiError(403, message, param="tenant", code="admin_only")
        caller = Caller(body.tenant, is_admin=True)
    check_count(body.hints, "hints")
    made = []
    for index, hint in enumerate(body.hints):
        made.append(await _read(server, caller, hint, f"hints[{index}]"))
        await asyncio.sleep(0)  # short prompts are tokenised in the event loop: let others run
    answers = await server.runtime.aapply_hints(made)
    close_demoted(server, made, answers)
    return answer({"object": "list", "data": answers_body(server, answers)})


async def _read(server: AppState, caller: Caller, given: PrefixHint, place: str) -> Hint:
    """Check a hint and read its prompt. `place`: its place in the body, for errors. Raises
    ApiError."""
    namespace = caller.namespace(given.cache_salt)
    hint = read_hint(server, caller, namespace, place, given)
    named = [name for name in ("prompt", "messages", "session_id") if getattr(given, name)]
    if len(named) != 1:
        raise ApiError(400, f"{place}: give one of prompt, messages and session_id", param=place)
    try:
        if named == ["session_id"]:
            check_session_id(given.session_id)
            assert given.session_id is not None
            return replace(hint, session=server.sessions.name(namespace, given.session_id))
        if named == ["messages"]:
            prompt = await read_chat(server, given, given.messages or (), namespace)
            return replace(hint, token_ids=prompt.token_ids)
        prompts, is_list = await read_prompts(server.runtime, given.prompt, "prompt", 1)
    except ApiError as error:
        error.param = place if error.param is None else f"{place}.{error.param}"
        error.message = f"{place}: {error.message}"
        raise
    if is_list:
        raise ApiError(400, f"{place}: prompt must be one prompt", param=f"{place}.prompt")
    return replace(hint, token_ids=prompts[0])
