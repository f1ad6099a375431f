"""`DecisionPrompts`: turns questions about an input into token ids.

The input is tokenised once; each question and each possible answer is tokenised on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.checks import check_text, shown
from radixserve.decisions import Question
from radixserve.errors import InvalidRequest
from radixserve.text.chat_options import read_template_kwargs
from radixserve.text.content_marks import unmarked
from radixserve.text.prompts import check_messages, is_conversation
from radixserve.text.template_traits import fit_messages
from radixserve.text.tokenizer import Tokenizer

_PLACE = "quorzel-question"  # placeholder for the question while the input is rendered
_OPEN_THOUGHT, _NO_THOUGHT = "<think>", "\n\n</think>\n\n"
_HARMONY_TURN, _HARMONY_FINAL = "<|start|>assistant", "<|channel|>final<|message|>"


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
