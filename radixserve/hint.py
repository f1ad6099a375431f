"""`Hint` and `HintAnswer`: what a caller wants for K/V, and what became of it."""

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
    """What is wanted for a prefix, or for all that a session keeps."""

    verb: str
    token_ids: IntArray | None  # the prefix; None: that of `session`
    session: str = ""
    namespace: str = ""
    seconds: float | None = None  # None: the default; 0 ends what was granted before
    max_tokens: int | None = None  # of the prefix, its first ones
    owner: str = ""  # whose budget it counts against
    budget_tokens: int | None = None  # that all pins and retains of the owner may hold
    may_share: bool = True  # the operator permits it


class HintAnswer(NamedTuple):
    """answer is one of
    accepted  done as asked; a prefetch: cached already, or it begins now
    clipped   done for fewer tokens or seconds than asked
    deferred  it will be done when nothing else is at work
    rejected  not done
    missing   nothing of it is cached, no such session is open, or there is nothing to end
    """

    verb: str
    answer: str
    tokens_found: int = 0  # leading tokens that were cached; with seconds=0 those of what was ended
    tokens_covered: int = 0  # tokens that the hint has an effect on, in whole pages
    seconds: float | None = None  # granted; None for verbs without a time
    reason: str = ""  # why it is not as asked; "" where it is


class HintLimits(NamedTuple):
    """See EngineConfig."""

    seconds: float = 300.0
    max_seconds: float = 3600.0
    max_share: float = 0.5


def check_hint(verb: object, seconds: object, max_tokens: object) -> None:
    """Raise InvalidRequest for a wrong verb, and for bounds that are wrong or that it has not."""
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
    """One answer for several prefixes of a session: the worst, with the sums of tokens."""
    worst = max(answers, key=lambda one: ANSWERS.index(one.answer))
    kinds = {one.answer for one in answers}
    answer = "clipped" if kinds & {"accepted", "clipped"} and len(kinds) > 1 else worst.answer
    seconds = [one.seconds for one in answers if one.seconds is not None]
    return HintAnswer(
        verb,
        answer,
        sum(one.tokens_found for one in answers),
        sum(one.tokens_covered for one in answers),
        min(seconds, default=None),
        worst.reason,
    )
