"""`OutputParser`: an answer's text as content, reasoning and tool calls, whole or in pieces."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from radixserve.server.answer.reasoning import ReasoningParser, ThoughtMarks
from radixserve.server.answer.tool_parsers.base import (
    Call,
    MarkFilter,
    Piece,
    Thought,
    ToolParser,
)


class ToolCall(NamedTuple):
    """A function that the model calls."""

    id: str
    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call; `id` and `name` are in its first one only."""

    index: int
    id: str | None
    name: str | None
    arguments: str  # a piece of the JSON text


@dataclass(frozen=True, slots=True)
class Delta:
    """The new part of an answer. `parts`: content and calls, in order, none empty."""

    parts: tuple[str | ToolCallDelta, ...] = ()
    reasoning: str = ""

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def tool_calls(self) -> tuple[ToolCallDelta, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCallDelta))

    def __bool__(self) -> bool:
        return bool(self.parts or self.reasoning)

    def __add__(self, other: Delta) -> Delta:
        return Delta(self.parts + other.parts, self.reasoning + other.reasoning)


class ParsedAnswer(NamedTuple):
    """content: None for an answer of reasoning or calls alone. reasoning: None without any.
    is_whole: no call was left out. parts: content and calls in order."""

    content: str | None
    reasoning: str | None
    tool_calls: list[ToolCall]
    is_whole: bool
    parts: list[str | ToolCall]


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class OutputParserConfig:
    """How a request's answers are to be read. A plain one is content from end to end.

    calls       makes the parser of one answer; None: calls are content
    grammar     of answers that must call; None: any text is allowed
    thoughts    the marks around reasoning; None: reasoning is not parsed. `is_thinking`: the
                answer begins with reasoning, which the prompt has opened
    keep_special_ids  special tokens that the parsers read; `hidden`: their texts, left out of the
                answer
    max_calls   calls after so many are left out
    new_id      makes the id of a call
    """

    calls: Callable[[], ToolParser] | None = None
    grammar: str | None = None
    thoughts: ThoughtMarks | None = None
    is_thinking: bool = False
    keep_special_ids: tuple[int, ...] = ()
    hidden: tuple[str, ...] = ()
    max_calls: int | None = None
    new_id: Callable[[], str] = new_call_id

    @property
    def is_plain(self) -> bool:
        return self.calls is None and self.thoughts is None


PLAIN = OutputParserConfig()


class OutputParser:
    """Reads one answer.

    White space around calls and reasoning is left out. A call is held back until all of it is
    there, so that its arguments are valid JSON; other text stays content.
    """

    def __init__(self, config: OutputParserConfig = PLAIN) -> None:
        self._config = config
        self._think = None
        if config.thoughts is not None:
            self._think = ReasoningParser(config.is_thinking, config.thoughts)
        self._calls = config.calls() if config.calls is not None else None
        self._content_filter = MarkFilter(config.hidden)
        self._reasoning_filter = MarkFilter(config.hidden)
        self._space = ""  # white space that is content if more content follows
        self._has_content = False
        self._follows_call = False
        self._is_whole = True
        self._parts: list[str | ToolCall] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[ToolCall] = []

    def feed(self, text: str) -> Delta:
        """The parts that became certain with this text."""
        if self._config.is_plain:
            return Delta(self._content(text))
        reasoning = ""
        if self._think is not None:
            reasoning, text = self._think.feed(text)
        return self._delta(self._reasoning_filter.feed(reasoning), self._pieces(text))

    def finish(self) -> Delta:
        """The rest, after the last text."""
        reasoning, text = ("", "") if self._think is None else self._think.finish()
        pieces = self._pieces(text)
        if self._calls is not None:
            pieces += self._calls.finish()
        reasoning = self._reasoning_filter.feed(reasoning) + self._reasoning_filter.finish()
        delta = self._delta(reasoning, pieces)
        rest = self._text(self._content_filter.finish())
        if not self._follows_call:
            rest += self._space
        return delta + Delta(self._content(rest))

    def answer(self) -> ParsedAnswer:
        """All that was returned so far."""
        content = "".join(part for part in self._parts if isinstance(part, str))
        reasoning = "".join(self._reasoning)
        has_more = bool(reasoning or self._tool_calls)
        return ParsedAnswer(
            None if has_more and not content else content,
            reasoning or None,
            self._tool_calls,
            self._is_whole,
            self._parts,
        )

    def parse_all(self, text: str) -> ParsedAnswer:
        """A whole answer at once."""
        self.feed(text)
        self.finish()
        return self.answer()

    def _pieces(self, text: str) -> list[Piece]:
        if self._calls is None or not text:
            return [text] if text else []
        return self._calls.feed(text)

    def _delta(self, reasoning: str, pieces: Iterable[Piece]) -> Delta:
        parts: list[str | ToolCallDelta] = []
        for piece in pieces:
            if isinstance(piece, Call):
                parts += self._content(self._text(self._content_filter.finish()))
                parts += self._call(piece)
            elif isinstance(piece, Thought):
                reasoning += piece.text
            else:
                parts += self._content(self._text(self._content_filter.feed(piece)))
        self._reasoning.append(reasoning)
        return Delta(tuple(parts), reasoning)

    def _content(self, content: str) -> tuple[str, ...]:
        """As a part of the answer; none where it is empty."""
        if not content:
            return ()
        self._parts.append(content)
        return (content,)

    def _call(self, call: Call) -> list[ToolCallDelta]:
        self._follows_call = True
        if not self._has_content:
            self._space = ""
        index = len(self._tool_calls)
        if index == self._config.max_calls:
            self._is_whole = False
            return []
        made = ToolCall(call.id or self._config.new_id(), call.name, call.arguments)
        self._tool_calls.append(made)
        self._parts.append(made)
        return [ToolCallDelta(index, *made)]

    def _text(self, piece: str) -> str:
        """The part of a piece of content that is surely not white space around a call."""
        if self._calls is None:
            return piece
        if self._follows_call:
            piece = piece.lstrip()
        if not piece:
            return ""
        text = self._space + piece
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._follows_call = self._follows_call and not shown
        self._has_content = self._has_content or bool(shown)
        return shown
