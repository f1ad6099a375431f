"""`read_prompts`: a request's prompts, texts or token ids or lists of these, as checked token ids.

It also has the tests for whether work is too large for the event loop.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel

from radixserve.api.runtime import Runtime
from radixserve.arrays import IntArray
from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.request import TruncationSide
from radixserve.server.wire.errors import invalid, wrong_field
from radixserve.text.prompts import is_token_id

T = TypeVar("T")
_LONG_TEXT = 8_192  # characters; tokenising more than this goes to another thread
_PROMPT_CHARACTERS = 64  # the fixed cost of a prompt, in characters that take as long
_KINDS = "text, a list of texts, a list of token ids, or a list of lists of token ids"


async def read_prompts(
    runtime: Runtime,
    given: Any,
    param: str,
    max_prompts: int,
    *,
    add_special_tokens: bool = True,
    keep_last: int | None = None,
    truncation_side: TruncationSide | None = None,
) -> tuple[list[IntArray], bool]:
    """The token ids of each prompt, and whether `given` is a list of prompts.

    param            the name of the field, for errors
    keep_last        keep this many of the last tokens of each prompt; None: all
    truncation_side  "right": keep the first tokens instead

    Raises ApiError 400, which names the wrong item.
    """
    items, is_list = _split(given, param)
    if len(items) > max_prompts:
        raise wrong_field(param, f"has {len(items)} items; at most {max_prompts} are allowed")
    side = truncation_side or "left"

    def read() -> list[IntArray]:
        return [
            _read(
                runtime,
                item,
                param,
                index if is_list else None,
                add_special_tokens,
                keep_last,
                side,
            )
            for index, item in enumerate(items)
        ]

    return await in_thread_if(are_long(items), read), is_list


async def in_thread_if(is_large: bool, function: Callable[[], T]) -> T:
    """Call `function`: in a thread if `is_large`, so that it does not block the event loop."""
    return await asyncio.to_thread(function) if is_large else function()


def are_long(prompts: Sequence[Any]) -> bool:
    """Whether there are too many prompts, or too long ones, to tokenise them in the event loop."""
    sizes = (len(prompt) for prompt in prompts if isinstance(prompt, str | list | array))
    return sum(sizes, _PROMPT_CHARACTERS * len(prompts)) > _LONG_TEXT


def is_long_text(text: str) -> bool:
    """Whether a text is too long to tokenise it in the event loop."""
    return len(text) > _LONG_TEXT


def is_large(value: Any) -> bool:
    """Whether a JSON value has many characters, names of members included, or many parts. Stops as
    soon as that is certain."""
    size, left = 0, [value]
    while left and size <= _LONG_TEXT:
        part = left.pop()
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, dict | list | tuple):
            size += len(part)
            if isinstance(part, dict):
                left.extend(part)
                left.extend(part.values())
            else:
                left.extend(part[:_LONG_TEXT])
        elif isinstance(part, BaseModel):
            left.append(part.__dict__)
    return size > _LONG_TEXT


def num_characters(value: Any) -> int:
    """The total length of all texts in a JSON value, without names of members. O(parts)."""
    size, left = 0, [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, dict):
            left.extend(part.values())
        elif isinstance(part, list | tuple):
            left.extend(part)
    return size


def _split(given: Any, param: str) -> tuple[Sequence[Any], bool]:
    """The prompts in `given`, and whether it is a list of them. Raises ApiError."""
    if isinstance(given, str | array):
        return [given], False
    if isinstance(given, list) and given:
        if is_token_id(given[0]):
            return [given], False
        if isinstance(given[0], str | list | array):
            return given, True
    raise wrong_field(param, f"must be {_KINDS}, got {shown(given)}")


def _read(
    runtime: Runtime,
    item: Any,
    param: str,
    index: int | None,
    add_special_tokens: bool,
    keep_last: int | None,
    truncation_side: TruncationSide,
) -> IntArray:
    try:
        if isinstance(item, array):
            item = np.frombuffer(item, np.int64)
        is_ids = isinstance(item, np.ndarray) or (
            isinstance(item, list) and set(map(type, item)) <= {int}
        )
        if not (is_ids or isinstance(item, str)):
            raise InvalidRequest(f"a prompt must be text or token ids, got {shown(item)}")
        if isinstance(item, str) and not add_special_tokens:
            if runtime.tokenizer is None:
                raise InvalidRequest("the model has no tokenizer: give the prompt as token ids")
            item = runtime.tokenizer.encode_more(item)
        return runtime.tokenize(item, keep_last=keep_last, truncation_side=truncation_side)
    except InvalidRequest as error:
        raise invalid(error, param=param, index=index) from None
