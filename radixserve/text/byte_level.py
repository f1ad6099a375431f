"""Tokens of a byte-level vocabulary as the bytes that they stand for."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from radixserve.text.byte_fallback import decoder_steps

_Decoder = codecs.getincrementaldecoder("utf-8")


class ByteLevel:
    """The bytes of each token, for tokenizers that decode by joining them. Safe in any thread."""

    def __init__(self, backend: Any) -> None:
        """`backend`: of the tokenizers library."""
        self._backend = backend
        added = backend.get_added_tokens_decoder().items()
        self._hidden = dict.fromkeys((token_id for token_id, token in added if token.special), b"")
        self._shown: dict[int, bytes] = {}  # all that were asked for

    @classmethod
    def of(cls, tokenizer: Any) -> ByteLevel | None:
        """None for a tokenizer that decodes in another way."""
        kinds = [step["type"] for step in decoder_steps(tokenizer)]
        return cls(tokenizer.backend_tokenizer) if kinds == ["ByteLevel"] else None

    def hidden(self, keep_special: bool | Collection[int]) -> Mapping[int, bytes]:
        """The special tokens that a text leaves out, where it keeps all, none or some of them."""
        if isinstance(keep_special, bool):
            return {} if keep_special else self._hidden
        if not keep_special:
            return self._hidden
        return {token_id: b"" for token_id in self._hidden if token_id not in keep_special}

    def bytes_of(self, token_ids: Sequence[int], hidden: Mapping[int, bytes]) -> bytes:
        """O(ids), a look-up each."""
        shown, found = self._shown, []
        for token_id in token_ids:
            if (own := hidden.get(token_id)) is None and (own := shown.get(token_id)) is None:
                own = shown[token_id] = self._read(token_id)
            found.append(own)
        return b"".join(found)

    def _read(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""  # decoding leaves it out
        if _BYTE_OF.keys() >= set(token):
            return bytes(_BYTE_OF[character] for character in token)
        return token.encode()  # an added one


def _byte_of() -> dict[str, int]:
    """The characters by which such vocabularies write bytes: those of Latin 1 that can be seen
    stand for themselves, the other bytes in order for U+0100 and on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {
        chr(0x100 + at): byte for at, byte in enumerate(others)
    }


_BYTE_OF = _byte_of()


class ByteLevelDetokenizer:
    """`IncrementalDetokenizer` of a byte-level vocabulary, about ten times as fast."""

    def __init__(self, tokens: ByteLevel, *, keep_special: bool | Collection[int]) -> None:
        self._tokens = tokens
        self._hidden = tokens.hidden(keep_special)
        self._decoder = _Decoder(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        found = self._tokens.bytes_of(token_ids, self._hidden)
        return self._decoder.decode(found)

    def finish(self) -> str:
        """The rest, incomplete characters as U+FFFD."""
        return self._decoder.decode(b"", final=True)
