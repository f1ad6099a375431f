"""Translates the actions of a `kv_hints` envelope to hints, and answers each by its action_id.

An unknown action is answered `ignored`, and the request continues. A wrong value in the payload of
a known action is an error that names its place in the body.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from radixserve.checks import shown
from radixserve.hints.hint import HintAnswer, join_answers
from radixserve.server.gate.session_table import check_session_id
from radixserve.server.wire.cache_fields import KVHintAction, KVHints
from radixserve.server.wire.errors import ApiError, wrong_field

PREFETCH_REASON = "a request computes its own prompt; prefetch goes to /v1/cache/hints"
# The hint's verb for each action_type; not for vLLM's `kv.share`, which moves K/V between workers.
VERBS = {
    "retain": "retain",
    "kv.retain": "retain",
    "pin": "pin",
    "kv.pin": "pin",
    "demote": "demote",
    "kv.demote": "demote",
    "kv.deref": "demote",
    "share": "share",
}
_PREFETCHES = ("prefetch", "kv.prefetch")
_VERSION = re.compile(r"1(\.\d+)*")
_MEMBERS = ("seconds", "max_tokens", "session_id", "directives", "scope")
_DIRECTIVE_MEMBERS = ("start", "end", "priority", "duration", "covers_output")
_NEVER_S = 1e9  # duration of a directive without an end; it is clipped as any other is
_MAX_PRIORITY = 100


class WantedHint(NamedTuple):
    """A hint that an action asks for, before it is checked."""

    place: str  # of the payload or directive in the body, for errors
    verb: str
    seconds: Any = None
    max_tokens: Any = None
    session_id: str | None = None  # the hint is for this session; None: for the request's prompts


@dataclass(frozen=True, slots=True)
class ActionHints:
    """An action of an envelope, translated.

    hints     the hints that it asks for
    refusal   the answer without any hints: "ignored" or "rejected"
    left_out  why the action, or a part of it, is not carried out; "" if all of it is
    """

    action_id: str
    action_type: str
    hints: tuple[WantedHint, ...] = ()
    refusal: str = ""
    left_out: str = ""

    def answer(self, answers: Sequence[HintAnswer]) -> dict[str, Any]:
        """The action's answer as JSON. `answers`: those to its hints."""
        head = {"action_id": self.action_id, "action_type": self.action_type}
        if not answers:
            return {**head, "answer": self.refusal, "reason": self.left_out}
        joined = join_answers(self.hints[0].verb, list(answers))._replace(
            # The hints are for prefixes of the same prompts: their tokens must not be added up.
            tokens_found=max(own.tokens_found for own in answers),
            tokens_covered=max(own.tokens_covered for own in answers),
        )
        if self.left_out:
            is_done = joined.answer == "accepted"
            joined = joined._replace(
                answer="clipped" if is_done else joined.answer,
                reason="; ".join(filter(None, (joined.reason, self.left_out))),
            )
        fields = joined._asdict()
        del fields["verb"]
        return {**head, **fields}


def read_actions(envelope: KVHints) -> list[ActionHints]:
    """Translate the actions of an envelope. Raises ApiError for a wrong value."""
    actions: list[ActionHints] = []
    known: set[str] = set()
    for index, action in enumerate(envelope.actions):
        place = f"kv_hints.actions[{index}]"
        if action.action_id in known:
            param = f"{place}.action_id"
            raise wrong_field(param, f"{shown(action.action_id)} is given twice")
        known.add(action.action_id)
        actions.append(_read_action(action, f"{place}.payload"))
    return actions


def _read_action(action: KVHintAction, place: str) -> ActionHints:
    def refused(answer: str, reason: str) -> ActionHints:
        return ActionHints(action.action_id, action.action_type, refusal=answer, left_out=reason)

    if action.action_type in _PREFETCHES:
        return refused("rejected", PREFETCH_REASON)
    verb = VERBS.get(action.action_type)
    if verb is None:
        return refused("ignored", "actions of this type are not known here")
    if not _VERSION.fullmatch(action.action_version):
        return refused("ignored", f"version {shown(action.action_version)} is not known here")
    payload = action.payload
    unknown = [name for name in payload if name not in _MEMBERS]
    if unknown:
        return refused("ignored", f"payload.{unknown[0]} is not known here")
    session_id = _session_of(payload, place)
    if payload.get("directives") is None:
        wanted = WantedHint(
            place, verb, payload.get("seconds"), payload.get("max_tokens"), session_id
        )
        return ActionHints(action.action_id, action.action_type, (wanted,))
    if verb not in ("retain", "pin"):
        return refused("ignored", f"directives do not go with {action.action_type}")
    hints, left_out = _read_directives(verb, payload, session_id, place)
    if not hints:
        return refused("ignored", left_out or "there are no directives")
    return ActionHints(action.action_id, action.action_type, tuple(hints), left_out=left_out)


def _session_of(payload: dict[str, Any], place: str) -> str | None:
    session_id = payload.get("session_id")
    if session_id is not None and not isinstance(session_id, str):
        raise _wrong(f"{place}.session_id", "must be a string", session_id)
    try:
        check_session_id(session_id)
    except ApiError as error:
        param = f"{place}.session_id"
        raise ApiError(400, f"{place}.{error.message}", param=param) from None
    if session_id is not None and payload.get("max_tokens") is not None:
        raise ApiError(
            400, f"{place}: max_tokens goes with a prompt, not with a session", param=place
        )
    return session_id


def _read_directives(
    verb: str, payload: dict[str, Any], session_id: str | None, place: str
) -> tuple[list[WantedHint], str]:
    """The hints of vLLM's directives, which are ranges of tokens, and why some are left out.

    Each becomes a hint for all of the prompt's tokens up to the end of its range, since later
    tokens are useless in the cache without earlier ones.
    """
    directives = payload["directives"]
    place = f"{place}.directives"
    if not isinstance(directives, list):
        raise _wrong(place, "must be a list", directives)
    if session_id is not None or any(payload.get(name) for name in ("seconds", "max_tokens")):
        raise ApiError(
            400, f"{place} exclude session_id, seconds and max_tokens in a payload", param=place
        )
    hints, left_out = [], ""
    for index, directive in enumerate(directives):
        where = f"{place}[{index}]"
        wanted, reason = _read_directive(verb, directive, where)
        left_out = left_out or reason
        if wanted is not None:
            hints.append(wanted)
    return hints, left_out


def _read_directive(verb: str, directive: Any, place: str) -> tuple[WantedHint | None, str]:
    """The hint of a directive; None and the reason if the directive has no effect."""
    if not isinstance(directive, dict):
        raise _wrong(place, "must be an object", directive)
    unknown = [name for name in directive if name not in _DIRECTIVE_MEMBERS]
    if unknown:
        raise ApiError(400, f"unknown field {place}.{unknown[0]}", param=f"{place}.{unknown[0]}")
    start: Any = directive.get("start", 0)
    end: Any = directive.get("end")
    priority: Any = directive.get("priority")
    duration: Any = directive.get("duration")
    if not _is_int(start) or start < 0:
        raise _wrong(f"{place}.start", "must be an integer of at least 0", start)
    if end is not None and (not _is_int(end) or end <= start):
        raise _wrong(f"{place}.end", "must be null or an integer beyond start", end)
    if not _is_int(priority) or not 0 <= priority <= _MAX_PRIORITY:
        raise _wrong(f"{place}.priority", f"must be an integer of 0 to {_MAX_PRIORITY}", priority)
    if duration is not None and not _is_duration(duration):
        raise _wrong(f"{place}.duration", f"must be null or 0 to {_NEVER_S:.0e} seconds", duration)
    if directive.get("covers_output"):
        return None, "only tokens of the prompt can be kept"
    if not priority and start:
        return None, "only what begins at the first token can be released"
    seconds = 0.0 if not priority else _NEVER_S if duration is None else duration
    return WantedHint(place, verb, seconds, end), ""


def _is_duration(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and 0 <= value <= _NEVER_S


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(place: str, demand: str, value: Any) -> ApiError:
    return wrong_field(place, f"{demand}, got {shown(value)}")
