"""`Hint`, a caller's advice to the cache, and `HintAnswer`, its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from radixserve.arrays import IntArray
from radixserve.checks import check_choice, check_float, check_int
from radixserve.errors import InvalidRequest

VERBS = ("share", "prefetch", "demote", "pin", "retain")
TIMED_VERBS = ("share", "pin", "retain")  # those that take seconds
ANSWERS = ("accepted", "clipped", "deferred", "rejected", "missing")  # from best to worst


@dataclass(frozen=True, slots=True)
class Hint:
    """Advice on a prefix, or on all prefixes that a session claims."""

    verb: str
    token_ids: IntArray | None  # the prefix; None: the prefixes of `session`
    session: str = ""
    namespace: str = ""
    seconds: float | None = None  # None: the default; 0 ends the hints granted before
    max_tokens: int | None = None  # number of first tokens to use; None: all
    owner: str = ""  # whose budget the hint counts for
    budget_tokens: int | None = None  # most tokens that all pins and retains of the owner may keep
    may_share: bool = True  # whether the operator permits sharing


class HintAnswer(NamedTuple):
    """The result of a hint. `answer` is one of

    accepted  applied as asked; for a prefetch: the prefix is cached, or its computation begins
    clipped   applied to fewer tokens or seconds than asked
    deferred  will be applied when no request waits or runs
    rejected  not applied
    missing   no token of the prefix is cached, no such session is open, or no hint can be ended
    """

    verb: str
    answer: str
    tokens_found: int = 0  # leading tokens that were cached; with seconds=0 those of the ended hint
    tokens_covered: int = 0  # tokens that the hint affects, whole pages
    seconds: float | None = None  # seconds granted; None for verbs without a time
    reason: str = ""  # why the result differs from the hint; "" if it does not


class HintLimits(NamedTuple):
    """Limits of all hints; see `hint_seconds`, `max_hint_seconds` and `max_hint_share` of
    EngineConfig."""

    seconds: float = 300.0
    max_seconds: float = 3600.0
    max_share: float = 0.5


def check_hint(verb: object, seconds: object, max_tokens: object) -> None:
    """Raise InvalidRequest for an unknown verb, and for seconds or max_tokens that are wrong or
    that the verb does not take."""
    check_choice("verb", verb, VERBS)
    if seconds is not None:
        if verb not in TIMED_VERBS:
            raise InvalidRequest(f"seconds belong to {', '.join(TIMED_VERBS)}, not to {verb}")
        check_float("seconds", seconds, 0.0, 1e9)
    if max_tokens is not None:
        if verb == "demote":
            raise InvalidRequest("max_tokens does not go with demote: shorten the prefix")
        check_int("max_tokens", max_tokens, 1)


def join_answers(verb: str, answers: list[HintAnswer]) -> HintAnswer:
    """Returns one answer for several prefixes of a session: the worst of them, with the sums of
    their tokens."""
    worst = max(answers, key=lambda own: ANSWERS.index(own.answer))
    kinds = {own.answer for own in answers}
    answer = "clipped" if kinds & {"accepted", "clipped"} and len(kinds) > 1 else worst.answer
    seconds = [own.seconds for own in answers if own.seconds is not None]
    return HintAnswer(
        verb,
        answer,
        sum(own.tokens_found for own in answers),
        sum(own.tokens_covered for own in answers),
        min(seconds, default=None),
        worst.reason,
    )
