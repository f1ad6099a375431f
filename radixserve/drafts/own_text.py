"""`OwnText`: what followed when the request's last tokens occurred in it before."""

from __future__ import annotations

from collections.abc import Sequence

from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.drafts.source import DraftContext, DraftSource
from radixserve.text.token_search import find_last

SHORT_RUN, LONG_RUN = 4, 8  # tokens looked for; what follows the longer run is likelier


class OwnText(DraftSource):
    """Drafts from prompt and answer of the request itself. Keeps no index: C finds 4 tokens in
    10,000 in about 10 us."""

    name = "request"

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, int]] = {}  # by request id: number of its tokens at the
        # last draft, and where that began

    def draft(self, context: DraftContext, most: int) -> Sequence[int]:
        tokens, name = context.tokens, context.request.request_id
        size = len(tokens)
        num_before, place = self._places.get(name, (0, -1))
        if place >= 0:  # the text is followed as long as it is right
            passed = size - num_before
            if (tokens[place : place + passed] == tokens[num_before:]).all():
                place += passed
            else:
                place = -1
        if place < 0:
            place = _find(tokens.tobytes(), size)
        self._places[name] = size, place
        return tokens[place : place + most].tolist() if place >= 0 else ()

    def end(self, context: DraftContext) -> None:
        self._places.pop(context.request.request_id, None)


def _find(text: bytes, size: int) -> int:
    """Returns the index after the latest earlier occurrence of the last tokens, -1 without one."""
    if size <= SHORT_RUN:
        return -1
    place = find_last(text, text[-SHORT_RUN * TOKEN_BYTES :], size - 1)
    if place < LONG_RUN:
        return place
    longer = find_last(text, text[-LONG_RUN * TOKEN_BYTES :], place)
    return place if longer < 0 else longer
