"""`Question`, the answers that it may have, and the `Decision` between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from radixserve.checks import check_text, shown
from radixserve.errors import InvalidRequest
from radixserve.output import Usage

MAX_OPTIONS = 255  # of one question


class Option(NamedTuple):
    """One of the answers to a question, and what it means."""

    value: str | bool
    description: str | None = None

    @property
    def text(self) -> str:
        """What the model would answer."""
        return str(self.value).lower() if isinstance(self.value, bool) else self.value


_YES_NO = (Option(True), Option(False))


@dataclass(frozen=True)
class Question:
    """A question about an input, with the answers that it may have. Raises InvalidRequest.

    instructions  what is asked
    choices       2 to 255 answers: texts, bools, (value, description) pairs or Options; without
                  these and levels the instructions are a statement, answered by yes (True) or no
    levels        in place of choices: answers on a scale, the lowest first
    name          comes back with the answer
    """

    instructions: str
    choices: Iterable[Any] | None = None
    levels: Iterable[Any] | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.instructions, str) or not self.instructions.strip():
            raise InvalidRequest(f"instructions must be text, got {shown(self.instructions)}")
        check_text("instructions", self.instructions)
        if self.name is not None and not isinstance(self.name, str):
            raise InvalidRequest(f"name must be text, got {shown(self.name)}")
        if self.choices is not None and self.levels is not None:
            raise InvalidRequest("a question takes choices or levels, not both")
        for field in ("choices", "levels"):
            given = getattr(self, field)
            if given is not None:
                object.__setattr__(self, field, _read_options(field, given))

    @property
    def kind(self) -> str:
        """ "predicate", "choice" or "score"."""
        if self.choices is not None:
            return "choice"
        return "predicate" if self.levels is None else "score"

    @property
    def options(self) -> tuple[Option, ...]:
        """The answers; yes and no of a statement."""
        return tuple(self.choices or self.levels or _YES_NO)

    @property
    def texts(self) -> tuple[str, ...]:
        """What the model would answer, for each option."""
        if self.kind == "predicate":
            return ("Yes", "No")
        return tuple(option.text for option in self.options)

    def prompt(self) -> str:
        """Returns the question as the model reads it after the input."""
        if self.kind == "predicate":
            asked = "Is this true? Answer with Yes or No, and with nothing else."
            return f"{self.instructions}\n\n{asked}"
        lines = [
            f"- {text}" if option.description is None else f"- {text}: {option.description}"
            for text, option in zip(self.texts, self.options, strict=True)
        ]
        asked = "Answer with one of these, and with nothing else:"
        if self.kind == "score":
            asked = "Answer with one of these levels, from the lowest to the highest, and with "
            asked += "nothing else:"
        return "\n".join([self.instructions, "", asked, *lines])


def _read_options(field: str, given: object) -> tuple[Option, ...]:
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise InvalidRequest(f"{field} must be a list of answers, got {shown(given)}")
    options = tuple(_read_option(field, item) for item in given)
    if not 2 <= len(options) <= MAX_OPTIONS:
        raise InvalidRequest(f"{field} must have 2 to {MAX_OPTIONS} answers, got {len(options)}")
    seen: set[str] = set()
    for option in options:
        if option.text in seen:
            raise InvalidRequest(f"{field} has the answer {shown(option.text)} twice")
        seen.add(option.text)
    return options


def _read_option(field: str, item: object) -> Option:
    option = Option(*item) if isinstance(item, tuple) and len(item) == 2 else Option(item)  # type: ignore[arg-type]
    value, description = option
    is_text = isinstance(value, str) and value.strip()
    is_value = is_text or (isinstance(value, bool) and field == "choices")
    if not is_value or not isinstance(description, str | None):
        raise InvalidRequest(
            f"{field} must be texts, or texts with descriptions, got {shown(item)}"
        )
    for text in (option.text, description or ""):
        check_text(field, text)
    return option


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to one question.

    values         the answers that it may have, in the question's order; True and False of a
                   statement
    logprobs       of each: the model's log-probability of its text at the place of the answer
    probabilities  of each, among these alone: they sum to 1
    usage          of the question: `cached_tokens` were taken from the cache, or from another
                   question of the same call; `computed_tokens` were computed for this one
    """

    question: Question
    values: tuple[str | bool, ...]
    logprobs: tuple[float, ...]
    probabilities: tuple[float, ...]
    usage: Usage

    @property
    def name(self) -> str | None:
        """The name of the question."""
        return self.question.name

    @property
    def choice(self) -> str | bool:
        """The likeliest answer; the first one of equally likely answers."""
        return self.values[self.probabilities.index(self.confidence)]

    @property
    def confidence(self) -> float:
        """The probability of `choice`."""
        return max(self.probabilities)

    @property
    def score(self) -> float:
        """The expected index of the answer. For levels it tells where the input is on the scale."""
        return math.fsum(index * value for index, value in enumerate(self.probabilities))
