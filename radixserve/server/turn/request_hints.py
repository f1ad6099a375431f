"""`RequestHints`: the hints in a generation's body, checked, and applied when it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from radixserve.arrays import IntArray
from radixserve.errors import InvalidRequest
from radixserve.hints.hint import Hint, HintAnswer, check_hint, join_answers
from radixserve.server.gate.state import AppState, caller_of, server_of
from radixserve.server.gate.tenants import Caller
from radixserve.server.turn.kv_hints import (
    PREFETCH_REASON,
    ActionHints,
    WantedHint,
    read_actions,
)
from radixserve.server.wire.cache_fields import MAX_HINTS, CacheHint, KVHints
from radixserve.server.wire.errors import ApiError, invalid

_BUDGET_SHARE = 0.25  # of the pool's tokens: the default of hint_budget_tokens
_HINTS_PER_STEP = 16  # applied between two steps of the engine


@dataclass(frozen=True, slots=True)
class HintAnswers:
    """The answers to a request's hints, as JSON.

    cache_hints  an answer for each hint of `cache_hints`
    kv_hints     the envelope with an answer for each action; None: the request had none
    """

    cache_hints: tuple[dict[str, Any], ...] = ()
    kv_hints: dict[str, Any] | None = None

    def added_to(self, body: dict[str, Any]) -> dict[str, Any]:
        """`body` with the answers to hints that the request had."""
        if self.cache_hints:
            body = {**body, "cache_hints": list(self.cache_hints)}
        return body if self.kv_hints is None else {**body, "kv_hints": self.kv_hints}

    def __bool__(self) -> bool:
        return bool(self.cache_hints) or self.kv_hints is not None


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The hints of a request, for its own prompts or for the sessions that they name. They are
    applied when the request has ended.

    hints     those of `cache_hints`, then those of all `actions`
    envelope  the envelope of `actions`; None: the request has none
    """

    server: AppState
    hints: tuple[Hint, ...]
    envelope: KVHints | None = None
    actions: tuple[ActionHints, ...] = ()

    async def apply(self, prompts: Sequence[IntArray]) -> HintAnswers:
        """Apply the hints to all prompts. Returns their answers, one for all prompts of a hint."""
        hints_by_prompt = [
            [hint] if hint.session else [replace(hint, token_ids=ids) for ids in prompts]
            for hint in self.hints
        ]
        all_hints = [hint for of_prompts in hints_by_prompt for hint in of_prompts]
        answers: list[HintAnswer] = []
        for first in range(0, len(all_hints), _HINTS_PER_STEP):
            part = all_hints[first : first + _HINTS_PER_STEP]
            answers += await self.server.runtime.aapply_hints(part)
        rest = iter(answers)
        joined = [
            join_answers(hint.verb, [next(rest) for _ in of_prompts])
            for hint, of_prompts in zip(self.hints, hints_by_prompt, strict=True)
        ]
        close_demoted(self.server, self.hints, joined)
        bodies = answers_body(self.server, joined)
        if self.envelope is None:
            return HintAnswers(tuple(bodies))
        num_own = len(self.hints) - sum(len(action.hints) for action in self.actions)
        of_actions = iter(joined[num_own:])
        return HintAnswers(
            tuple(bodies[:num_own]),
            {
                "protocol_version": self.envelope.protocol_version,
                "message_id": self.envelope.message_id,
                "actions": [
                    action.answer([next(of_actions) for _ in action.hints])
                    for action in self.actions
                ],
            },
        )


def request_hints(
    request: Request, given: Sequence[CacheHint], envelope: KVHints | None, namespace: str
) -> RequestHints:
    """Check the hints of a request: `given` is its `cache_hints`, `envelope` its `kv_hints`. Raises
    ApiError."""
    server, caller = server_of(request), caller_of(request)
    check_count(given, "cache_hints")
    made = []
    for index, hint in enumerate(given):
        place = f"cache_hints[{index}]"
        if hint.verb == "prefetch":
            raise ApiError(400, f"{place}: {PREFETCH_REASON}", param=f"{place}.verb")
        made.append(read_hint(server, caller, namespace, place, hint))
    if envelope is None:
        return RequestHints(server, tuple(made))
    actions = read_actions(envelope)
    for action in actions:
        for wanted in action.hints:
            read = read_hint(server, caller, namespace, wanted.place, wanted)
            if wanted.session_id is not None:
                read = replace(read, session=server.sessions.name(namespace, wanted.session_id))
            made.append(read)
    check_count(made, "kv_hints.actions")
    return RequestHints(server, tuple(made), envelope, tuple(actions))


def read_hint(
    server: AppState,
    caller: Caller,
    namespace: str,
    place: str,
    given: CacheHint | WantedHint,
) -> Hint:
    """Check a hint. Returns it without the prompt or session that it is for. `place`: its place in
    the body, for errors. Raises ApiError."""
    try:
        check_hint(given.verb, given.seconds, given.max_tokens)
    except InvalidRequest as error:
        api_error = invalid(error)
        param = f"{place}.{api_error.param}" if api_error.param else place
        raise ApiError(400, f"{place}: {api_error.message}", param=param) from None
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


def budget_of(server: AppState) -> int:
    """The number of tokens that the pins and retains of one tenant may keep."""
    given = server.config.hint_budget_tokens
    return int(server.runtime.memory.pool_tokens * _BUDGET_SHARE) if given is None else given


def check_count(given: Sequence[object], name: str) -> None:
    """Raise ApiError for too many hints."""
    if len(given) > MAX_HINTS:
        raise ApiError(400, f"{name} takes at most {MAX_HINTS} hints, got {len(given)}", param=name)


def close_demoted(server: AppState, hints: Sequence[Hint], answers: Sequence[HintAnswer]) -> None:
    """Close the server's sessions whose demote hints were accepted."""
    for hint, hint_answer in zip(hints, answers, strict=True):
        if hint.verb == "demote" and hint.session and hint_answer.answer == "accepted":
            server.sessions.close_named(hint.session)


def answers_body(server: AppState, answers: Sequence[HintAnswer]) -> list[dict[str, Any]]:
    """The answers as JSON. Counts them for /metrics."""
    for hint_answer in answers:
        server.counters.hints[hint_answer.verb, hint_answer.answer] += 1
    return [hint_answer._asdict() for hint_answer in answers]
