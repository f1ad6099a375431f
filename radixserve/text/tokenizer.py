"""Text to token ids and back: a checkpoint's own tokenizer, and text that grows token by token."""

from __future__ import annotations

import copy
import hashlib
import threading
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from radixserve.errors import InvalidRequest
from radixserve.gguf_file import SUFFIX, GgufFile
from radixserve.text.byte_fallback import ByteFallback, decodes_by_appending
from radixserve.text.byte_level import ByteLevel, ByteLevelDetokenizer
from radixserve.text.chat_options import ChatOptions, ToolsIgnored, begun_answer

_REPLACEMENT = "\ufffd"
_CONTEXT = 5  # prompt tokens decoded along, so that a first word keeps its leading space
_MAX_OPEN = 3  # tokens that an unfinished character can have: its last one is missing
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    """A `FastTokenizer` or a transformers tokenizer, for any number of threads."""

    def __init__(self, tokenizer: Any) -> None:
        # Two copies: callers encode while the engine decodes, and a long prompt takes seconds.
        self._tokenizer = tokenizer
        self._decoder: Any = copy.deepcopy(self._tokenizer)
        self._bytes = ByteFallback.of(tokenizer)
        self._byte_level = ByteLevel.of(tokenizer)
        self.decodes_by_appending = decodes_by_appending(tokenizer)
        self._templates_with_tools: set[str | None] = set()  # which were tried
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
        from radixserve.text.fast_tokenizer import load_fast_tokenizer

        if (fast := load_fast_tokenizer(path)) is not None:
            return cls(fast)
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(path))
        except Exception as error:  # tokenizers raises Exception itself
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InvalidRequest(f"the tokenizer of {path} cannot be read: {reason}") from error

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer` inside, not to be changed. InvalidRequest where the checkpoint
        brings a tokenizer of another make."""
        found = getattr(self._tokenizer, "backend_tokenizer", None)
        if found is None:
            kind = type(self._tokenizer).__name__
            raise InvalidRequest(
                f"structured output needs a fast tokenizer; the model has a {kind}"
            )
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer puts around a prompt."""
        return self._encode(text, add_special_tokens=True)

    def encode_more(self, text: str) -> list[int]:
        """Token ids of `text` that follows other tokens: without the special tokens of a prompt."""
        return self._encode(text, add_special_tokens=False)

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], options: ChatOptions | None = None
    ) -> list[int]:
        """Token ids of a conversation up to where the assistant is to speak: after a last message
        of its own, which is continued, or in a new one."""
        how = options or ChatOptions()
        begun = begun_answer(messages)
        if begun is not None and not begun.strip():
            messages, begun = messages[:-1], None
        self.warn_of_ignored_tools(how)
        text = self.render_chat(
            messages,
            template=how.template,
            tools=how.tools,
            variables=how.template_kwargs,
            continue_final_message=begun is not None,
        )
        return self.encode_more(text)

    def warn_of_ignored_tools(self, options: ChatOptions) -> None:
        """ToolsIgnored, once for each template that renders the same text without the tools."""
        if not options.tools or options.template in self._templates_with_tools:
            return
        self._templates_with_tools.add(options.template)
        messages = [{"role": "user", "content": "?"}]
        render = partial(
            self.render_chat, template=options.template, variables=options.template_kwargs
        )
        try:
            is_ignored = render(messages, tools=options.tools) == render(messages)
        except InvalidRequest:  # for other reasons, which the caller's own messages will show
            return
        if is_ignored:
            warnings.warn(
                "the chat template has no place for tools: the model is not told of them",
                ToolsIgnored,
                stacklevel=6,
            )

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        template: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation up to where the assistant is to speak.

        `template`: Jinja, instead of the tokenizer's own; `variables`: more names that it may use.
        Without `add_generation_prompt` the text ends with the last message; with
        `continue_final_message` inside it, open to be continued. Raises InvalidRequest where there
        is no template and where it refuses the messages.
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
                    add_generation_prompt=add_generation_prompt and not continue_final_message,
                    continue_final_message=continue_final_message,
                    tokenize=False,
                    **(variables or {}),
                )
                return text
            except Exception as error:  # the template is the model's own code
                raise InvalidRequest(f"the chat template refused the messages: {error}") from error

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that `decode` leaves out by default."""
        with self._encode_lock:
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if backend is None:
                return frozenset(self._tokenizer.all_special_ids)
            added = backend.get_added_tokens_decoder().items()
            return frozenset(token_id for token_id, token in added if token.special)

    def decode(
        self, token_ids: Sequence[int], *, keep_special: bool | Collection[int] = False
    ) -> str:
        """The text; bytes that are no character: U+FFFD. `keep_special`: whether special tokens
        are a part of it, or which."""
        ids = list(token_ids)
        if not isinstance(keep_special, bool):
            if keep_special:
                left_out = self.special_ids.difference(keep_special)
                ids = [token_id for token_id in ids if token_id not in left_out]
            keep_special = bool(keep_special)
        if self._bytes is not None:
            ids = list(self._bytes.valid_ids(ids, keep_special=keep_special))
        with self._decode_lock:
            text: str = self._decoder.decode(
                ids,
                skip_special_tokens=not keep_special,
                clean_up_tokenization_spaces=False,
            )
            return text

    def detokenizer(
        self, prompt_ids: Sequence[int], *, keep_special: bool | Collection[int] = False
    ) -> ByteLevelDetokenizer | IncrementalDetokenizer:
        """A detokenizer of the tokens after a prompt. `keep_special`: whether special tokens are
        part of the text, or which."""
        if self._byte_level is not None:
            return ByteLevelDetokenizer(self._byte_level, keep_special=keep_special)
        return IncrementalDetokenizer(self, prompt_ids, keep_special=keep_special)

    def facts(self) -> dict[str, Any]:
        """Its class, special tokens and chat template."""
        with self._encode_lock:
            tokenizer = self._tokenizer
            special = {name: str(text) for name, text in tokenizer.special_tokens_map.items()}
            found = {name: special.get(name) for name in ("bos_token", "eos_token", "pad_token")}
            return {**found, "unk_token": special.get("unk_token"),
                    "chat_template": tokenizer.chat_template,
                    "tokenizer_class": type(tokenizer).__name__}  # fmt: skip

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

    Bytes of a UTF-8 character that is not complete yet wait for the next token. The text is the
    same however the tokens come: one by one, or all at once. Decodes a short window a step, so a
    token costs the same however long the text is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        keep_special: bool | Collection[int] = False,
    ) -> None:
        """`keep_special`: whether special tokens are part of the text, or which."""
        self._decode = partial(tokenizer.decode, keep_special=keep_special)
        self._takes_all = tokenizer.decodes_by_appending  # else one token after the other
        self._ids = [int(token) for token in prompt_ids[-_CONTEXT:]]
        known = self._decode(self._ids)
        if known.endswith(_REPLACEMENT):
            self._ids = []  # the prompt ends inside a character: what follows cannot complete it
            known = ""
        self._window = 0  # the window's text up to `_read` has been returned
        self._read = len(self._ids)
        self._known_len = len(known)  # characters of that text

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        if self._takes_all or len(token_ids) <= 1:
            return self._push(token_ids)
        return "".join(self._push([token_id]) for token_id in token_ids)

    def _push(self, token_ids: Sequence[int]) -> str:
        self._ids += token_ids
        end = len(self._ids)
        piece = self._piece(end)
        if not piece.endswith(_REPLACEMENT):
            return self._take(end, piece) if piece else ""
        for cut in range(end - 1, self._read, -1):
            if self._is_certain(cut, end):
                return self._take(cut, self._piece(cut))
        return ""

    def finish(self) -> str:
        """The rest, incomplete characters as U+FFFD."""
        return self._piece(len(self._ids))

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
        return self._decode(left) + self._decode(right) == self._decode(left + right)

    def _piece(self, end: int) -> str:
        return self._decode(self._ids[self._window : end])[self._known_len :]

    def _take(self, end: int, piece: str) -> str:
        """`piece`, the text up to `end`, is returned: the window moves. One decoding of a token or
        a few, beside the one that made the piece."""
        self._window, self._read = self._read, end
        self._known_len = len(self._decode(self._ids[self._window : end]))
        return piece


class StopStringMatcher:
    """Cuts a stream of text at the first stop string, also where it spans several pieces.

    `found`: that stop string. Of several that begin at the same place the first one given counts.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the text ends after the stop string, not before it."""
        self._stops = tuple(stops)
        self._include = include
        self._hold = max((len(stop) for stop in self._stops), default=1) - 1
        self._held = ""  # the end of the text, which may be the beginning of a stop string
        self.found: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self.found is not None

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """The text that is safe to return now; with `may_stop` False no stop string ends in it."""
        if self.is_stopped:
            return ""
        ends_after = len(self._held)  # stop strings that end earlier were not to stop
        self._held += piece
        first = self._first_stop(ends_after) if may_stop else None
        if first is not None:
            cut, self.found = first
            return self._release(cut + len(self.found) if self._include else cut)
        return self._release(max(0, len(self._held) - self._hold))

    def finish(self) -> str:
        """The rest of the text."""
        return "" if self.is_stopped else self._release(len(self._held))

    def _first_stop(self, ends_after: int) -> tuple[int, str] | None:
        """Where the first one begins, and which one it is."""
        places = (
            (self._held.find(stop, max(0, ends_after - len(stop) + 1)), stop)
            for stop in self._stops
        )
        return min((one for one in places if one[0] >= 0), key=lambda one: one[0], default=None)

    def _release(self, end: int) -> str:
        piece, self._held = self._held[:end], self._held[end:]
        return piece
