"""`TokenTexts`: the text of single tokens, for log-probabilities."""

from __future__ import annotations

from radixserve.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class TokenTexts:
    """Remembers what it has decoded: at most the vocabulary."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """Special tokens as their names; without a tokenizer "token_id:5"."""
        text = self._texts.get(token_id)
        if text is None:
            text = f"token_id:{token_id}"
            if self._tokenizer is not None:
                text = self._tokenizer.decode([token_id], keep_special=True)
            self._texts[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> list[int] | None:
        """UTF-8; None for a part of a character."""
        text = self.text(token_id)
        return None if _REPLACEMENT in text else list(text.encode("utf-8", "replace"))
