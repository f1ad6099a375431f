"""The prompts of a request: text, texts, token ids or lists of them, as checked token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from radixserve.api.runtime import Runtime
from radixserve.arrays import IntArray
from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.server.errors import ApiError, invalid
from radixserve.text.prompts import is_token_id

T = TypeVar("T")
_MUCH_TEXT = 8_192  # characters; tokenising more than this goes to another thread
_KINDS = "text, a list of texts, a list of token ids, or a list of lists of token ids"


async def read_prompts(
    runtime: Runtime,
    given: Any,
    param: str,
    max_prompts: int,
    *,
    add_special_tokens: bool = True,
    keep_last: int | None = None,
) -> tuple[list[IntArray], bool]:
    """The prompts, and whether `given` is a list of them. ApiError names the bad item.

    `keep_last`: so many of the last tokens of each.
    """
    items, is_list = _split(given, param)
    if len(items) > max_prompts:
        raise ApiError(
            400, f"{param} has {len(items)} items; at most {max_prompts} are allowed", param=param
        )

    def read() -> list[IntArray]:
        return [
            _read(runtime, item, param, at if is_list else None, add_special_tokens, keep_last)
            for at, item in enumerate(items)
        ]

    num_characters = sum(len(item) for item in items if isinstance(item, str | list))
    return await in_thread_if(num_characters > _MUCH_TEXT, read), is_list


async def in_thread_if(is_much: bool, function: Callable[[], T]) -> T:
    """Call it in another thread where it would hold up the event loop."""
    return await asyncio.to_thread(function) if is_much else function()


def is_much_text(text: str) -> bool:
    return len(text) > _MUCH_TEXT


def _split(given: Any, param: str) -> tuple[Sequence[Any], bool]:
    if isinstance(given, str):
        return [given], False
    if isinstance(given, list) and given:
        if is_token_id(given[0]):
            return [given], False
        if isinstance(given[0], str | list):
            return given, True
    raise ApiError(400, f"{param} must be {_KINDS}, got {shown(given)}", param=param)


def _read(
    runtime: Runtime,
    item: Any,
    param: str,
    index: int | None,
    add_special_tokens: bool,
    keep_last: int | None,
) -> IntArray:
    try:
        is_ids = isinstance(item, list) and set(map(type, item)) <= {int}
        if not (is_ids or isinstance(item, str)):
            raise InvalidRequest(f"a prompt must be text or token ids, got {shown(item)}")
        if isinstance(item, str) and not add_special_tokens:
            if runtime.tokenizer is None:
                raise InvalidRequest("the model has no tokenizer: give the prompt as token ids")
            item = runtime.tokenizer.encode_more(item)
        return runtime.tokenize(item, keep_last=keep_last)
    except InvalidRequest as error:
        raise invalid(error, param=param, index=index) from None
