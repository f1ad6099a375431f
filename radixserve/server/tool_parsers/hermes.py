"""Calls of Hermes and Qwen models: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

from __future__ import annotations

from radixserve.server.tool_parsers.calls import read_call
from radixserve.server.tool_parsers.marked import MarkedParser, Read

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(MarkedParser):
    """A closing tag may be missing at the end of the text: some models end with the object."""

    mark = OPEN

    def _read(self, inner: str, *, has_mark: bool, is_last: bool) -> Read | None:  # noqa: ARG002
        rest = inner.lstrip()
        if not rest:
            return None
        if rest[0] != "{":
            return Read(len(inner) - len(rest))
        end = self._find_end(inner, len(inner) - len(rest))
        if end is None:
            return None
        rest = inner[end:].lstrip()
        size = len(inner) - len(rest)
        if rest.startswith(CLOSE):
            size += len(CLOSE)
        elif rest and not CLOSE.startswith(rest):
            return Read(end)
        elif not is_last:
            return None
        elif rest:
            return Read(len(inner))
        call = read_call(inner[:end])
        return Read(size, () if call is None else (call,))
