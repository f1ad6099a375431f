"""`ByteLevel`: the bytes of each token of a byte-level vocabulary, and a detokenizer for them."""

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
        self._shown: dict[int, bytes] = {}  # visible tokens read so far

    @classmethod
    def of(cls, tokenizer: Any) -> ByteLevel | None:
        """Returns the bytes of a transformers tokenizer's tokens; None if it does not decode by
        joining bytes."""
        kinds = [step["type"] for step in decoder_steps(tokenizer)]
        return cls(tokenizer.backend_tokenizer) if kinds == ["ByteLevel"] else None

    def hidden(self, keep_special: bool | Collection[int]) -> Mapping[int, bytes]:
        """Returns the special tokens to leave out, each mapped to b"".

        `keep_special`: True keeps all of them, False none; otherwise the ids to keep."""
        if isinstance(keep_special, bool):
            return {} if keep_special else self._hidden
        if not keep_special:
            return self._hidden
        return {token_id: b"" for token_id in self._hidden if token_id not in keep_special}

    def bytes_of(self, token_ids: Sequence[int], hidden: Mapping[int, bytes]) -> bytes:
        """Returns the joined bytes of the tokens, without those in `hidden`. One look-up per id."""
        shown, parts = self._shown, []
        for token_id in token_ids:
            if (own := hidden.get(token_id)) is None and (own := shown.get(token_id)) is None:
                own = shown[token_id] = self._read(token_id)
            parts.append(own)
        return b"".join(parts)

    def _read(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""  # decoding leaves it out
        if _BYTE_OF.keys() >= set(token):
            return bytes(_BYTE_OF[character] for character in token)
        return token.encode()  # an added one


def _byte_of() -> dict[str, int]:
    """Returns the byte of each character of a byte-level vocabulary, by GPT-2's table: printable
    characters of Latin 1 are their own bytes, the other bytes are U+0100 and following, in
    order."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_of()


class ByteLevelDetokenizer:
    """`IncrementalDetokenizer` of a byte-level vocabulary, about ten times as fast."""

    def __init__(self, tokens: ByteLevel, *, keep_special: bool | Collection[int]) -> None:
        self._tokens = tokens
        self._hidden = tokens.hidden(keep_special)
        self._decoder = _Decoder(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens. Returns the new text that later tokens cannot change."""
        return self._decoder.decode(self._tokens.bytes_of(token_ids, self._hidden))

    def finish(self) -> str:
        """Returns the rest of the text, with incomplete characters as U+FFFD."""
        return self._decoder.decode(b"", final=True)
