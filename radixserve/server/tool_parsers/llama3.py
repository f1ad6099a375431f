"""Calls of Llama 3: `{"name": ..., "parameters": {...}}`, alone or after `<|python_tag|>`."""

from __future__ import annotations

from collections.abc import Collection

from radixserve.server.tool_parsers.calls import read_call
from radixserve.server.tool_parsers.marked import MarkedParser, Read

TAG = "<|python_tag|>"


class Llama3Parser(MarkedParser):
    """An object without the tag is a call where it names one of the tools, and only at the start of
    the answer or after another call, with a semicolon between them. Python code after the tag is
    text."""

    mark = TAG
    is_optional = True

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names

    def _read(self, inner: str, *, has_mark: bool, is_last: bool) -> Read | None:  # noqa: ARG002
        rest = inner.lstrip(" \t\r\n;")
        if not rest:
            return None
        start = len(inner) - len(rest)
        if rest[0] != "{":
            return Read(start)
        end = self._find_end(inner, start)
        if end is None:
            return None
        call = read_call(inner[start:end])
        is_call = call is not None and (has_mark or call.name in self._names)
        return Read(end, (call,) if call is not None and is_call else ())
