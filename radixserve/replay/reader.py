"""`read_trace`: reads a file of requests, in any of these formats, into a `Trace`.

    hashes   {"timestamp", "input_length", "output_length", "hash_ids" | "hash_runs"}, a header with
             "block_size"; equal ids mean equal whole prefixes
    texts    {"id", "timestamp", "parent", "prefix", "text", "output"}, a header with "prefixes";
             a prompt is its parent's prompt and output, or a prefix, and then the text
    tokens   {"tokens": [ids]} or {"prompt": text or [ids]}, with optional "output_tokens", "output"
             or "output_length"; `Runtime(trace=...)` records this format or the first
    logs     request logs of vLLM and SGLang, see `engine_logs.py`, and recorded KV events, see
             `kv_event_log.py`; both become lines of tokens

A line may also have "timestamp" (milliseconds) or "time" (seconds), "session" and "namespace".
Requests are put in order of time; without times, they keep the file's order and arrive at once.
`_format_of` recognises the format; to add one, add a class with `add` and `source` there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.replay.engine_logs import is_engine_log, logged_requests
from radixserve.replay.kv_event_log import is_event_log, stored_requests
from radixserve.replay.lines import Line, beginning, json_lines
from radixserve.replay.trace import (
    PRIVATE_OUTPUT,
    HashTokens,
    Ints,
    PackedTokens,
    Trace,
    block_tokens,
    tokenize,
)

_NEEDED = 'a request needs one of "hash_ids", "hash_runs", "text", "tokens" or "prompt"'


class _Record(NamedTuple):
    """The fields of a request that all formats have."""

    time: float  # seconds; 0.0 without a time
    has_time: bool
    session: str | None
    namespace: str
    num_prompt: int  # tokens
    num_output: int  # tokens


def read_trace(
    path: str | os.PathLike[str], *, limit: int | None = None, stitch: bool = True
) -> Trace:
    """Read a trace. `limit`: only so many requests, the first by time. `stitch`: see `HashTokens`.

    Raises InvalidRequest, with file and line, for a file that is not a trace, OSError for a file
    that cannot be opened. Memory is proportional to the distinct tokens.
    """
    name = os.fspath(path)
    header, lines = _lines_of(name)
    first = next(lines, None)
    if first is None:
        raise InvalidRequest(f"{name}: the trace has no requests")
    trace_format = _format_of(header, first)
    records: list[_Record] = []
    for line in chain([first], lines):
        records.append(_record(line, *trace_format.add(line)))
        if records[-1].has_time != records[0].has_time:
            raise line.error('either all records have a "time" or "timestamp", or none')
    order = np.argsort([record.time for record in records], kind="stable")[:limit]
    columns = zip(*(records[index] for index in order), strict=True)
    times, has_time, sessions, namespaces, num_prompt, num_output = map(list, columns)
    lengths = np.asarray(num_prompt, np.int64), np.asarray(num_output, np.int64)
    source = trace_format.source(order, *lengths, stitch)
    is_inferred = (
        stitch and isinstance(source, HashTokens) and all(session is None for session in sessions)
    )
    if is_inferred and isinstance(source, HashTokens):
        sessions = source.inferred_sessions()
    return Trace(
        name=str(header.get("trace") or Path(name).name),
        source=source,
        times=np.asarray(times) - times[0],
        sessions=sessions,
        namespaces=namespaces,
        num_prompt=lengths[0],
        num_output=lengths[1],
        has_times=has_time[0],
        sessions_inferred=is_inferred,
        words=trace_format.words,
    )


def _lines_of(path: str) -> tuple[dict[str, Any], Iterator[Line]]:
    """The header and the lines of a trace; of another engine's log the requests."""
    start = beginning(path)
    if start[:1] == b"\x80":
        raise InvalidRequest(
            f"{path}: a pickle is not read, since that would run the code in it; SGLang writes "
            "the same requests with --log-requests --log-requests-level 3"
        )
    if is_event_log(start):
        return {}, stored_requests(path)
    if is_engine_log(start):
        return {}, logged_requests(path)
    return json_lines(path)


def _record(line: Line, num_prompt: int, num_output: int) -> _Record:
    if num_prompt < 1:
        raise line.error("the prompt is empty")
    seconds, millis = line.number_at("time"), line.number_at("timestamp")
    time = seconds if seconds is not None else (millis or 0.0) / 1000
    has_time = seconds is not None or millis is not None
    session, namespace = line.text_at("session"), line.text_at("namespace") or ""
    return _Record(time, has_time, session, namespace, num_prompt, num_output)


def _format_of(header: dict[str, Any], first: Line) -> _HashFormat | _TextFormat | _TokenFormat:
    """The reader of a trace's format, by its first line. `add` reads a line and returns the numbers
    of its prompt and output tokens; `source` returns the tokens of all lines. Raises
    InvalidRequest."""
    fields = first.fields
    if "hash_ids" in fields or "hash_runs" in fields:
        return _HashFormat(header, first)
    if "text" in fields:
        return _TextFormat(header, first)
    if "tokens" in fields or "prompt" in fields:
        return _TokenFormat()
    raise first.error(_NEEDED)


class _HashFormat:
    words: Mapping[int, str] = {}

    def __init__(self, header: dict[str, Any], first: Line) -> None:
        size = header.get("block_size", 512)
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 1 << 20:
            raise InvalidRequest(
                f'{first.path}:1: "block_size" must be tokens a block, got {shown(size)}'
            )
        self._block_size = size
        self._ids: list[Ints] = []  # by line: [blocks]

    def add(self, line: Line) -> tuple[int, int]:
        num_prompt, size = line.length_at("input_length"), self._block_size
        if num_prompt is None:
            raise line.error('"input_length" is missing')
        firsts, counts = self._runs(line)
        num_blocks = int(counts.sum())
        if not num_prompt // size <= num_blocks <= -(-num_prompt // size):
            raise line.error(
                f"{num_blocks} blocks of {size} tokens do not fit a prompt of {num_prompt}"
            )
        shifts = firsts - (np.cumsum(counts) - counts)
        self._ids.append(np.repeat(shifts, counts) + np.arange(num_blocks))
        return num_prompt, line.length_at("output_length") or 0

    def _runs(self, line: Line) -> tuple[Ints, Ints]:
        """The first ids and the lengths of the runs of consecutive block ids."""
        if "hash_ids" in line.fields:
            ids = line.integers_at("hash_ids", width=1)
            if ids is None:
                raise line.wrong("hash_ids", "a list of block ids")
            return ids, np.ones_like(ids)
        pairs = line.integers_at("hash_runs", width=2)
        if pairs is None or not (pairs[:, 1] > 0).all():
            raise line.wrong("hash_runs", "a list of [first, count] pairs")
        return pairs[:, 0], pairs[:, 1]

    def source(self, order: Ints, num_prompt: Ints, num_output: Ints, stitch: bool) -> HashTokens:
        ids = [self._ids[index] for index in order]
        return HashTokens(self._block_size, ids, num_prompt, num_output, stitch=stitch)


class _PackedFormat:
    """The formats whose lines hold their tokens."""

    def __init__(self) -> None:
        self._packed = PackedTokens()
        self.words: dict[int, str] = {}  # see `Trace.words`

    def source(self, order: Ints, num_prompt: Ints, num_output: Ints, stitch: bool) -> PackedTokens:  # noqa: ARG002
        return self._packed.reordered(order)


class _TextFormat(_PackedFormat):
    def __init__(self, header: dict[str, Any], first: Line) -> None:
        super().__init__()
        prefixes = header.get("prefixes", {})
        texts = prefixes.values() if isinstance(prefixes, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(f'{first.path}:1: "prefixes" must be an object of texts')
        self._prefixes = {name: tokenize(text, self.words) for name, text in prefixes.items()}
        self._numbers: dict[str, int] = {}  # by id

    def add(self, line: Line) -> tuple[int, int]:
        text, name = line.text_at("text"), line.text_at("id")
        if text is None:
            raise line.error('"text" is missing')
        prompt = np.concatenate((self._base(line), tokenize(text, self.words)))
        if name is not None and self._numbers.setdefault(name, len(self._packed)) != len(
            self._packed
        ):
            raise line.error(f'"id" {name} is that of an earlier line')
        return self._packed.add(prompt, tokenize(line.text_at("output") or "", self.words))

    def _base(self, line: Line) -> IntArray:
        """The tokens before the line's own text: of its parent, or of its prefix, or none."""
        parent, prefix = line.text_at("parent"), line.text_at("prefix")
        if parent is not None and parent != "-1":
            if parent not in self._numbers:
                raise line.error(f'"parent" {parent} is not the "id" of a line before')
            return np.concatenate(self._packed.tokens(self._numbers[parent]))
        if prefix is not None and prefix not in self._prefixes:
            raise line.error(f'"prefix" {prefix} is not in the header')
        return np.empty(0, np.int32) if prefix is None else self._prefixes[prefix]


class _TokenFormat(_PackedFormat):
    def __init__(self) -> None:
        super().__init__()
        self._unknown: set[int] = set()  # requests of whose output only the length is known

    def add(self, line: Line) -> tuple[int, int]:
        prompt = self._first_of(line, "tokens", "prompt")
        if prompt is None:
            raise line.error(_NEEDED)
        output = self._first_of(line, "output_tokens", "output")
        if output is None:  # only its length is known
            count = line.length_at("output_length") or 0
            if count:
                self._unknown.add(len(self._packed))
            output = block_tokens(PRIVATE_OUTPUT + len(self._packed), count)
        return self._packed.add(prompt, output)

    def source(self, order: Ints, num_prompt: Ints, num_output: Ints, stitch: bool) -> PackedTokens:
        packed = super().source(order, num_prompt, num_output, stitch)
        unknown = [place for place, index in enumerate(order.tolist()) if index in self._unknown]
        return packed.stitched(unknown) if stitch and unknown else packed

    def _first_of(self, line: Line, *names: str) -> IntArray | None:
        """[n] int32: the tokens of the first of these fields that exists, token ids or text."""
        for name in names:
            given = line.fields.get(name)
            if isinstance(given, str) and name != "tokens":
                return tokenize(given, self.words)
            if given is not None:
                ids = line.integers_at(name, width=1)
                if ids is None or (ids >= 2**31).any():
                    or_text = "" if name == "tokens" else "text or "
                    raise line.wrong(name, f"{or_text}a list of token ids")
                return ids.astype(np.int32)
        return None
