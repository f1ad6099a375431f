"""`ReasoningParser`: separates the reasoning at the start of an answer from the rest.

THOUGHTS has the marks around reasoning of each reasoning parser.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from radixserve.output import Completion
from radixserve.server.answer.tool_parsers.base import partial_mark_len
from radixserve.text.tokenizer import Tokenizer


class ThoughtMarks(NamedTuple):
    """The texts around a model's reasoning.

    opening  the tag before reasoning; for most models a special token
    closing  the tag after it
    label    text between the opening tag and the reasoning
    call     mark of a tool call that ends reasoning without the closing tag; "": none does
    """

    opening: str
    closing: str
    label: str = ""
    call: str = ""

    @property
    def head(self) -> str:
        """The opening tag and the label, without white space after them."""
        return self.opening + self.label.rstrip()


THINK = ThoughtMarks("<think>", "</think>")
THOUGHTS: Mapping[str, ThoughtMarks] = {  # by the names of the reasoning parsers
    "think": THINK,
    "mistral": ThoughtMarks("[THINK]", "[/THINK]"),
    "gemma4": ThoughtMarks("<|channel>", "<channel|>", "thought\n", "<|tool_call>"),
}
# A chat template has a parser's reasoning if it contains one of the texts; the first one counts.
_SHOWN_BY: Sequence[tuple[str, tuple[str, ...]]] = (
    ("gemma4", ("<|channel>", "<channel|>")),
    ("mistral", ("[THINK]", "[/THINK]")),
    ("think", ("<think>", "</think>")),
)


def shown_thoughts(template: str) -> str:
    """The name of the reasoning parser for a chat template; "none" for one without reasoning."""
    for name, texts in _SHOWN_BY:
        if any(text in template for text in texts):
            return name
    return "none"


class ReasoningParser:
    """Separates reasoning at the start of an answer from its content. White space around reasoning
    is removed. Without a closing tag, the whole answer is reasoning."""

    def __init__(self, is_thinking: bool, marks: ThoughtMarks = THINK) -> None:
        """`is_thinking`: the prompt ends with the opening tag and its label."""
        self._head, self._marks = marks.head, marks
        self._text = ""  # not returned yet
        self._state = "thinking" if is_thinking else "start"
        self._has_begun = False  # whether a part of the reasoning was returned

    def feed(self, text: str) -> tuple[str, str]:
        """Add the next text of the answer. Returns the new (reasoning, content) that is certain."""
        if self._state == "content":
            return "", text
        self._text += text
        reasoning = ""
        if self._state == "start":
            self._start()
        if self._state == "thinking":
            reasoning = self._think()
        return reasoning, self._content()

    def finish(self) -> tuple[str, str]:
        """The answer has ended. Returns the rest as (reasoning, content)."""
        text, self._text = self._text, ""
        if self._state == "thinking":
            return text.rstrip() if self._has_begun else text.strip(), ""
        return "", text.lstrip() if self._state == "after" else text

    def _start(self) -> None:
        begun = self._text.lstrip()
        if begun.startswith(self._head):
            self._state, self._text = "thinking", begun[len(self._head) :]
        elif begun and not self._head.startswith(begun):
            self._state = "content"

    def _think(self) -> str:
        """The next part of the reasoning that is certain."""
        if not self._has_begun:
            self._text = self._text.lstrip()
            while self._text.startswith(self._head):  # the model repeats the prompt's opening tag
                self._text = self._text[len(self._head) :].lstrip()
        closing, call = self._marks.closing, self._marks.call
        position = self._text.find(closing)
        call_position = self._text.find(call, 0, position if position >= 0 else None)
        if call and call_position >= 0:
            position, closing = call_position, ""
        if position >= 0:
            reasoning, self._text = (
                self._text[:position].rstrip(),
                self._text[position + len(closing) :],
            )
            self._state = "after"
            return reasoning
        marks = (closing, self._head, call) if call else (closing, self._head)
        size = len(self._text) - partial_mark_len(self._text, marks)
        reasoning = self._text[:size].rstrip()
        self._text = self._text[len(reasoning) :]
        self._has_begun = self._has_begun or bool(reasoning)
        return reasoning

    def _content(self) -> str:
        if self._state == "after":
            self._text = self._text.lstrip()
            if self._text:
                self._state = "content"
        if self._state != "content":
            return ""
        text, self._text = self._text, ""
        return text


def count_reasoning(tokenizer: Tokenizer, reasoning: str | None, completion: Completion) -> int:
    """The number of tokens from the start of the answer to the end of `reasoning`. O(log n)
    decodings."""
    if not reasoning:
        return 0
    ids = completion.token_ids

    def text(size: int) -> str:
        return tokenizer.decode(ids[:size], keep_special=True)

    end = text(len(ids)).find(reasoning) + len(reasoning)
    return bisect_left(range(len(ids)), end, key=lambda size: len(text(size)))
