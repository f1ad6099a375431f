"""`ByteFallback`: the tokens of one byte each, and how a fast tokenizer decodes them.

If a run of byte tokens is not valid UTF-8, the tokenizer's decoder replaces every byte of the run
by U+FFFD, also those of whole characters: later tokens would change the text of earlier ones.
`valid_ids` replaces each run by the tokens of its text, with U+FFFD for invalid bytes only, so that
decoded text does not change later.
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
    """The byte tokens of one vocabulary, by id and by byte."""

    def __init__(self, id_of_byte: Sequence[int], hidden_ids: Sequence[int]) -> None:
        """id_of_byte [256]. hidden_ids: special tokens, which may be left out of a text."""
        self._id_of_byte = tuple(id_of_byte)
        self._byte_of_id = {token_id: byte for byte, token_id in enumerate(id_of_byte)}
        self._hidden = frozenset(hidden_ids)

    @classmethod
    def of(cls, tokenizer: Any) -> ByteFallback | None:
        """Returns the byte tokens of a transformers tokenizer; None if its decoder has no byte
        fallback."""
        if not any(step["type"] == "ByteFallback" for step in decoder_steps(tokenizer)):
            return None
        backend = tokenizer.backend_tokenizer
        ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        if None in ids:
            return None
        added = backend.get_added_tokens_decoder().items()
        return cls(ids, [token_id for token_id, token in added if token.special])

    def byte_of(self, token_id: int) -> bytes | None:
        """Returns the byte of a byte token; None for other tokens."""
        byte = self._byte_of_id.get(token_id)
        return None if byte is None else bytes([byte])

    def valid_ids(self, ids: Sequence[int], *, keep_special: bool) -> Sequence[int]:
        """Returns `ids` with every run of byte tokens replaced by valid UTF-8.

        Without `keep_special`, special tokens are left out: a run continues after them."""
        if self._byte_of_id.keys().isdisjoint(ids):
            return ids
        valid: list[int] = []
        run = bytearray()
        for token_id in ids:
            byte = self._byte_of_id.get(token_id)
            if byte is not None:
                run.append(byte)
            elif keep_special or token_id not in self._hidden:
                valid += self._tokens_of(run)
                run.clear()
                valid.append(token_id)
        return [*valid, *self._tokens_of(run)]

    def _tokens_of(self, run: bytearray) -> list[int]:
        text = run.decode("utf-8", errors="replace")
        return [self._id_of_byte[byte] for byte in text.encode()]


def decodes_by_appending(tokenizer: Any) -> bool:
    """Whether appending tokens only appends text: the decoded text of a list of tokens then begins
    with the text of its first tokens, but for an incomplete character at their end."""
    steps = list(decoder_steps(tokenizer))
    return bool(steps) and all(
        step["type"] in _APPENDING and not step.get("stop") for step in steps
    )


def decoder_steps(tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yields the steps of a fast tokenizer's decoder, nested ones included, as JSON objects with a
    "type". Yields nothing for other tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    pending = [] if decoder is None else [json.loads(decoder.__getstate__())]
    while pending:
        step = pending.pop()
        yield step
        pending += step.get("decoders", ())
