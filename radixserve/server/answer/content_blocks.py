"""`ContentBlocks`: an answer as a sequence of blocks of reasoning, text and tool calls.

Each block starts, gets deltas and stops. Anthropic calls them content blocks; OpenAI's responses
call them output items.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from radixserve.server.answer.output_parser import Delta, ParsedAnswer, ToolCall, ToolCallDelta
from radixserve.server.answer.tool_parsers.base import Thought

Kind = Literal["reasoning", "text", "tool_call"]


@dataclass(slots=True)
class ContentBlock:
    """One block. The `text` of a tool call is its arguments as JSON."""

    kind: Kind
    index: int  # among the answer's blocks
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class ContentBlockEvent(NamedTuple):
    """A block starts, gets the text `delta`, or stops."""

    kind: Literal["start", "delta", "stop"]
    block: ContentBlock
    delta: str = ""


class ContentBlocks:
    """Makes the blocks of a stream: `push` each Delta, then `finish`. One block is open at a time.
    `blocks` are those so far."""

    def __init__(self) -> None:
        self.blocks: list[ContentBlock] = []
        self._is_open = False
        self._calls: dict[int, ContentBlock] = {}  # by their index in the deltas

    def push(self, delta: Delta) -> Iterator[ContentBlockEvent]:
        """Add a delta. Yields the events that it causes."""
        for part in delta.parts:
            if isinstance(part, str):
                yield from self._add("text", part)
            elif isinstance(part, Thought):
                yield from self._add("reasoning", part.text)
            else:
                yield from self._add_call(part)

    def finish(self) -> Iterator[ContentBlockEvent]:
        """The answer has ended: stop the open block."""
        if self._is_open:
            self._is_open = False
            yield ContentBlockEvent("stop", self.blocks[-1])

    def _add(self, kind: Kind, text: str) -> Iterator[ContentBlockEvent]:
        if not self._is_open or self.blocks[-1].kind != kind:
            yield from self._open(ContentBlock(kind, len(self.blocks)))
        yield self._delta(text)

    def _add_call(self, call: ToolCallDelta) -> Iterator[ContentBlockEvent]:
        if call.index not in self._calls:
            block = ContentBlock("tool_call", len(self.blocks), call.id or "", call.name or "")
            self._calls[call.index] = block
            yield from self._open(block)
        if call.arguments:
            assert self._calls[call.index] is self.blocks[-1], "tool calls come one after another"
            yield self._delta(call.arguments)

    def _open(self, block: ContentBlock) -> Iterator[ContentBlockEvent]:
        yield from self.finish()
        self.blocks.append(block)
        self._is_open = True
        yield ContentBlockEvent("start", block)

    def _delta(self, text: str) -> ContentBlockEvent:
        block = self.blocks[-1]
        block.pieces.append(text)
        return ContentBlockEvent("delta", block, text)


def content_blocks_of(answer: ParsedAnswer) -> list[ContentBlock]:
    """The blocks of a whole answer, the same as in its stream."""
    blocks: list[ContentBlock] = []
    for part in answer.parts:
        index = len(blocks)
        if isinstance(part, ToolCall):
            blocks.append(ContentBlock("tool_call", index, part.id, part.name, [part.arguments]))
            continue
        kind: Kind = "reasoning" if isinstance(part, Thought) else "text"
        if not blocks or blocks[-1].kind != kind:
            blocks.append(ContentBlock(kind, index))
        blocks[-1].pieces.append(part.text if isinstance(part, Thought) else part)
    return blocks


def reasoning_of(blocks: Iterable[ContentBlock]) -> str:
    """The text of all reasoning blocks."""
    return "".join(block.text for block in blocks if block.kind == "reasoning")
