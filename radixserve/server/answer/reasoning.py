"""Splits the reasoning from an answer's text, and counts its tokens."""

from __future__ import annotations

from bisect import bisect_left

from radixserve.output import Completion
from radixserve.server.answer.tool_parsers.base import held_len
from radixserve.text.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser:
    """Reasoning is at the start of an answer only. White space around it is left out; without the
    closing tag all of the answer is reasoning."""

    def __init__(self, is_thinking: bool) -> None:
        """`is_thinking`: the prompt ends with the opening tag."""
        self._text = ""  # not returned yet
        self._state = "thinking" if is_thinking else "start"
        self._has_begun = False  # the reasoning, or the content after it

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that is certain now and was not before."""
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
        text, self._text = self._text, ""
        if self._state == "thinking":
            return text.rstrip() if self._has_begun else text.strip(), ""
        return "", text.lstrip() if self._state == "after" else text

    def _start(self) -> None:
        begun = self._text.lstrip()
        if begun.startswith(OPEN):
            self._state, self._text = "thinking", begun[len(OPEN) :]
        elif begun and not OPEN.startswith(begun):
            self._state = "content"

    def _think(self) -> str:
        """The new part of the reasoning."""
        if not self._has_begun:
            self._text = self._text.lstrip()
            while self._text.startswith(OPEN):  # once more, after that of the prompt
                self._text = self._text[len(OPEN) :].lstrip()
        position = self._text.find(CLOSE)
        if position >= 0:
            reasoning, self._text = (
                self._text[:position].rstrip(),
                self._text[position + len(CLOSE) :],
            )
            self._state = "after"
            return reasoning
        size = len(self._text) - held_len(self._text, (CLOSE, OPEN))
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
    """The number of first tokens whose text holds all of `reasoning`. O(log n) decodings."""
    if not reasoning:
        return 0
    ids = completion.token_ids

    def text(size: int) -> str:
        return tokenizer.decode(ids[:size], keep_special=True)

    end = text(len(ids)).find(reasoning) + len(reasoning)
    return bisect_left(range(len(ids)), end, key=lambda size: len(text(size)))
