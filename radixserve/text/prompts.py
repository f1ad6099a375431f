"""`PromptReader`: checks prompts (text, token ids or chat messages) and turns them into ids."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray, pack_int32
from radixserve.checks import shown
from radixserve.errors import InvalidRequest, PromptTooLong
from radixserve.picture import Picture, Pictures
from radixserve.request import FIRST_PICTURE_ID, TruncationSide
from radixserve.text.chat_clocks import ChatClocks, clock_span
from radixserve.text.chat_options import ChatOptions
from radixserve.text.picture_parts import (
    has_pictures,
    is_text_part,
    read_pictures,
)
from radixserve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | NDArray[np.integer[Any]] | Sequence[Mapping[str, Any]]
ROLE = re.compile(r"[A-Za-z][\w-]{0,63}")  # of a chat message
_CONTEXTS_OF_TEXT = 4  # contexts of the model that a tokenised text may have at most
_MAX_CONVERSATIONS = 10_000  # whose date is remembered
_KINDS = "a prompt is text, a list of token ids, or a list of chat messages"


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Turns prompts into token ids within the model's limits.

    A conversation that goes on keeps the date and time of its first prompt, where the template
    prints them.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_seq_len: int  # of prompt and output together
    limit_name: str  # for errors: the setting or size that limits it
    clocks: ChatClocks = field(default_factory=lambda: ChatClocks(_MAX_CONVERSATIONS))
    pictures: Pictures | None = None  # None: the model takes text only

    def read(
        self,
        prompt: Prompt,
        *,
        keep_last: int | None = None,
        truncation_side: TruncationSide = "left",
        options: ChatOptions | None = None,
    ) -> IntArray:
        """Returns [n] token ids, 1 <= n < max_seq_len: those of the prompt, or its last `keep_last`
        ones; with a truncation_side of "right" its first ones.

        `options`: for chat messages only. Raises InvalidRequest.
        """
        if isinstance(prompt, str):
            self.check_length(prompt, is_prompt=keep_last is None)
        held: list[Any] = []  # with the pictures, until their tokens have been checked
        ids = self._ids(prompt, options, held)
        if keep_last is not None:
            ids = ids[:keep_last] if truncation_side == "right" else ids[-keep_last:]
        if not len(ids):
            raise InvalidRequest("the prompt is empty: at least one token is needed")
        if len(ids) >= self.max_seq_len:
            raise self.too_long(len(ids))
        return self._checked(ids)

    def at_its_start(
        self, prompt: Prompt, options: ChatOptions | None, *, is_noted: bool = True
    ) -> ChatOptions | None:
        """Returns the options with the time at which the conversation in `prompt` began, for
        templates that print it. `is_noted` False: the prompt is not sent."""
        how = options or ChatOptions()
        if how.now is not None or not is_conversation(prompt):
            return options
        if not self._tokenizer().reads_clock(how.template):
            return options
        known = [(message["role"], repr(message)) for message in self._messages(prompt)]
        start = self.clocks.start_of("", known, is_noted=is_noted)
        return replace(how, now=start.began)

    def is_in_date(self, prompt: Prompt, position: int, options: ChatOptions | None) -> bool:
        """Whether a prompt, read with these options of `at_its_start`, has the date or time at that
        token, as its template prints it. O(characters)."""
        how = options or ChatOptions()
        if how.now is None or not is_conversation(prompt):
            return False
        messages, tokenizer = self._messages(prompt), self._tokenizer()

        def encode(at: datetime) -> list[int]:
            return tokenizer.encode_chat(messages, replace(how, now=at))

        first, end = clock_span(np.asarray(encode(how.now), np.int32), how.now, encode)
        return first <= position < end

    def check_length(self, text: str, *, num_before: int = 0, is_prompt: bool = True) -> None:
        """Raise PromptTooLong if a text, rendered or not, is certainly too long for a prompt after
        `num_before` tokens. Checks it without tokenising all of it, which would take 100 bytes and
        more per token. `is_prompt` False: the text is not a prompt or will be cut; InvalidRequest
        if it is longer than four contexts."""
        room = self.max_seq_len if is_prompt else _CONTEXTS_OF_TEXT * self.max_seq_len
        num_tokens = self._tokenizer().count_beyond(text, max(1, room - num_before))
        if num_tokens is None:
            return
        if is_prompt:
            raise self.too_long(num_before + num_tokens, about="about ")
        raise InvalidRequest(
            f"a text of about {num_tokens} tokens is too long to be tokenised: at most {room}"
        )

    def too_long(self, num_tokens: int, *, about: str = "") -> PromptTooLong:
        return PromptTooLong(
            f"the prompt has {about}{num_tokens} tokens; at most {self.max_seq_len - 1} are "
            f"allowed ({self.limit_name}: {self.max_seq_len}, one token is left for the output)",
            num_tokens=num_tokens,
            max_tokens=self.max_seq_len - 1,
        )

    def read_more(self, tokens: str | Sequence[int] | NDArray[np.integer[Any]]) -> IntArray:
        """Returns [n] token ids, n >= 0, of text or token ids that follow other tokens. Raises
        InvalidRequest."""
        if isinstance(tokens, str):
            self.check_length(tokens)
            return self._checked(np.asarray(self._tokenizer().encode_more(tokens), np.int64))
        ids = _as_array(tokens)
        if ids is None:
            raise InvalidRequest(f"tokens are text or a list of token ids, got {shown(tokens)}")
        return self._checked(ids)

    def _checked(self, ids: NDArray[np.integer[Any]]) -> IntArray:
        """Returns an array that keeps its pictures alive."""
        pictures: tuple[Picture, ...] = ()
        if len(ids):
            low, high = int(ids.min()), int(ids.max())
            if FIRST_PICTURE_ID <= high < 2**31 and self.pictures is not None:
                pictures = self.pictures.in_tokens(ids.astype(np.int32))  # raises for others
                high = int(ids[ids < FIRST_PICTURE_ID].max(initial=0))
            if low < 0 or high >= self.vocab_size:
                raise InvalidRequest(
                    f"token id {low if low < 0 else high} is out of range: "
                    f"allowed are 0 to {self.vocab_size - 1}"
                )
        checked = ids.astype(np.int32)
        if pictures:
            weakref.finalize(checked, len, pictures).atexit = False
        return checked

    def pictures_in(self, token_ids: IntArray) -> tuple[Picture, ...]:
        """Returns the pictures that have rows among checked tokens. Raises InvalidRequest for one
        that is not kept any more."""
        if self.pictures is None or not len(token_ids) or token_ids.max() < FIRST_PICTURE_ID:
            return ()
        return self.pictures.in_tokens(token_ids)

    def check_senders(self, pictures: Sequence[Picture], tenant: str) -> None:
        """See `Pictures.check_senders`."""
        if self.pictures is not None and pictures:
            self.pictures.check_senders(pictures, tenant)

    def uncut_parts(
        self, token_ids: IntArray, pictures: Sequence[Picture]
    ) -> tuple[tuple[int, int], ...]:
        """See `Pictures.uncut_parts`."""
        if self.pictures is None or not pictures:
            return ()
        return self.pictures.uncut_parts(token_ids, pictures)

    def _messages(self, prompt: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return check_messages(prompt, self.pictures)

    def _ids(
        self, prompt: Prompt, options: ChatOptions | None, held: list[Any]
    ) -> NDArray[np.integer[Any]]:
        if is_conversation(prompt):
            messages = self._messages(prompt)
            held += messages
            begun = self.at_its_start(messages, options)
            return np.asarray(self._tokenizer().encode_chat(messages, begun), np.int64)
        if options is not None and options.is_given:
            raise InvalidRequest(
                "tools and chat_template_kwargs are for chat messages; the prompt is "
                + shown(prompt)
            )
        if isinstance(prompt, str):
            return np.asarray(self._tokenizer().encode(prompt), np.int64)
        ids = _as_array(prompt)
        if ids is None:
            raise InvalidRequest(f"{_KINDS}; got {shown(prompt)}")
        return ids

    def backend_tokenizer(self) -> Any:
        """See `Tokenizer.backend`. InvalidRequest without a tokenizer."""
        return self._tokenizer().backend

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest("the model has no tokenizer: give the prompt as token ids")
        return self.tokenizer


def is_token_id(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_conversation(prompt: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether a prompt is a list of mappings, which are read as chat messages. Their content is not
    checked."""
    if not isinstance(prompt, list | tuple):
        return False
    return bool(prompt) and all(isinstance(part, Mapping) for part in prompt)


def as_prompts(given: object) -> tuple[list[Any], bool]:
    """Returns a list of prompts, not checked yet, and whether several were given.

    Several prompts are an iterable of prompts, which may be empty. One prompt is text, integers, or
    a list of mappings. Raises InvalidRequest for anything else.
    """
    if isinstance(given, np.ndarray) and (given.ndim != 1 or given.dtype.kind in "UO"):
        if not given.ndim:
            raise InvalidRequest(f"{_KINDS}, or several of these; got {shown(given)}")
        given = given.tolist() if given.dtype.kind in "UO" else list(given)
    if isinstance(given, str | np.ndarray):
        return [given], False
    if not isinstance(given, Iterable) or isinstance(given, bytes | Mapping | Set):
        raise InvalidRequest(f"{_KINDS}, or several of these; got {shown(given)}")
    several = given if isinstance(given, list | tuple) else list(given)
    if several and (is_token_id(several[0]) or isinstance(several[0], Mapping)):
        return [several], False
    return list(several), True


def check_prompts(given: object) -> list[Any]:
    """Returns a list of prompts, not checked yet. Raises InvalidRequest for a single prompt and for
    anything else."""
    prompts, is_list = as_prompts(given)
    if not is_list:
        raise InvalidRequest(f"prompts must be a list of prompts, got one: {shown(given)}")
    return prompts


def check_messages(
    messages: Sequence[Any], pictures: Pictures | None = None
) -> list[dict[str, Any]]:
    """Returns chat messages as plain dicts, with a `Picture` in each part that is one. pictures:
    reads them; None: the model takes text only. Raises InvalidRequest."""
    checked = []
    reader = None if pictures is None else pictures.of_prompt()
    for message in messages:
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise InvalidRequest(
                'a chat message is {"role": ..., "content": ...}; got ' + shown(message)
            )
        role, content = message["role"], message["content"]
        if not ROLE.fullmatch(role):
            raise InvalidRequest(
                f"a role must be 1 to 64 letters, digits, _ and -, got {shown(role)}"
            )
        if reader is not None and has_pictures(content):
            content = read_pictures(content, role, reader)
        elif not _is_text(content) and not message.get("tool_calls"):
            raise InvalidRequest(
                "a chat message's content must be text or a list of "
                f'{{"type": "text", "text": ...}}, got {shown(content)}'
            )
        checked.append({**message, "content": content})
    return checked


def _is_text(content: object) -> bool:
    if isinstance(content, list | tuple):
        return bool(content) and all(map(is_text_part, content))
    return isinstance(content, str)


def _as_array(ids: object) -> NDArray[np.integer[Any]] | None:
    """Returns [n] token ids, not checked against the vocabulary; None if `ids` is not a list or
    array of integers. Raises InvalidRequest for an array of another kind."""
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise InvalidRequest(f"token ids must be a flat array of integers, got {ids!r}")
        return ids
    if not isinstance(ids, list | tuple):
        return None
    data = pack_int32(ids)
    if data is not None:  # a bool packs as 0 or 1
        packed = np.frombuffer(data, np.int32)
        small = np.flatnonzero(packed.view(np.uint32) <= 1)
        return packed if all(is_token_id(ids[index]) for index in small) else None
    if not all(map(is_token_id, ids)):
        return None
    try:
        return np.asarray(ids, np.int64)
    except OverflowError:
        raise InvalidRequest("a token id is out of range of any vocabulary") from None
