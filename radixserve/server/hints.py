"""POST /v1/cache/hints, and `cache_hints` of requests: what is to become of cached K/V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.arrays import IntArray
from radixserve.errors import InvalidRequest
from radixserve.hint import Hint, HintAnswer, check_hint, join_answers
from radixserve.server.chat_prompt import read_chat
from radixserve.server.errors import ApiError, invalid
from radixserve.server.json_response import answer
from radixserve.server.prompts import read_prompts
from radixserve.server.schema import CacheHint, HintsRequest, PrefixHint
from radixserve.server.session_table import check_session_id
from radixserve.server.state import Server, caller_of, server_of
from radixserve.server.tenants import Caller

router = APIRouter()
MAX_HINTS = 64  # of one request
_BUDGET_SHARE = 0.25  # of the pool's tokens, by default
_AT_ONCE = 16  # hints between two steps of the engine


@router.post("/v1/cache/hints")
async def hints(request: Request, body: HintsRequest) -> Response:
    """Carry out hints in order, all or, where one is not valid, none; an answer each.

    They reach the caller's own part of the cache; an admin names another one with `tenant`.
    """
    server, caller = server_of(request), caller_of(request)
    server.check_model(body.model)
    if body.tenant is not None and body.tenant != caller.tenant:
        if not caller.is_admin:
            message = "hints for another tenant need an admin key"
            raise ApiError(403, message, param="tenant", code="admin_only")
        caller = Caller(body.tenant, is_admin=True)
    check_count(body.hints, "hints")
    made = [await _read(server, caller, one, f"hints[{at}]") for at, one in enumerate(body.hints)]
    answers = await server.runtime.aapply_hints(made)
    for one, given, found in zip(made, body.hints, answers, strict=True):
        if one.verb == "demote" and given.session_id is not None and found.answer == "accepted":
            server.sessions.close(one.namespace, given.session_id)
    return answer({"object": "list", "data": answers_body(server, answers)})


async def _read(server: Server, caller: Caller, given: PrefixHint, place: str) -> Hint:
    """The hint, checked. `place`: where it stands in the body, for errors."""
    namespace = caller.namespace(given.cache_salt)
    hint = _hint(server, caller, given, namespace, place)
    named = [name for name in ("prompt", "messages", "session_id") if getattr(given, name)]
    if len(named) != 1:
        raise ApiError(400, f"{place}: give one of prompt, messages and session_id", param=place)
    try:
        if named == ["session_id"]:
            check_session_id(given.session_id)
            assert given.session_id is not None
            return replace(hint, session=server.sessions.name(namespace, given.session_id))
        if named == ["messages"]:
            prompt = await read_chat(server, given, given.messages, namespace)
            return replace(hint, token_ids=prompt.token_ids)
        prompts, is_list = await read_prompts(server.runtime, given.prompt, "prompt", 1)
    except ApiError as error:
        param = place if error.param is None else f"{place}.{error.param}"
        raise ApiError(error.status, f"{place}: {error.message}", param=param) from None
    if is_list:
        raise ApiError(400, f"{place}: prompt must be one prompt", param=f"{place}.prompt")
    return replace(hint, token_ids=prompts[0])


def _hint(server: Server, caller: Caller, given: CacheHint, namespace: str, place: str) -> Hint:
    """A hint without its prefix."""
    try:
        check_hint(given.verb, given.seconds, given.max_tokens)
    except InvalidRequest as error:
        found = invalid(error)
        param = f"{place}.{found.param}" if found.param else place
        raise ApiError(400, f"{place}: {found.message}", param=param) from None
    return Hint(
        given.verb,
        None,
        namespace=namespace,
        seconds=None if given.seconds is None else float(given.seconds),
        max_tokens=given.max_tokens,
        owner=caller.tenant,
        budget_tokens=budget_of(server),
        may_share=caller.may_share,
    )


def budget_of(server: Server) -> int:
    """Tokens that the pins and retains of one tenant may hold."""
    given = server.config.hint_budget_tokens
    return int(server.runtime.memory.pool_tokens * _BUDGET_SHARE) if given is None else given


def check_count(given: Sequence[object], name: str) -> None:
    if len(given) > MAX_HINTS:
        raise ApiError(400, f"{name} takes at most {MAX_HINTS} hints, got {len(given)}", param=name)


def answers_body(server: Server, answers: Sequence[HintAnswer]) -> list[dict[str, Any]]:
    """The answers as JSON; counts them."""
    for one in answers:
        server.counters.hints[one.verb, one.answer] += 1
    return [one._asdict() for one in answers]


@dataclass(frozen=True, slots=True)
class RequestHints:
    """Hints of a request for its own prompts; they take effect when it has ended."""

    server: Server
    hints: tuple[Hint, ...]

    async def apply(self, prompts: Sequence[IntArray]) -> list[dict[str, Any]]:
        """An answer a hint, for all prompts together."""
        made = [replace(hint, token_ids=ids) for hint in self.hints for ids in prompts]
        size = len(prompts)
        answers: list[HintAnswer] = []
        for first in range(0, len(made), _AT_ONCE):
            part = made[first : first + _AT_ONCE]
            answers += await self.server.runtime.aapply_hints(part)
        joined = [
            join_answers(hint.verb, answers[at * size : (at + 1) * size])
            for at, hint in enumerate(self.hints)
        ]
        return answers_body(self.server, joined)


def request_hints(
    request: Request, given: Sequence[CacheHint] | None, namespace: str
) -> RequestHints:
    """`cache_hints` of a request. Raises ApiError."""
    server, caller = server_of(request), caller_of(request)
    check_count(given or (), "cache_hints")
    made = []
    for at, one in enumerate(given or ()):
        place = f"cache_hints[{at}]"
        if one.verb == "prefetch":
            message = (
                f"{place}: a request computes its own prompt; prefetch goes to /v1/cache/hints"
            )
            raise ApiError(400, message, param=f"{place}.verb")
        made.append(_hint(server, caller, one, namespace, place))
    return RequestHints(server, tuple(made))
