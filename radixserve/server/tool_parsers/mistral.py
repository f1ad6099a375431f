"""Calls of Mistral models: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and the newer
`[TOOL_CALLS]name[ARGS]{...}`, one mark a call."""

from __future__ import annotations

import re

from radixserve.server.tool_parsers.calls import Call, call_of, read_json
from radixserve.server.tool_parsers.marked import MarkedParser, Read

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_HEAD = re.compile(r"\s*([\w.:-]{1,128})\s*(?:\[CALL_ID\]\s*([\w-]{1,64})\s*)?(?:\[ARGS\]\s*)?")
_BEGUN_HEAD = re.compile(r"\s*[\w.:\s\[\]-]{0,256}")


class MistralParser(MarkedParser):
    """A list is calls where all of its items are."""

    mark = OPEN

    def _read(self, inner: str, *, has_mark: bool, is_last: bool) -> Read | None:  # noqa: ARG002
        rest = inner.lstrip()
        if rest.startswith("["):
            end = self._find_end(inner, len(inner) - len(rest))
            return None if end is None else Read(end, _items(inner[:end]))
        brace = inner.find("{")
        if brace < 0:
            is_begun = _BEGUN_HEAD.fullmatch(inner) is not None
            return None if is_begun else Read(len(inner) - len(rest))
        head = _HEAD.fullmatch(inner, 0, brace)
        if head is None:
            return Read(brace)
        end = self._find_end(inner, brace)
        return None if end is None else Read(end, _call(head[1], head[2], inner[brace:end]))


def _items(text: str) -> tuple[Call, ...]:
    try:
        found = [call_of(item) for item in read_json(text)]
    except ValueError:
        return ()
    calls = tuple(call for call in found if call is not None)
    return calls if len(calls) == len(found) else ()


def _call(name: str, call_id: str | None, arguments: str) -> tuple[Call, ...]:
    try:
        call = call_of({"name": name, "arguments": read_json(arguments), "id": call_id})
    except ValueError:
        return ()
    return () if call is None else (call,)
