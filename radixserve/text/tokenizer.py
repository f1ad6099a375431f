"""`Tokenizer`: text and chats to token ids, and token ids to text.

`IncrementalDetokenizer` turns generated tokens into text as they come; byte_level.py has a faster
one for byte-level vocabularies. `StopStringMatcher` cuts that text at stop strings.
"""

from __future__ import annotations

import copy
import hashlib
import json
import threading
import warnings
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from radixserve.arrays import IntArray
from radixserve.errors import InvalidRequest
from radixserve.gguf_file import SUFFIX, open_gguf
from radixserve.picture import Picture, Pictures
from radixserve.request import FIRST_PICTURE_ID
from radixserve.text.byte_fallback import ByteFallback, decodes_by_appending
from radixserve.text.byte_level import ByteLevel, ByteLevelDetokenizer
from radixserve.text.chat_options import KNOWN_ROLES, ChatOptions, ToolsIgnored, begun_answer
from radixserve.text.content_marks import (
    MARK,
    ContentMarks,
    SpecialToken,
    split_at_marks,
    unmarked,
)
from radixserve.text.picture_parts import (
    PICTURE_MARK,
    as_parts,
    check_no_marks,
    split_marks,
    taken_out,
    with_marks,
    with_rows,
)
from radixserve.text.tainted_str import ASSISTANT, CALLER, TEMPLATE, taint_of
from radixserve.text.template_traits import (
    Message,
    Render,
    TemplateTraits,
    check_rendered,
    fit_messages,
)

_REPLACEMENT = "\ufffd"
_CONTEXT = 5  # prompt tokens decoded with the first tokens, so that a word keeps its leading space
_BYTES_A_TOKEN = 4  # a text with fewer bytes per allowed token is tokenised without being counted
_SLICE = 16_384  # characters of a long text that are counted at once
_CUT = 16  # tokens of a slice that may not occur in the whole text, since the slice was cut
_MAX_OPEN = 3  # most tokens of an incomplete character: its last one is missing
_WORD = "quorzel"  # a sample text to test a template
_END_TOKENS = ("eos_token", "eot_token", "eom_token")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    """A `FastTokenizer` or a transformers tokenizer, for any number of threads.

    Special tokens that are written in chat messages are text (see content_marks.py), unless
    `parses_special` is set.
    """

    def __init__(self, tokenizer: Any, *, parses_special: bool = False) -> None:
        # Two copies: callers encode while the engine decodes, and a long prompt takes seconds.
        self._tokenizer = tokenizer
        self._decoder: Any = copy.deepcopy(self._tokenizer)
        self._bytes = ByteFallback.of(tokenizer)
        self._byte_level = ByteLevel.of(tokenizer)
        self.decodes_by_appending = decodes_by_appending(tokenizer)
        self._parses_special = parses_special
        self._templates_with_tools: set[str | None] = set()  # templates tested for tools
        self._traits: dict[str | None, TemplateTraits] = {}  # by template
        self.pictures: Pictures | None = None  # of a model that takes some
        self._takes_parts: dict[str, bool] = {}  # of such a model, by template
        self._encode_lock = threading.Lock()
        self._decode_lock = threading.Lock()

    @classmethod
    def load(cls, path: Path | None, *, parses_special: bool = False) -> Tokenizer | None:
        """Returns the tokenizer of a checkpoint folder or GGUF file; None if it has none. Raises
        InvalidRequest for one that cannot be read, and ModelNotSupported."""
        wrapped = partial(cls, parses_special=parses_special)
        if path is None:
            return None
        if path.suffix == SUFFIX:
            from radixserve.text.gguf_tokenizer import gguf_tokenizer

            file = open_gguf(path)
            kind = file.fields.get("tokenizer.ggml.model", "no_vocab")
            return None if kind in ("no_vocab", "none") else wrapped(gguf_tokenizer(file))
        if not any((path / name).exists() for name in _TOKENIZER_FILES):
            return None
        from radixserve.text.fast_tokenizer import load_fast_tokenizer

        if (fast := load_fast_tokenizer(path)) is not None:
            return wrapped(_with_template(fast, path))
        from transformers import AutoTokenizer

        try:
            return wrapped(_with_template(AutoTokenizer.from_pretrained(path), path))
        except Exception as error:  # tokenizers raises Exception itself
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InvalidRequest(f"the tokenizer of {path} cannot be read: {reason}") from error

    def check_size(self, num_embeddings: int) -> None:
        """Raises InvalidRequest if a token has no embedding, unless it was added to the vocabulary:
        text models share tokenizers with models of pictures, whose marks they lack."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or backend.get_vocab_size(with_added_tokens=False) <= num_embeddings:
            return
        own, added = backend.get_vocab(with_added_tokens=False), backend.get_added_tokens_decoder()
        plain = (token_id for token_id in own.values() if token_id not in added)
        size = 1 + max(plain, default=-1)
        if size > num_embeddings:
            raise InvalidRequest(
                f"the tokenizer has {size:,} tokens, but the model has embeddings of "
                f"{num_embeddings:,}"
            )

    @property
    def chat_template(self) -> str:
        """The checkpoint's chat template; "" without one."""
        return str(self._tokenizer.chat_template or "")

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer` inside, not to be changed. InvalidRequest for a tokenizer of
        another library."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            kind = type(self._tokenizer).__name__
            raise InvalidRequest(
                f"structured output needs a fast tokenizer; the model has a {kind}"
            )
        return backend

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a prompt, with the special tokens that the tokenizer adds. If
        `text` begins with the beginning-of-sequence token, no second one is added. Raises
        InvalidRequest for invalid Unicode."""
        ids = self._encode(text, add_special_tokens=True)
        bos = self._tokenizer.special_tokens_map.get("bos_token")
        if bos is None or not text.startswith(str(bos)) or ids[:1] != ids[1:2]:
            return ids
        return ids[1:] if ids[:1] == self.encode_more(str(bos)) else ids

    def encode_more(self, text: str) -> list[int]:
        """Returns the token ids of `text` that follows other tokens: no special tokens are added.
        Raises InvalidRequest for invalid Unicode."""
        return self._encode(text, add_special_tokens=False)

    def count_beyond(self, text: str, limit: int) -> int | None:
        """Returns an estimate of the number of tokens of `text`, rendered or not, if it has more
        than `limit`; None if it may have fewer. Reads the text in slices, and only as far as
        needed: the memory is bounded for a text of any length."""
        if len(text) <= limit or len(text.encode("utf-8", "replace")) <= limit * _BYTES_A_TOKEN:
            return None
        num_tokens = 0
        for start in range(0, len(text), _SLICE):
            part = text[start : start + _SLICE]
            num_tokens += max(0, len(self.encode_more(unmarked(part))) - _CUT)
            if num_tokens > limit:
                return num_tokens * len(text) // (start + len(part))
        return None

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns `encode_more` of each text."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return [self.encode_more(text) for text in texts]
        for text in texts:
            _check_unicode(text)
        with self._encode_lock:
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in encodings]

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], options: ChatOptions | None = None
    ) -> list[int]:
        """Returns the token ids of a conversation up to the generation prompt, or to the end of a
        last message of the assistant, which the answer continues. Raises InvalidRequest."""
        how = options or ChatOptions()
        begun = begun_answer(messages)
        if begun is not None and not begun.strip():
            messages, begun = messages[:-1], None
        self.warn_of_ignored_tools(how)
        render = partial(
            self.render_chat,
            template=how.template,
            tools=how.tools,
            variables=how.template_kwargs,
            continue_final_message=begun is not None,
            now=how.now,
        )
        said = fit_messages(messages, self.traits(how.template), shows_tools=how.tools is not None)
        text = render(said)
        self.check_own_roles(said, text, render)
        return self.encode_rendered(text)

    def reads_clock(self, template: str | None = None) -> bool:
        """Whether the chat template may print the date or the time."""
        return "strftime_now" in str(template or self._tokenizer.chat_template)

    def check_own_roles(self, messages: Sequence[Message], text: str, render: Render) -> None:
        """Raise InvalidRequest where a message has a role of the caller's own that the template
        leaves out of the rendered `text`, or that names a special token."""
        roles = [message["role"] for message in messages if message["role"] not in KNOWN_ROLES]
        for role in roles:
            self.check_role(role)
        if roles:
            check_rendered(messages, text, render)

    def check_role(self, role: str) -> None:
        """Raise InvalidRequest for a role of the caller's own that is the name of a special token:
        a template that copies the role would produce that token."""
        if role in KNOWN_ROLES:
            return
        if any(role == token.text.strip("<|>[]/\uff5c") for token in self._special_tokens):
            raise InvalidRequest(f"role {role!r} is the name of a special token")

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of messages that every template gets, then those that the tokenizer's own
        template names besides."""
        from radixserve.text.chat_template import named_roles  # imports Jinja

        own = named_roles(str(self._tokenizer.chat_template or ""))
        return (*KNOWN_ROLES, *sorted(own.difference(KNOWN_ROLES)))

    def traits(self, template: str | None = None) -> TemplateTraits:
        """Returns which messages the chat template renders; tested once per template."""
        known = self._traits.get(template)
        if known is None:
            text = str(template or self._tokenizer.chat_template or "")
            known = TemplateTraits.of(text, partial(self.render_chat, template=template))
            self._traits[template] = known
        return known

    def encode_rendered(self, text: str) -> list[int]:
        """Returns the token ids of a text from `render_chat`, or of a piece of it. Special tokens
        of the template become special tokens, those in messages are text."""
        if PICTURE_MARK in text and self.pictures is not None:
            plain, pictures = split_marks(text, self.pictures)
            return with_rows(self.encode_rendered(plain), self.pictures.marker_id, pictures)
        if MARK not in text:
            return self._encode_own(text, is_first=True)
        ids: list[int] = []
        for piece, is_marked in self._marks.pieces(text):
            encode = self._encode_as_text if is_marked else self._encode_own
            ids += encode(piece, is_first=not ids)
        return ids

    def mark_text(self, text: str) -> str:
        """Returns a caller's text with its special tokens marked, for `encode_rendered`."""
        return self._marks.mark_text(text, TEMPLATE if self._parses_special else CALLER)

    def mark_answer(self, text: str) -> str:
        """Returns an assistant's text with its special tokens marked as `render_chat` marks
        them."""
        return self._marks.mark(text, (TEMPLATE if self._parses_special else ASSISTANT) * len(text))

    def encode_answer(self, text: str) -> list[int]:
        """Returns the token ids of the beginning of an assistant's message."""
        return self.encode_rendered(self.mark_answer(text))

    def warn_of_ignored_tools(self, options: ChatOptions) -> None:
        """Warn with ToolsIgnored where the template renders the same text without the tools; once
        per template."""
        if not options.tools or options.template in self._templates_with_tools:
            return
        self._templates_with_tools.add(options.template)
        messages = [{"role": "user", "content": "?"}]
        render = partial(
            self.render_chat,
            template=options.template,
            variables=options.template_kwargs,
            now=datetime.now(),
        )
        try:
            is_ignored = render(messages, tools=options.tools) == render(messages)
        except InvalidRequest:  # rendering the caller's messages will raise it again
            return
        if is_ignored:
            warnings.warn(
                "the chat template has no place for tools: the prompt does not describe them",
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
        now: datetime | None = None,
    ) -> str:
        """Returns the text of a conversation up to the generation prompt, for `encode_rendered`.
        Special tokens in messages are marked; `unmarked` of content_marks.py removes the marks.

        `template`: Jinja, instead of the tokenizer's own, which comes from the checkpoint.
        `variables`: more names that the template may use. `now`: what it takes as the date and
        time; None: the clock's. Without `add_generation_prompt` the text
        ends with the last message; with `continue_final_message` it ends inside the last message.
        Raises InvalidRequest without a template, and if the template refuses the messages.
        """
        source = (
            self._tokenizer.get_chat_template(template, tools=tools)
            if (template or self._tokenizer.chat_template)
            else None
        )
        if source is None:
            raise InvalidRequest(
                "the model's tokenizer has no chat template: give one, or give text"
            )
        pictures: list[Picture] = []
        if self.pictures is not None:
            messages, pictures = taken_out(messages)
            if self._reads_parts(source):
                messages = [{**one, "content": as_parts(one.get("content"))} for one in messages]
        try:
            from radixserve.text import chat_template  # imports Jinja

            text = chat_template.render(
                source,
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                special_tokens=self._tokenizer.special_tokens_map,
                now=now,
                **(variables or {}),
            )
        except Exception as error:  # the template is the model's own code
            raise InvalidRequest(f"the chat template refused the messages: {error}") from error
        if self.pictures is not None:
            check_no_marks(text)
            if pictures:
                text = with_marks(text, self.pictures.marker, pictures)
        return self._marks.mark(text, bytes(len(text)) if self._parses_special else taint_of(text))

    def _reads_parts(self, source: str) -> bool:
        """Whether a template reads contents as lists of parts only; tested once per template."""
        known = self._takes_parts.get(source)
        if known is None:
            from radixserve.text import chat_template  # imports Jinja

            def shows(content: Any) -> bool:
                special = self._tokenizer.special_tokens_map
                try:
                    said = [{"role": "user", "content": content}]
                    return _WORD in chat_template.render(source, said, special_tokens=special)
                except Exception:  # the template is the model's own code
                    return False

            known = not shows(_WORD) and shows(as_parts(_WORD))
            self._takes_parts[source] = known
        return known

    @cached_property
    def _special_tokens(self) -> list[SpecialToken]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return [SpecialToken(str(text)) for text in self._tokenizer.all_special_tokens]
        added = backend.get_added_tokens_decoder().values()
        return [
            SpecialToken(token.content, token.lstrip, token.rstrip)
            for token in added
            if token.special
        ]

    @cached_property
    def _folds_special_tokens(self) -> bool:
        """Whether text is normalised before special tokens are looked for in it: then "\uff1cs>"
        may be read as "<s>"."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or backend.normalizer is None:
            return False
        added = backend.get_added_tokens_decoder().values()
        return any(token.special and token.normalized for token in added)

    @cached_property
    def _marks(self) -> ContentMarks:
        return ContentMarks(self._special_tokens)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids of the eos, eot and eom tokens: they end a text, a turn or a message."""
        named = self._tokenizer.special_tokens_map
        texts = {str(named[name]) for name in _END_TOKENS if named.get(name)}
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        # All of the vocabulary takes as long as a tenth of a start.
        id_of = self._tokenizer.get_vocab().get if backend is None else backend.token_to_id
        return frozenset(token_id for text in texts if (token_id := id_of(text)) is not None)

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
        """Returns the text of the tokens, with U+FFFD for invalid bytes and none for rows
        of pictures. `keep_special`: whether
        special tokens are part of the text, or the ids of those that are."""
        ids = list(token_ids)
        if self.pictures is not None:
            ids = [token_id for token_id in ids if token_id < FIRST_PICTURE_ID]
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

    def pieces_of(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the tokens as the vocabulary writes them, such as "\u0120hello"."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return list(self._tokenizer.convert_ids_to_tokens(list(token_ids)))
        return [backend.id_to_token(token_id) or "" for token_id in token_ids]

    def bytes_of(self, token_id: int) -> bytes | None:
        """Returns the UTF-8 bytes of a token, the name of a special one; None if the token is part
        of a character and the tokenizer does not tell its bytes."""
        if token_id >= FIRST_PICTURE_ID:
            return b""
        if self._byte_level is not None:
            return self._byte_level.bytes_of([token_id], {})
        byte = None if self._bytes is None else self._bytes.byte_of(token_id)
        if byte is not None:
            return byte
        text = self.text_of(token_id)
        return None if _REPLACEMENT in text else text.encode()

    def text_of(self, token_id: int) -> str:
        """Returns the text of a token that follows others, the name of a special one, U+FFFD for
        parts of characters. The token is decoded twice, since SentencePiece's decoders strip the
        space of the first token."""
        text = self.decode([token_id], keep_special=True)
        twice = self.decode([token_id, token_id], keep_special=True)
        is_whole = _REPLACEMENT not in text and twice.startswith(text)
        return twice[len(text) :] if is_whole else text

    def detokenizer(
        self, prompt_ids: Sequence[int] | IntArray, *, keep_special: bool | Collection[int] = False
    ) -> ByteLevelDetokenizer | IncrementalDetokenizer:
        """Returns a detokenizer of the tokens after a prompt. `keep_special`: see `decode`. O(1) in
        the prompt."""
        if self._byte_level is not None:
            return ByteLevelDetokenizer(self._byte_level, keep_special=keep_special)
        return IncrementalDetokenizer(self, prompt_ids, keep_special=keep_special)

    def facts(self) -> dict[str, Any]:
        """Returns the class, special tokens and chat template, named as in
        tokenizer_config.json."""
        with self._encode_lock:
            tokenizer = self._tokenizer
            special = {name: str(text) for name, text in tokenizer.special_tokens_map.items()}
            named = {name: special.get(name) for name in ("bos_token", "eos_token", "pad_token")}
            return {
                **named,
                "unk_token": special.get("unk_token"),
                "chat_template": tokenizer.chat_template,
                "tokenizer_class": type(tokenizer).__name__,
            }

    def fingerprint(self) -> str:
        """Returns 16 hex digits that identify the vocabulary (tokens and ids). O(vocabulary)."""
        with self._encode_lock:
            vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        lines = (f"{token_id} {token!r}\n" for token, token_id in sorted(vocabulary.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        _check_unicode(text)
        with self._encode_lock:
            encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
            return list(encoded["input_ids"])

    def _encode_own(self, text: str, *, is_first: bool) -> list[int]:
        """Returns the token ids of an unmarked piece. Its special tokens are those that stand in
        it, not those that the tokenizer's normalizer makes of other characters."""
        ids = self.encode_more(text)
        if not self._folds_special_tokens:
            return ids
        parts = list(self._marks.parts(text))
        num_control = sum(token in self._control_ids for token in ids)
        if num_control <= sum(is_token for _, is_token in parts):
            return ids
        ids = []
        for part, is_token in parts:
            if is_token:
                ids += self.encode_more(part)
                continue
            ids += self._harmless_ids(part, is_first and not ids)
        return ids

    def _encode_as_text(self, marked: str, *, is_first: bool) -> list[int]:
        """Returns the token ids of a marked piece, special tokens as text. `is_first`: no text is
        before it."""
        ids = self._text_ids(unmarked(marked), is_first)
        if not self._control_ids.isdisjoint(ids):  # a vocabulary that has the token's text as well
            parts = split_at_marks(marked)
            ids = [token for part in parts for token in self._harmless_ids(part, is_first=False)]
        return ids

    def _harmless_ids(self, text: str, is_first: bool) -> list[int]:
        """Returns the token ids of a text, of its single characters where the whole text would
        have a control token."""
        ids = self._text_ids(text, is_first)
        if self._control_ids.isdisjoint(ids):
            return ids
        return [token for one in text for token in self._text_ids(one, is_first=False)]

    def _text_ids(self, text: str, is_first: bool) -> list[int]:
        _check_unicode(text)
        with self._encode_lock:
            if not hasattr(self._tokenizer, "backend_tokenizer"):
                options = {"add_special_tokens": False, "split_special_tokens": True}
                return list(self._tokenizer(text, **options)["input_ids"])
            first, later = self._text_backends
            backend = first if is_first else later  # whose `encode` would hold Python's lock
            (encoded,) = backend.encode_batch_fast([text], add_special_tokens=False)
            return list(encoded.ids)

    @cached_property
    def _text_backends(self) -> tuple[Any, Any]:
        """Copies of the `tokenizers.Tokenizer` that read special tokens as text: one for the
        beginning of a text, one for text that follows other text. Made once, in 0.1 to 1 s."""
        described = self._tokenizer.backend_tokenizer.to_str()
        make = type(self._tokenizer.backend_tokenizer).from_str
        first = make(described)
        later = first
        steps = json.loads(described)["pre_tokenizer"]
        if '"prepend_scheme": "first"' in json.dumps(steps):
            changed = json.dumps(steps).replace('"first"', '"never"')
            later = make(
                json.dumps({**json.loads(described), "pre_tokenizer": json.loads(changed)})
            )
        for backend in (first, later):
            backend.encode_special_tokens = True
        return first, later

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        """Ids of the special tokens, without the unknown token, which replaces text."""
        unknown = self._tokenizer.special_tokens_map.get("unk_token")
        return frozenset(
            token_id
            for token_id in self.special_ids
            if self.decode([token_id], keep_special=True) != unknown
        )


def _with_template(tokenizer: Any, folder: Path) -> Any:
    """Returns a tokenizer with the chat template of its processor, where it has none itself."""
    file = folder / "chat_template.json"  # of older checkpoints that take pictures
    if not tokenizer.chat_template and file.is_file():
        tokenizer.chat_template = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    return tokenizer


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the prompt is not valid Unicode text: {error}") from None


class IncrementalDetokenizer:
    """Decodes tokens as they come, into pieces of whole characters.

    Bytes of a UTF-8 character that is not complete yet wait for the next token. The joined
    pieces are the same however the tokens are grouped. Decodes a short window a step, so a
    token costs the same however long the text is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] | IntArray,
        *,
        keep_special: bool | Collection[int] = False,
    ) -> None:
        """`keep_special`: see `Tokenizer.decode`."""
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
        """Append tokens. Returns the new text that later tokens cannot change."""
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
        """Returns the rest of the text, with incomplete characters as U+FFFD."""
        return self._piece(len(self._ids))

    def _is_certain(self, cut: int, end: int) -> bool:
        """Whether no token after `end` can change the text up to token `cut`.

        That is certain if the text ends with a whole character, or if more tokens follow than a
        character can have and the cut is not inside a run of invalid bytes.
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
        """Return `piece`, the text up to `end`, and move the window. Costs a second decoding of a
        few tokens."""
        self._window, self._read = self._read, end
        self._known_len = len(self._decode(self._ids[self._window : end]))
        return piece


class StopStringMatcher:
    """Cuts a stream of text at the first stop string, also where it spans several pieces.

    `matched_stop`: that stop string; if several begin at the same place, the first in `stops`.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the text ends after the stop string, not before it."""
        self._stops = tuple(stops)
        self._include = include
        # most characters at the end of the text that may be the beginning of a stop string
        self._max_partial = max((len(stop) for stop in self._stops), default=1) - 1
        self._unsent = ""  # the end of the text, which was not returned yet
        self.matched_stop: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self.matched_stop is not None

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """Append text. Returns the part that cannot belong to a stop string any more, up to the
        first stop string. `may_stop` False: stop strings that end in `piece` do not count."""
        if self.is_stopped:
            return ""
        ends_after = len(self._unsent)  # stop strings that end earlier do not count
        self._unsent += piece
        first = self._first_stop(ends_after) if may_stop else None
        if first is not None:
            cut, self.matched_stop = first
            return self._take(cut + len(self.matched_stop) if self._include else cut)
        return self._take(max(0, len(self._unsent) - self._max_partial))

    def finish(self) -> str:
        """Returns the rest of the text."""
        return "" if self.is_stopped else self._take(len(self._unsent))

    def _first_stop(self, ends_after: int) -> tuple[int, str] | None:
        """Returns (index, stop string) of the first stop string in `_unsent`; None without one."""
        places = (
            (self._unsent.find(stop, max(0, ends_after - len(stop) + 1)), stop)
            for stop in self._stops
        )
        return min(
            (place for place in places if place[0] >= 0), key=lambda place: place[0], default=None
        )

    def _take(self, end: int) -> str:
        piece, self._unsent = self._unsent[:end], self._unsent[end:]
        return piece
