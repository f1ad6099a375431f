"""`BodyDecoder`: decodes a request's body in one of the content codings gzip and deflate."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from radixserve.checks import shown
from radixserve.server.wire.errors import ApiError

CODINGS = "gzip, deflate"
_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's numbers of the formats
_ZLIB_METHOD = 8  # the low four bits of the first byte of zlib's format


class BodyDecoder:
    """Decodes a body part by part, in pieces of bounded size. Raises ApiError 400 if the parts are
    not in the coding; a second gzip member is an error, too."""

    def __init__(self, coding: str, piece_bytes: int) -> None:
        """`piece_bytes`: the size of the largest piece."""
        self._coding = coding
        self._piece_bytes = piece_bytes
        self._decompressor = zlib.decompressobj(_GZIP) if coding == "gzip" else None
        self._has_begun = False

    @classmethod
    def of(cls, header: str, piece_bytes: int) -> BodyDecoder | None:
        """The decoder for a content-encoding header; None without a coding. Raises ApiError 415 for
        other codings."""
        coding = header.strip().lower()
        if coding in ("", "identity"):
            return None
        coding = "gzip" if coding == "x-gzip" else coding
        if coding not in ("gzip", "deflate"):
            raise ApiError(
                415,
                f"the content encoding must be gzip or deflate, got {shown(header[:64])}",
                headers={"accept-encoding": CODINGS, "connection": "close"},
            )
        return cls(coding, piece_bytes)

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """Decode the next part of the body. A piece is decoded when it is asked for, so that a
        caller who stops spends neither time nor memory on the rest."""
        if not part:
            return
        self._has_begun = True
        if self._decompressor is None:  # deflate: in zlib's format, or raw as some clients send it
            is_zlib = part[0] & 15 == _ZLIB_METHOD
            self._decompressor = zlib.decompressobj(_ZLIB if is_zlib else _RAW)
        is_whole = False  # all that the part contains has been decoded
        while not is_whole and not self._decompressor.eof:
            try:
                piece = self._decompressor.decompress(part, self._piece_bytes)
            except zlib.error:
                raise ApiError(400, f"the body is not valid {self._coding}") from None
            part = self._decompressor.unconsumed_tail
            is_whole = not part and len(piece) < self._piece_bytes
            yield piece
        if part or self._decompressor.unused_data:
            raise ApiError(400, f"the body goes on after the end of its {self._coding} data")

    def check_end(self) -> None:
        """Raise ApiError 400 if the body has ended too early."""
        if self._has_begun and not (self._decompressor and self._decompressor.eof):
            raise ApiError(400, f"the body ends before the end of its {self._coding} data")
