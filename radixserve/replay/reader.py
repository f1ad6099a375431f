"""`read_trace`: a file of requests into a `Trace`, whichever of three forms it has.

    hashes   {"timestamp", "input_length", "output_length", "hash_ids" | "hash_runs"}, a header with
             "block_size"; equal ids mean equal whole prefixes
    texts    {"id", "timestamp", "parent", "prefix", "text", "output"}, a header with "prefixes";
             a prompt is its parent's prompt and output, or a prefix, and then the text
    tokens   {"tokens": [ids]} or {"prompt": text or [ids]}, with optional "output_tokens", "output"
             or "output_length"; what `Runtime(trace=...)` records is of this form or of the first

All take "timestamp" (milliseconds) or "time" (seconds), "session" and "namespace". Records are put
in order of time; without times they keep the file's order and arrive at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from radixserve.errors import InvalidRequest
from radixserve.replay.forms import FORMS, Chosen, HashReader, TextReader, TokenReader
from radixserve.replay.lines import Line, read_lines
from radixserve.replay.tokens import HashTokens
from radixserve.replay.trace import Trace


@dataclass(slots=True)
class _Columns:
    """What all forms have in common, by line."""

    times: list[float] = field(default_factory=list)
    sessions: list[str | None] = field(default_factory=list)
    namespaces: list[str] = field(default_factory=list)
    num_prompt: list[int] = field(default_factory=list)
    num_output: list[int] = field(default_factory=list)
    has_times: bool = True

    def add(self, line: Line, num_prompt: int, num_output: int) -> None:
        if num_prompt < 1:
            raise line.error("the prompt is empty")
        seconds, millis = line.number_at("time"), line.number_at("timestamp")
        has_time = seconds is not None or millis is not None
        if not self.times:
            self.has_times = has_time
        elif has_time != self.has_times:
            raise line.error('either all records have a "time" or "timestamp", or none')
        self.times.append(seconds if seconds is not None else (millis or 0.0) / 1000)
        self.sessions.append(line.text_at("session"))
        self.namespaces.append(line.text_at("namespace") or "")
        self.num_prompt.append(num_prompt)
        self.num_output.append(num_output)


def read_trace(
    path: str | os.PathLike[str], *, limit: int | None = None, stitch: bool = True
) -> Trace:
    """Read a trace. `limit`: only the first requests by time; `stitch`: see `HashTokens`.

    Raises InvalidRequest, with file and line, for what cannot be read as a trace; OSError for a
    file that cannot be opened. Memory goes with the distinct tokens.
    """
    name = os.fspath(path)
    header, lines = read_lines(name)
    first = next(lines, None)
    if first is None:
        raise InvalidRequest(f"{name}: the trace has no requests")
    columns = _Columns()
    reader = _reader_for(header, first)
    for line in chain([first], lines):
        columns.add(line, *reader.add(line))
    times = np.asarray(columns.times)
    order = np.argsort(times, kind="stable")[:limit]
    num_prompt = np.asarray(columns.num_prompt, np.int64)[order]
    num_output = np.asarray(columns.num_output, np.int64)[order]
    source, numbers = reader.finish(Chosen(order, num_prompt, num_output, stitch))
    sessions = [columns.sessions[at] for at in order]
    is_silent = not any(session is not None for session in sessions)
    if isinstance(source, HashTokens) and stitch and is_silent:
        sessions = _inferred_sessions(source.continued_by(), len(order))
    return Trace(
        name=str(header.get("trace") or Path(name).name),
        source=source,
        order=numbers,
        times=times[order] - times[order[0]],
        sessions=sessions,
        namespaces=[columns.namespaces[at] for at in order],
        num_prompt=num_prompt,
        num_output=num_output,
        has_times=columns.has_times,
        sessions_inferred=is_silent and any(session is not None for session in sessions),
    )


def _reader_for(header: dict[str, Any], first: Line) -> HashReader | TextReader | TokenReader:
    fields = first.fields
    if "hash_ids" in fields or "hash_runs" in fields:
        return HashReader(header, first)
    if "text" in fields:
        return TextReader(header, first)
    if "tokens" in fields or "prompt" in fields:
        return TokenReader()
    raise first.error(f"a request needs one of {FORMS}")


def _inferred_sessions(later: dict[int, int], count: int) -> list[str | None]:
    """Requests that continue each other are a session, named after the first one."""
    sessions: list[str | None] = [f"#{index}" for index in range(count)]
    for index in range(count):
        if index in later:
            sessions[later[index]] = sessions[index]
    return sessions
