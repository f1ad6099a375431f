"""`ReasoningParser`: separates the reasoning at the start of an answer from the rest.

THOUGHTS has the marks around reasoning of each reasoning parser.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from radixserve.completion import Completion
from radixserve.server.answer.tool_parsers.base import (
    Piece,
    ToolParser,
    partial_mark_len,
    skip_space,
)
from radixserve.text.tokenizer import Tokenizer


class ThoughtMarks(NamedTuple):
    """The texts around a model's reasoning.

    opening  the tag before reasoning; for most models a special token
    closing  the tag after it
    label    text between the opening tag and the reasoning
    """

    opening: str
    closing: str
    label: str = ""

    @property
    def head(self) -> str:
        """The opening tag and the label, without white space after them."""
        return self.opening + self.label.rstrip()


THINK = ThoughtMarks("<think>", "</think>")
THOUGHTS: Mapping[str, ThoughtMarks] = {  # by the names of the reasoning parsers
    "think": THINK,
    "mistral": ThoughtMarks("[THINK]", "[/THINK]"),
    "gemma4": ThoughtMarks("<|channel>", "<channel|>", "thought\n"),
    "command-r7b": ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>"),
}
# A chat template has a parser's reasoning if it contains one of the texts; the first one counts.
_SHOWN_BY: Sequence[tuple[str, tuple[str, ...]]] = (
    ("gemma4", ("<|channel>", "<channel|>")),
    ("mistral", ("[THINK]", "[/THINK]")),
    ("command-r7b", ("<|START_THINKING|>", "<|END_THINKING|>")),
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
    is removed. Without a closing tag, the whole answer is reasoning, except for calls in it:

    - a mark that can only be a call ends reasoning, even if the closing tag follows later;
    - another call ends reasoning if no text and no call follow the closing tag. Models quote calls
      while they think. The call, and what follows it, are returned when that is decided.
    """

    def __init__(
        self,
        is_thinking: bool,
        marks: ThoughtMarks = THINK,
        make_calls: Callable[[], ToolParser] | None = None,
        call_marks: Sequence[str] = (),
    ) -> None:
        """`is_thinking`: the prompt ends with the opening tag and its label. `make_calls` makes the
        parser of the answer's calls; `call_marks` can only be calls."""
        self._head, self._closing = marks.head, marks.closing
        self._tags = (marks.closing, *call_marks)
        self._tag = re.compile("|".join(map(re.escape, self._tags)))
        self._calls = make_calls() if make_calls is not None else None
        self._text = ""  # not returned yet
        self._state = "thinking" if is_thinking else "start"
        self._has_begun = False  # whether a part of the reasoning was returned
        self._num_read = 0  # characters of `_text` that the parser of calls has read
        self._num_certain = 0  # of them those that are not a part of a call
        self._position = 0  # in `_text`; the closing tag does not begin before it

    def feed(self, text: str) -> tuple[str, str]:
        """Add the next text of the answer. Returns the new (reasoning, content) that is certain."""
        if self._state == "content":
            return "", text
        self._text += text
        if self._state == "start":
            self._start()
        reasoning = self._think(is_last=False)
        return reasoning, self._content()

    def finish(self) -> tuple[str, str]:
        """The answer has ended. Returns the rest as (reasoning, content)."""
        reasoning = self._think(is_last=True)
        if self._state == "thinking":
            self._text = ""
        if self._state == "calling":
            self._text = self._text.replace(self._closing, "", 1)
            self._state = "after"
        text, self._text = self._text, ""
        return reasoning, text.lstrip() if self._state == "after" else text

    def _start(self) -> None:
        begun = self._text.lstrip()
        if begun.startswith(self._head):
            self._state, self._text = "thinking", begun[len(self._head) :]
        elif begun and not self._head.startswith(begun):
            self._state = "content"

    def _think(self, *, is_last: bool) -> str:
        """The next part of the reasoning that is certain."""
        reasoning = ""
        if self._state == "thinking":
            if not self._has_begun:
                self._text = self._text.lstrip()
                while self._text.startswith(self._head):  # the model repeats the prompt's tag
                    self._text = self._text[len(self._head) :].lstrip()
                if self._head.startswith(self._text) and not is_last:
                    return ""
            reasoning = self._read(is_last=is_last)
        if self._state == "calling":
            reasoning += self._quotation()
        return reasoning

    def _read(self, *, is_last: bool) -> str:
        """Read on, up to a tag that ends reasoning. Returns the reasoning that is certain."""
        tag = self._tag.search(self._text, self._num_read)
        held = 0 if is_last else partial_mark_len(self._text, self._tags)
        end = len(self._text) - held if tag is None else tag.start()
        pieces: list[Piece] = [self._text[self._num_read : end]]
        if self._calls is not None:
            pieces = self._calls.feed(self._text[self._num_read : end])
            if tag is not None or is_last:
                pieces += self._calls.finish()
        self._num_read = end
        for piece in pieces:
            if not isinstance(piece, str):
                self._state = "calling"
                break
            self._num_certain += len(piece)
        if self._state == "thinking" and tag is not None:
            reasoning = self._take(len(self._text[:end].rstrip()))
            self._text = self._text.lstrip().removeprefix(self._closing)
            self._state = "after"
            return reasoning
        return self._take(len(self._text[: self._num_certain].rstrip()))

    def _quotation(self) -> str:
        """The rest of the reasoning, if more than white space follows its closing tag."""
        end = self._text.find(self._closing, self._position)
        if end < 0:
            self._position = max(self._position, len(self._text) - len(self._closing) + 1)
            return ""
        self._position, after = end, end + len(self._closing)
        if skip_space(self._text, after) == len(self._text):
            return ""
        before, self._text = self._text[:end].rstrip(), self._text[after:]
        self._state = "after"
        return before if self._has_begun else before.lstrip()

    def _take(self, size: int) -> str:
        """The next characters, as reasoning."""
        piece, self._text = self._text[:size], self._text[size:]
        self._num_read -= size
        self._num_certain -= size
        self._has_begun = self._has_begun or bool(piece)
        return piece

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
