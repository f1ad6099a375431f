"""`Question` and `DecisionPrompts`: turn questions about an input into token ids.

The input is tokenised once; each question and each possible answer is tokenised on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.checks import check_text, shown
from radixserve.errors import InvalidRequest
from radixserve.text.chat_options import read_template_kwargs
from radixserve.text.content_marks import unmarked
from radixserve.text.prompts import check_messages, is_conversation
from radixserve.text.template_traits import fit_messages
from radixserve.text.tokenizer import Tokenizer

MAX_OPTIONS = 255  # of one question
_PLACE = "quorzel-question"  # placeholder for the question while the input is rendered
_OPEN_THOUGHT, _NO_THOUGHT = "<think>", "\n\n</think>\n\n"
_HARMONY_TURN, _HARMONY_FINAL = "<|start|>assistant", "<|channel|>final<|message|>"


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


class DecisionPrompts(NamedTuple):
    """The prompts of several questions: each is `head` and one of `tails`."""

    head: list[int]  # the input
    tails: list[list[int]]  # the questions, up to where the answer begins
    answers: list[list[IntArray]]  # of each question, the token ids of each of its options

    @classmethod
    def read(
        cls,
        tokenizer: Tokenizer,
        given: object,
        questions: Sequence[Question],
        template_kwargs: Mapping[str, Any] | None = None,
        check_length: Callable[[str], object] = len,
    ) -> DecisionPrompts:
        """Returns the prompts in the model's chat template: the question ends the user's last
        message. Without a template the question follows the input as text. The input is rendered
        and tokenised once, after `check_length` was called with its text. Raises
        InvalidRequest."""
        if isinstance(given, str) and not tokenizer.has_chat_template:
            check_length(given)
            head, end, space = tokenizer.encode(given), "\nAnswer:", " "
        else:
            before, end = _rendered(tokenizer, given, template_kwargs)
            check_length(before)
            head, space = tokenizer.encode_rendered(before), ""
        tails = [
            tokenizer.encode_rendered(f"\n\n{tokenizer.mark_text(question.prompt())}{end}")
            for question in questions
        ]
        answers = [
            [_answer_ids(tokenizer, space + text) for text in question.texts]
            for question in questions
        ]
        return cls(head, tails, answers)


def _answer_ids(tokenizer: Tokenizer, text: str) -> IntArray:
    return np.asarray(tokenizer.encode_rendered(tokenizer.mark_text(text)), np.int32)


def _rendered(
    tokenizer: Tokenizer, given: object, template_kwargs: Mapping[str, Any] | None
) -> tuple[str, str]:
    """Returns the rendered text before and after the place of a question."""
    place = _PLACE
    while place in str(given):
        place += "-"
    messages = _with_question(given, place)
    variables = {"enable_thinking": False, **read_template_kwargs(template_kwargs)}
    said = fit_messages(messages, tokenizer.traits())
    text = tokenizer.render_chat(said, variables=variables)
    before, separator, end = text.rpartition(place)
    if not separator:
        raise InvalidRequest("the chat template leaves the last message of the user out")
    if unmarked(end).rstrip().endswith(_OPEN_THOUGHT):
        end += _NO_THOUGHT.lstrip("\n") if end.endswith("\n") else _NO_THOUGHT
    if end.endswith(_HARMONY_TURN):
        end += _HARMONY_FINAL
    return before.removesuffix("\n\n"), end


def _with_question(given: object, question: str) -> list[dict[str, Any]]:
    """Returns the messages with the question at the end of the user's last message."""
    if isinstance(given, str):
        check_text("input", given)
        return [{"role": "user", "content": f"{given}\n\n{question}"}]
    if not is_conversation(given):
        raise InvalidRequest(f"input must be text or a list of chat messages, got {shown(given)}")
    messages = check_messages(given)
    last = messages[-1]
    if last["role"] == "user":
        content = last["content"]
        if not isinstance(content, str):
            content = "\n".join(part["text"] for part in content)
        return [*messages[:-1], {**last, "content": f"{content}\n\n{question}"}]
    return [*messages, {"role": "user", "content": question}]
