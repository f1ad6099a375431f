"""Search of token ids in a text of token ids, both as int32 bytes: C's search of bytes, with places
between tokens left out."""

from __future__ import annotations

from radixserve.cache.tokens import TOKEN_BYTES


def find_last(text: bytes | bytearray, wanted: bytes, end: int) -> int:
    """Returns the index after the last occurrence of the tokens `wanted` within the first `end`
    tokens of `text`; -1 without one. O(end), in C."""
    stop = end * TOKEN_BYTES
    while (place := text.rfind(wanted, 0, stop)) >= 0:
        if not place % TOKEN_BYTES:
            return (place + len(wanted)) // TOKEN_BYTES
        stop = place + len(wanted) - 1
    return -1


def find_first(text: bytes | bytearray, wanted: bytes, start: int) -> int:
    """Returns the index after the first occurrence of the tokens `wanted` from index `start` of
    `text` on; -1 without one. O(tokens), in C."""
    begin = start * TOKEN_BYTES
    while (place := text.find(wanted, begin)) >= 0:
        if not place % TOKEN_BYTES:
            return (place + len(wanted)) // TOKEN_BYTES
        begin = place + 1
    return -1
