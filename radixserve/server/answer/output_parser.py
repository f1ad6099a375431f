"""`OutputParser`: splits an answer's text into content, reasoning and tool calls.

It combines a `ReasoningParser` (`reasoning.py`) with the `ToolParser` of the model's style
(`tool_styles.py`). The text comes from the engine already cut at stop strings.
"""

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
    """A tool call in an answer."""

    id: str
    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. Only the first piece of a call has `id` and `name`."""

    index: int
    id: str | None
    name: str | None
    arguments: str  # a piece of the JSON text


@dataclass(frozen=True, slots=True)
class Delta:
    """The new part of an answer. `parts`: non-empty content, reasoning and calls, in order."""

    parts: tuple[str | Thought | ToolCallDelta, ...] = ()

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def tool_calls(self) -> tuple[ToolCallDelta, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCallDelta))

    def without_reasoning(self) -> Delta:
        return Delta(tuple(part for part in self.parts if not isinstance(part, Thought)))

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __add__(self, other: Delta) -> Delta:
        return Delta(self.parts + other.parts)


class ParsedAnswer(NamedTuple):
    """A whole answer.

    content     None for an answer of reasoning or calls alone
    reasoning   None without any
    tool_calls  in order
    is_whole    False: calls beyond `max_calls`, or a call that was cut, were left out
    parts       content, reasoning and calls in order
    """

    content: str | None
    reasoning: str | None
    tool_calls: list[ToolCall]
    is_whole: bool
    parts: list[str | Thought | ToolCall]


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class OutputParserConfig:
    """How the answers to a request are parsed.

    calls        makes the tool parser of one answer; None: calls are not parsed
    grammar      the Lark grammar of the answers; None: any text is allowed
    call_marks   marks of calls that end reasoning: they cannot be anything else
    thoughts     the marks around reasoning; None: reasoning is not parsed
    is_thinking  the prompt ends with the opening mark: answers begin with reasoning
    keep_special_ids  special tokens that the parsers need in the text
    hidden       marks that are removed from content and reasoning
    has_only_calls  a call is enforced: all other text is the beginning of one that was cut, and is
                 left out
    max_calls    calls beyond this number are left out; None: all are kept
    new_id       makes the id of a call
    """

    calls: Callable[[], ToolParser] | None = None
    call_marks: tuple[str, ...] = ()
    grammar: str | None = None
    thoughts: ThoughtMarks | None = None
    is_thinking: bool = False
    keep_special_ids: tuple[int, ...] = ()
    hidden: tuple[str, ...] = ()
    max_calls: int | None = None
    has_only_calls: bool = False
    new_id: Callable[[], str] = new_call_id

    @property
    def is_plain(self) -> bool:
        """Whether the whole text is content."""
        return self.calls is None and self.thoughts is None


PLAIN = OutputParserConfig()


class OutputParser:
    """Parses one answer, whole (`parse_all`) or in pieces (`feed`, then `finish`).

    White space around calls and reasoning is removed. A call is returned when it is complete, so
    that its arguments are valid JSON. Text that turns out not to be a call stays content.
    """

    def __init__(self, config: OutputParserConfig = PLAIN) -> None:
        self._config = config
        self._think = None
        if config.thoughts is not None:
            self._think = ReasoningParser(
                config.is_thinking, config.thoughts, config.calls, config.call_marks
            )
        self._calls = config.calls() if config.calls is not None else None
        self._content_filter = MarkFilter(config.hidden)
        self._reasoning_filter = MarkFilter(config.hidden)
        self._space = ""  # white space that becomes content only if more content follows
        self._has_content = False
        self._follows_call = False
        self._is_whole = True
        self._num_calls = 0
        self._parts: list[str | Thought | ToolCall] = []

    def feed(self, text: str) -> Delta:
        """Add the next text of the answer. Returns the parts that are certain now."""
        if self._config.is_plain:
            return Delta(self._content(text))
        reasoning = ""
        if self._think is not None:
            reasoning, text = self._think.feed(text)
        return self._delta([*_thoughts(reasoning), *self._pieces(text)])

    def finish(self) -> Delta:
        """The answer has ended. Returns the remaining parts."""
        reasoning, text = ("", "") if self._think is None else self._think.finish()
        pieces = [*_thoughts(reasoning), *self._pieces(text)]
        if self._calls is not None:
            pieces += self._calls.finish()
        delta = self._delta(pieces)
        delta += Delta(self._thought(self._reasoning_filter.finish()))
        rest = self._text(self._content_filter.finish())
        if not self._follows_call:
            rest += self._space
        return delta + Delta(self._content(rest))

    def answer(self) -> ParsedAnswer:
        """All parts that were returned so far, as one answer."""
        content = "".join(part for part in self._parts if isinstance(part, str))
        reasoning = "".join(part.text for part in self._parts if isinstance(part, Thought))
        tool_calls = [part for part in self._parts if isinstance(part, ToolCall)]
        return ParsedAnswer(
            None if (reasoning or tool_calls) and not content else content,
            reasoning or None,
            tool_calls,
            self._is_whole,
            self._parts,
        )

    def parse_all(self, text: str) -> ParsedAnswer:
        """Parse a whole answer."""
        self.feed(text)
        self.finish()
        return self.answer()

    def _pieces(self, text: str) -> list[Piece]:
        if self._calls is None or not text:
            return [text] if text else []
        return self._calls.feed(text)

    def _delta(self, pieces: Iterable[Piece]) -> Delta:
        parts: list[str | Thought | ToolCallDelta] = []
        for piece in pieces:
            if isinstance(piece, str):
                parts += self._thought(self._reasoning_filter.finish())
                parts += self._content(self._text(self._content_filter.feed(piece)))
                continue
            parts += self._content(self._text(self._content_filter.finish()))
            if isinstance(piece, Thought):
                parts += self._thought(self._reasoning_filter.feed(piece.text))
            else:
                parts += self._thought(self._reasoning_filter.finish())
                parts += self._call(piece)
        return Delta(tuple(parts))

    def _content(self, content: str) -> tuple[str, ...]:
        """Add content to the answer. Returns it as a part; () if it is empty."""
        if not content:
            return ()
        if self._config.has_only_calls:
            self._is_whole = self._is_whole and not content.strip()
            return ()
        self._parts.append(content)
        return (content,)

    def _thought(self, reasoning: str) -> tuple[Thought, ...]:
        if not reasoning:
            return ()
        self._parts.append(Thought(reasoning))
        return (Thought(reasoning),)

    def _call(self, call: Call) -> list[ToolCallDelta]:
        self._follows_call = True
        if not self._has_content:
            self._space = ""
        index = self._num_calls
        if index == self._config.max_calls:
            self._is_whole = False
            return []
        made = ToolCall(call.id or self._config.new_id(), call.name, call.arguments)
        self._num_calls += 1
        self._parts.append(made)
        return [ToolCallDelta(index, *made)]

    def _text(self, piece: str) -> str:
        """The part of a piece of content that is certainly not white space around a call."""
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


def _thoughts(reasoning: str) -> list[Piece]:
    return [Thought(reasoning)] if reasoning else []
