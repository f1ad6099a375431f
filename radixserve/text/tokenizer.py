"""Text to token ids and back: a checkpoint's own tokenizer, and text that grows token by token."""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixserve.errors import InvalidRequest
from radixserve.gguf_file import SUFFIX, GgufFile

_REPLACEMENT = "\ufffd"
_CONTEXT = 5  # prompt tokens decoded along, so that a first word keeps its leading space
_MAX_OPEN = 3  # tokens that an unfinished character can have: its last one is missing
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    """A transformers tokenizer for any number of threads."""

    def __init__(self, tokenizer: Any) -> None:
        # Two copies: callers encode while the engine decodes, and a long prompt takes seconds.
        self._tokenizer = tokenizer
        self._decoder: Any = copy.deepcopy(self._tokenizer)
        self._encode_lock = threading.Lock()
        self._decode_lock = threading.Lock()

    @classmethod
    def load(cls, path: Path | None) -> Tokenizer | None:
        """The tokenizer of a checkpoint folder or GGUF file; None when it has none."""
        if path is None:
            return None
        if path.suffix == SUFFIX:
            from radixserve.text.gguf_tokenizer import gguf_tokenizer

            file = GgufFile(path)
            has_tokenizer = "tokenizer.ggml.model" in file.fields
            return cls(gguf_tokenizer(file)) if has_tokenizer else None
        if not any((path / name).exists() for name in _TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(path))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer puts around a prompt."""
        return self._encode(text, add_special_tokens=True)

    def encode_more(self, text: str) -> list[int]:
        """Token ids of `text` that follows other tokens: without the special tokens of a prompt."""
        return self._encode(text, add_special_tokens=False)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation up to where the assistant is to speak."""
        return self.encode_more(self.render_chat(messages))

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        template: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation up to where the assistant is to speak.

        `template`: Jinja, instead of the tokenizer's own. Raises InvalidRequest where there is none
        and where it refuses the messages.
        """
        with self._encode_lock:
            if not (template or self._tokenizer.chat_template):
                raise InvalidRequest(
                    "the model's tokenizer has no chat template: give one, or give text"
                )
            try:
                text: str = self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=None if tools is None else list(tools),
                    chat_template=template,
                    add_generation_prompt=True,
                    tokenize=False,
                )
                return text
            except Exception as error:  # the template is the model's own code
                raise InvalidRequest(f"the chat template refused the messages: {error}") from error

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text, special tokens left out by default; bytes that are no character: U+FFFD."""
        with self._decode_lock:
            text: str = self._decoder.decode(
                list(token_ids),
                skip_special_tokens=not keep_special,
                clean_up_tokenization_spaces=False,
            )
            return text

    def fingerprint(self) -> str:
        """The same for tokenizers of the same vocabulary only. O(vocabulary)."""
        with self._encode_lock:
            vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        lines = (f"{token_id} {token!r}\n" for token, token_id in sorted(vocabulary.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the prompt is not valid Unicode text: {error}") from None
        with self._encode_lock:
            encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
            return list(encoded["input_ids"])


class IncrementalDetokenizer:
    """Incremental detokenisation: pieces of whole characters, which joined are the text.

    Decodes a short window a step, so a token costs the same however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = [int(token) for token in prompt_ids[-_CONTEXT:]]
        if tokenizer.decode(self._ids).endswith(_REPLACEMENT):
            self._ids = []  # the prompt ends inside a character: what follows cannot complete it
        self._window = 0  # the window's text up to `_read` has been returned
        self._read = len(self._ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        self._ids += token_ids
        end = len(self._ids)
        piece = self._piece(end)
        if not piece.endswith(_REPLACEMENT):
            return self._take(end) if piece else ""
        for cut in range(end - 1, self._read, -1):
            if self._is_certain(cut, end):
                return self._take(cut)
        return ""

    def finish(self) -> str:
        """The rest, incomplete characters as U+FFFD."""
        return self._take(len(self._ids))

    def _is_certain(self, cut: int, end: int) -> bool:
        """Whether the text up to token `cut` stays as it is whatever comes after `end`.

        It does where it ends with a whole character, and where more tokens follow than a character
        can have, unless the cut falls inside a run of invalid bytes.
        """
        piece = self._piece(cut)
        if piece and not piece.endswith(_REPLACEMENT):
            return True
        if end - cut < _MAX_OPEN:
            return False
        left, right = self._ids[self._window : cut], self._ids[cut:end]
        decode = self._tokenizer.decode
        return decode(left) + decode(right) == decode(left + right)

    def _piece(self, end: int) -> str:
        known = self._tokenizer.decode(self._ids[self._window : self._read])
        return self._tokenizer.decode(self._ids[self._window : end])[len(known) :]

    def _take(self, end: int) -> str:
        piece = self._piece(end)
        self._window, self._read = self._read, end
        return piece


class StopStringMatcher:
    """Cuts a stream of text at the first stop string, also where it spans several pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._hold = max((len(stop) for stop in self._stops), default=1) - 1
        self._held = ""  # the end of the text, which may be the beginning of a stop string
        self.is_stopped = False

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """The text that is safe to return now; with `may_stop` False no stop string ends in it."""
        if self.is_stopped:
            return ""
        ends_after = len(self._held)  # stop strings that end earlier were not to stop
        self._held += piece
        cut = self._first_stop(ends_after) if may_stop else None
        if cut is not None:
            self.is_stopped = True
            return self._release(cut)
        return self._release(max(0, len(self._held) - self._hold))

    def finish(self) -> str:
        """The rest of the text."""
        return "" if self.is_stopped else self._release(len(self._held))

    def _first_stop(self, ends_after: int) -> int | None:
        places = (self._held.find(stop, max(0, ends_after - len(stop) + 1)) for stop in self._stops)
        return min((at for at in places if at >= 0), default=None)

    def _release(self, end: int) -> str:
        piece, self._held = self._held[:end], self._held[end:]
        return piece
