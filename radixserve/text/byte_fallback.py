"""How a fast tokenizer decodes, and tokens that stand for a byte each (byte fallback).

Where the bytes of a run of such tokens are no text, their decoder makes a replacement mark of every
byte of the run, also of its whole characters: the text of the first tokens would change with those
that follow. `valid_ids` gives each run the tokens of the text that its bytes are, U+FFFD where they
are none, so that every character stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

# Steps after which the text of some tokens begins with the text of the first ones.
_APPENDING = frozenset(
    ("Sequence", "ByteLevel", "ByteFallback", "Fuse", "Replace", "Strip", "Metaspace", "BPEDecoder")
)


class ByteFallback:
    """Which tokens are bytes. O(ids) of Python a call, a look-up each."""

    def __init__(self, id_of_byte: Sequence[int], hidden_ids: Sequence[int]) -> None:
        """id_of_byte [256]. hidden_ids: special tokens, which may be left out of a text."""
        self._id_of_byte = tuple(id_of_byte)
        self._byte_of_id = {token_id: byte for byte, token_id in enumerate(id_of_byte)}
        self._hidden = frozenset(hidden_ids)

    @classmethod
    def of(cls, tokenizer: Any) -> ByteFallback | None:
        """From a transformers tokenizer; None where it does not decode bytes of tokens."""
        if not any(step["type"] == "ByteFallback" for step in decoder_steps(tokenizer)):
            return None
        backend = tokenizer.backend_tokenizer
        ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        if None in ids:
            return None
        added = backend.get_added_tokens_decoder().items()
        return cls(ids, [token_id for token_id, token in added if token.special])

    def valid_ids(self, ids: Sequence[int], *, keep_special: bool) -> Sequence[int]:
        """`ids` with the tokens of valid UTF-8 in every run of bytes; without special tokens where
        these are not kept, as a run goes on after them."""
        if self._byte_of_id.keys().isdisjoint(ids):
            return ids
        found: list[int] = []
        run = bytearray()
        for token_id in ids:
            byte = self._byte_of_id.get(token_id)
            if byte is not None:
                run.append(byte)
            elif keep_special or token_id not in self._hidden:
                found += self._tokens_of(run)
                run.clear()
                found.append(token_id)
        return [*found, *self._tokens_of(run)]

    def _tokens_of(self, run: bytearray) -> list[int]:
        text = run.decode("utf-8", errors="replace")
        return [self._id_of_byte[byte] for byte in text.encode()]


def decodes_by_appending(tokenizer: Any) -> bool:
    """Whether the text of some tokens is known to begin with that of the first of them; but for a
    character that these end in."""
    steps = list(decoder_steps(tokenizer))
    return bool(steps) and all(
        step["type"] in _APPENDING and not step.get("stop") for step in steps
    )


def decoder_steps(tokenizer: Any) -> Iterator[dict[str, Any]]:
    """What a fast tokenizer decodes with, by its own description; nothing where it is not known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    pending = [] if decoder is None else [json.loads(decoder.__getstate__())]
    while pending:
        step = pending.pop()
        yield step
        pending += step.get("decoders", ())
