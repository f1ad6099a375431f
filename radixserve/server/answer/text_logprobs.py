"""`TextLogprobs`: the log-probabilities of the tokens in an answer's text blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from radixserve.arrays import IntArray
from radixserve.request import SamplingParams
from radixserve.server.answer.content_blocks import ContentBlockEvent, ContentBlocks
from radixserve.server.answer.output_parser import OutputParser, OutputParserConfig
from radixserve.server.wire.logprobs import TokenTexts, Tops, chat_entries
from radixserve.text.tokenizer import Tokenizer

Entry = dict[str, Any]  # of a token, in OpenAI's format


class _Token(NamedTuple):
    """A token of the pending text: characters `start` to `end` of it."""

    start: int
    end: int
    entry: Entry


@dataclass(slots=True)
class _Block:
    """The tokens of a text block. `starts`: the index of each token's first character."""

    starts: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    num_chars: int = 0
    num_sent: int = 0  # entries
    num_sent_chars: int = 0


class TextLogprobs:
    """Attributes the tokens of one answer to its text blocks.

    Parsers remove marks, reasoning, calls and the white space around them, and buffer text. So the
    answer is parsed here again, token by token, to see which tokens each new text of a block
    consists of. A token whose text is in two blocks counts for the first.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: IntArray,
        params: SamplingParams,
        parser_config: OutputParserConfig,
        texts: TokenTexts,
    ) -> None:
        keep_special = tuple(params.keep_special_ids) if params.skip_special_tokens else True
        self._detokenizer = tokenizer.detokenizer(prompt_ids.tolist(), keep_special=keep_special)
        self._special_ids = tokenizer.special_ids
        self._texts = texts
        self._parser = OutputParser(parser_config)
        self._content_blocks = ContentBlocks()
        self._blocks: dict[int, _Block] = {}  # by their index among the answer's blocks
        self._partial: list[Entry] = []  # tokens of a character that is not complete yet
        self._pending = ""  # text that is not in a block yet
        self._tokens: list[_Token] = []  # of the pending text

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], tops: Tops | None) -> None:
        """Add tokens. `tops`: {token id: log-probability} of the best tokens at each position."""
        entries = chat_entries(self._texts, token_ids, logprobs, tops)
        for token_id, entry in zip(token_ids, entries, strict=True):
            piece = self._detokenizer.push([token_id])
            if piece:
                self._feed(piece, entry)
            elif token_id not in self._special_ids:  # else it is hidden
                self._partial.append(entry)

    def finish(self) -> None:
        """The answer has ended: attribute the remaining tokens."""
        rest = self._detokenizer.finish()
        if rest and self._partial:
            self._feed(rest, self._partial.pop())
        self._attribute(self._content_blocks.push(self._parser.finish()))

    def next(self, index: int, num_chars: int) -> list[Entry]:
        """The entries of the tokens that begin in the next `num_chars` characters of block
        `index`."""
        block = self._blocks.setdefault(index, _Block())
        first, starts = block.num_sent, block.starts
        block.num_sent_chars += num_chars
        while block.num_sent < len(starts) and starts[block.num_sent] < block.num_sent_chars:
            block.num_sent += 1
        return block.entries[first : block.num_sent]

    def all(self, index: int, num_chars: int) -> list[Entry]:
        """The entries of all tokens of block `index`, whose text has `num_chars` characters."""
        block = self._blocks.get(index, _Block())
        pairs = zip(block.starts, block.entries, strict=True)
        return [entry for start, entry in pairs if start < num_chars]

    def _feed(self, piece: str, entry: Entry) -> None:
        start, end = len(self._pending), len(self._pending) + len(piece)
        self._pending += piece
        self._tokens += [_Token(start, end, part) for part in (*self._partial, entry)]
        self._partial.clear()
        self._attribute(self._content_blocks.push(self._parser.feed(piece)))

    def _attribute(self, events: Iterable[ContentBlockEvent]) -> None:
        deltas = [event for event in events if event.kind == "delta"]
        num_dropped = 0
        for start, text, event in self._places(deltas):
            self._drop(start - num_dropped)  # marks and the white space around them
            num_dropped = start + len(text)
            if event.block.kind == "text":
                block = self._blocks.setdefault(event.block.index, _Block())
                block.num_chars += len(event.delta) - len(text)
                self._take(block, len(text))
            else:
                self._drop(len(text))
        if deltas and deltas[-1].block.kind == "tool_call":  # only its last token may go on
            self._drop(self._tokens[-1].start if self._tokens else len(self._pending))

    def _places(
        self, deltas: Sequence[ContentBlockEvent]
    ) -> list[tuple[int, str, ContentBlockEvent]]:
        """Where the new texts and reasoning stand in the pending text, in order. They are looked
        for from its end, since the parser may hold back what comes before them."""
        places, end = [], len(self._pending)
        for event in reversed(deltas):
            if event.block.kind == "tool_call":
                continue
            text = event.delta
            if text not in self._pending[:end]:  # it begins with white space that preceded a call
                text = text.lstrip()
            end = max(0, self._pending.rfind(text, 0, end))
            places.append((end, text, event))
        return places[::-1]

    def _take(self, block: _Block, num_chars: int) -> None:
        """Move the first characters of the pending text, and their tokens, to a block."""
        for token in self._tokens:
            if token.start < num_chars:
                block.starts.append(block.num_chars + max(0, token.start))
                block.entries.append(token.entry)
        block.num_chars += num_chars
        self._tokens = [token for token in self._tokens if token.start >= num_chars]
        self._drop(num_chars)

    def _drop(self, num_chars: int) -> None:
        """Drop the first characters of the pending text, and the tokens that end in them."""
        self._pending = self._pending[num_chars:]
        self._tokens = [
            _Token(token.start - num_chars, token.end - num_chars, token.entry)
            for token in self._tokens
            if token.end > num_chars
        ]
