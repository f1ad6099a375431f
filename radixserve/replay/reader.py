"""`read_trace`: a file of requests into a `Trace`, in any of three forms.

    hashes   {"timestamp", "input_length", "output_length", "hash_ids" | "hash_runs"}, a header with
             "block_size"; equal ids mean equal whole prefixes
    texts    {"id", "timestamp", "parent", "prefix", "text", "output"}, a header with "prefixes";
             a prompt is its parent's prompt and output, or a prefix, and then the text
    tokens   {"tokens": [ids]} or {"prompt": text or [ids]}, with optional "output_tokens", "output"
             or "output_length"; `Runtime(trace=...)` records this form or the first

All take "timestamp" (milliseconds) or "time" (seconds), "session" and "namespace". Records are put
in order of time; without times they keep the file's order and arrive at once.
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.replay.lines import Line, read_lines
from radixserve.replay.tokens import (
    PRIVATE_OUTPUT,
    HashTokens,
    PackedTokens,
    block_tokens,
    runs_of,
    tokenize,
)
from radixserve.replay.trace import Ints, TokenSource, Trace


def read_trace(
    path: str | os.PathLike[str], *, limit: int | None = None, stitch: bool = True
) -> Trace:
    """Read a trace. `limit`: only the first requests by time; `stitch`: see `replay.tokens`.

    Raises InvalidRequest, with file and line, for what cannot be read as a trace; OSError for a
    file that cannot be opened. Memory goes with the distinct tokens.
    """
    name = os.fspath(path)
    header, lines = read_lines(name)
    first = next(lines, None)
    if first is None:
        raise InvalidRequest(f"{name}: the trace has no requests")
    form = _form_of(header, first)
    records: list[_Record] = []
    for line in chain([first], lines):
        record = _record(line, *form.add(line))
        if records and record.has_time != records[0].has_time:
            raise line.error('either all records have a "time" or "timestamp", or none')
        records.append(record)
    times = np.asarray([record.time for record in records])
    order = np.argsort(times, kind="stable")[:limit]
    times, records = times[order], [records[at] for at in order]
    num_prompt = np.asarray([record.num_prompt for record in records], np.int64)
    num_output = np.asarray([record.num_output for record in records], np.int64)
    sessions = [record.session for record in records]
    source: TokenSource
    is_inferred = False
    if isinstance(form, _HashForm):
        runs = [form.runs[at] for at in order]
        source = HashTokens(form.block_size, runs, num_prompt, num_output, stitch=stitch)
        order = np.arange(len(records))
        if stitch and all(session is None for session in sessions):
            is_inferred, sessions = True, _inferred_sessions(source.continued_by(), len(records))
    else:
        source = form.packed
    return Trace(
        name=str(header.get("trace") or Path(name).name),
        source=source,
        order=order,
        times=times - times[0],
        sessions=sessions,
        namespaces=[record.namespace for record in records],
        num_prompt=num_prompt,
        num_output=num_output,
        has_times=records[0].has_time,
        sessions_inferred=is_inferred,
    )


class _Record(NamedTuple):
    """The fields that all forms have."""

    time: float  # seconds; 0.0 without a time
    has_time: bool
    session: str | None
    namespace: str
    num_prompt: int  # tokens
    num_output: int  # tokens


def _record(line: Line, num_prompt: int, num_output: int) -> _Record:
    if num_prompt < 1:
        raise line.error("the prompt is empty")
    seconds, millis = line.number_at("time"), line.number_at("timestamp")
    time = seconds if seconds is not None else (millis or 0.0) / 1000
    has_time = seconds is not None or millis is not None
    session, namespace = line.text_at("session"), line.text_at("namespace") or ""
    return _Record(time, has_time, session, namespace, num_prompt, num_output)


def _inferred_sessions(later: dict[int, int], count: int) -> list[str | None]:
    """Requests that continue each other are a session, named after the first one."""
    sessions: list[str | None] = [f"#{index}" for index in range(count)]
    for index in range(count):
        if index in later:
            sessions[later[index]] = sessions[index]
    return sessions


# -- the three forms ------------------------------------------------------------------------------

_NEEDED = 'a request needs one of "hash_ids", "hash_runs", "text", "tokens" or "prompt"'


def _form_of(header: dict[str, Any], first: Line) -> _HashForm | _TextForm | _TokenForm:
    """The form of a trace; its `add` reads a line and returns tokens of prompt and output."""
    fields = first.fields
    if "hash_ids" in fields or "hash_runs" in fields:
        return _HashForm(header, first)
    if "text" in fields:
        return _TextForm(header, first)
    if "tokens" in fields or "prompt" in fields:
        return _TokenForm()
    raise first.error(_NEEDED)


class _HashForm:
    def __init__(self, header: dict[str, Any], first: Line) -> None:
        size = header.get("block_size", 512)
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 1 << 20:
            raise InvalidRequest(
                f'{first.path}:1: "block_size" must be tokens a block, got {shown(size)}'
            )
        self.block_size = size
        self.runs: list[Ints] = []  # by line: [k, 2] first id and count

    def add(self, line: Line) -> tuple[int, int]:
        num_prompt, size = line.length_at("input_length"), self.block_size
        if num_prompt is None:
            raise line.error('"input_length" is missing')
        runs = self._read_runs(line)
        num_blocks = int(runs[:, 1].sum())
        if not num_prompt // size <= num_blocks <= -(-num_prompt // size):
            raise line.error(
                f"{num_blocks} blocks of {size} tokens do not fit a prompt of {num_prompt}"
            )
        self.runs.append(runs)
        return num_prompt, line.length_at("output_length") or 0

    def _read_runs(self, line: Line) -> Ints:
        if "hash_ids" in line.fields:
            ids = line.integers_at("hash_ids", width=1)
            if ids is None:
                raise line.list_error("hash_ids", "a list of block ids")
            return runs_of(ids)
        runs = line.integers_at("hash_runs", width=2)
        if runs is None or not (runs[:, 1] > 0).all():
            raise line.list_error("hash_runs", "a list of [first, count] pairs")
        return runs


class _TextForm:
    def __init__(self, header: dict[str, Any], first: Line) -> None:
        prefixes = header.get("prefixes", {})
        texts = prefixes.values() if isinstance(prefixes, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(f'{first.path}:1: "prefixes" must be an object of texts')
        self._prefixes = {name: tokenize(text) for name, text in prefixes.items()}
        self._numbers: dict[str, int] = {}  # by id
        self.packed = PackedTokens()

    def add(self, line: Line) -> tuple[int, int]:
        text = line.text_at("text")
        if text is None:
            raise line.error('"text" is missing')
        prompt = np.concatenate((self._base(line), tokenize(text)))
        output = tokenize(line.text_at("output") or "")
        name = line.text_at("id")
        if name is not None:
            if name in self._numbers:
                raise line.error(f'"id" {name} is there already')
            self._numbers[name] = len(self.packed)
        self.packed.add(prompt, output)
        return len(prompt), len(output)

    def _base(self, line: Line) -> IntArray:
        """The tokens before the line's own text: those of its parent, or of its prefix."""
        parent = line.text_at("parent")
        if parent is not None and parent != "-1":
            number = self._numbers.get(parent)
            if number is None:
                raise line.error(f'"parent" {parent} is not the "id" of a line before')
            return np.concatenate(self.packed.tokens(number))
        prefix = line.text_at("prefix")
        if prefix is None:
            return np.empty(0, np.int32)
        if prefix not in self._prefixes:
            raise line.error(f'"prefix" {prefix} is not in the header')
        return self._prefixes[prefix]


class _TokenForm:
    def __init__(self) -> None:
        self.packed = PackedTokens()

    def add(self, line: Line) -> tuple[int, int]:
        prompt = self._first_of(line, "tokens", "prompt")
        if prompt is None:
            raise line.error(_NEEDED)
        output = self._first_of(line, "output_tokens", "output")
        if output is None:  # only its length is known
            count = line.length_at("output_length") or 0
            output = block_tokens(PRIVATE_OUTPUT + len(self.packed), count)
        self.packed.add(prompt, output)
        return len(prompt), len(output)

    def _first_of(self, line: Line, *names: str) -> IntArray | None:
        """[n] int32: the first of these fields that is there, token ids or text."""
        for name in names:
            given = line.fields.get(name)
            if isinstance(given, str) and name != "tokens":
                return tokenize(given)
            if given is not None:
                ids = line.integers_at(name, width=1)
                if ids is None or (ids >= 2**31).any():
                    or_text = "" if name == "tokens" else "text or "
                    raise line.list_error(name, f"{or_text}a list of token ids")
                return ids.astype(np.int32)
        return None
