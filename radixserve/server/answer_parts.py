"""`AnswerParts`: an answer as a row of parts (reasoning, text, tool calls), each opened, grown and
closed in turn: what Anthropic calls content blocks and OpenAI's responses output items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from radixserve.server.output_parser import Delta, ParsedAnswer, ToolCallDelta

Kind = Literal["reasoning", "text", "tool_call"]


@dataclass(slots=True)
class Part:
    """One part; `text` grows: of a tool call it is its arguments as JSON."""

    kind: Kind
    index: int  # its place in the answer
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class PartEvent(NamedTuple):
    """`piece` is what a part has grown by."""

    kind: Literal["open", "grow", "close"]
    part: Part
    piece: str = ""


class AnswerParts:
    """The parts of a stream: `push` each Delta, then `finish`. At most one is open at a time."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._is_open = False
        self._calls: dict[int, Part] = {}  # by their index in the deltas

    def push(self, delta: Delta) -> Iterator[PartEvent]:
        if delta.reasoning:
            yield from self._grow("reasoning", delta.reasoning)
        for part in delta.parts:
            if isinstance(part, str):
                yield from self._grow("text", part)
            else:
                yield from self._grow_call(part)

    def finish(self) -> Iterator[PartEvent]:
        if self._is_open:
            self._is_open = False
            yield PartEvent("close", self.parts[-1])

    def _grow(self, kind: Kind, text: str) -> Iterator[PartEvent]:
        if not self._is_open or self.parts[-1].kind != kind:
            yield from self._open(Part(kind, len(self.parts)))
        yield self._grown(text)

    def _grow_call(self, call: ToolCallDelta) -> Iterator[PartEvent]:
        if call.index not in self._calls:
            part = Part("tool_call", len(self.parts), call.id or "", call.name or "")
            self._calls[call.index] = part
            yield from self._open(part)
        if call.arguments:
            assert self._calls[call.index] is self.parts[-1], "tool calls come one after another"
            yield self._grown(call.arguments)

    def _open(self, part: Part) -> Iterator[PartEvent]:
        yield from self.finish()
        self.parts.append(part)
        self._is_open = True
        yield PartEvent("open", part)

    def _grown(self, text: str) -> PartEvent:
        part = self.parts[-1]
        part.pieces.append(text)
        return PartEvent("grow", part, text)


def parts_of(answer: ParsedAnswer) -> list[Part]:
    """The parts of a whole answer: those that its stream has."""
    found: list[Part] = []
    if answer.reasoning:
        found.append(Part("reasoning", 0, pieces=[answer.reasoning]))
    for part in answer.parts:
        if not isinstance(part, str):
            found.append(Part("tool_call", len(found), part.id, part.name, [part.arguments]))
        elif found and found[-1].kind == "text":
            found[-1].pieces.append(part)
        else:
            found.append(Part("text", len(found), pieces=[part]))
    return found


def reasoning_of(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if part.kind == "reasoning")
