"""Pictures in chat messages: their parts, and their marks in rendered text.

A picture is a part {"type": "image", "image": Picture} of a message's content. The template writes
a marker for it, a special token. In rendered text the SHA-256 of the picture follows the marker,
between two U+FDD1: so equal texts have equal pictures, wherever texts are compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.picture import Picture, Pictures, PromptPictures
from radixserve.request import FIRST_PICTURE_ID
from radixserve.text.tainted_str import concatenated, taint_of

PICTURE_MARK = "\ufdd1"
_MARKS = re.compile(f"{PICTURE_MARK}([0-9a-f]{{64}}){PICTURE_MARK}")
_TYPES = ("image", "image_url", "input_image")
_ROLES = ("user", "tool")  # of messages that may have pictures


def is_picture_part(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _TYPES


def is_text_part(part: object) -> bool:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        return False
    return isinstance(part.get("text"), str)


def has_pictures(content: object) -> bool:
    return isinstance(content, list | tuple) and any(map(is_picture_part, content))


def read_pictures(
    content: Sequence[Mapping[str, Any]], role: str, pictures: PromptPictures
) -> list[dict[str, Any]]:
    """Returns the parts of a message with a `Picture` in those that are one. Raises
    InvalidRequest."""
    check_picture_role(role)
    parts: list[dict[str, Any]] = []
    for part in content:
        if is_picture_part(part):
            given = part.get("image")
            if isinstance(given, Picture):
                pictures.note(given)
            else:
                given = pictures.open(part)()
            parts.append({"type": "image", "image": given})
        elif is_text_part(part):
            parts.append(dict(part))
        else:
            raise InvalidRequest(
                'a part of a message must be {"type": "text", "text": ...} or a picture, got '
                + shown(part)
            )
    return parts


def check_picture_role(role: str) -> None:
    """Raise InvalidRequest if messages of a role have no pictures."""
    if role not in _ROLES:
        raise InvalidRequest(
            f"a message of the role {role!r} has a picture: those of {' and '.join(_ROLES)} may"
        )


def as_parts(content: Any) -> list[dict[str, Any]]:
    """Returns a message's content as parts; empty text has none."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content or ())


def taken_out(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Picture]]:
    """Returns messages as templates read them, and their pictures in order."""
    pictures: list[Picture] = []
    chat = []
    for message in messages:
        content: Any = message.get("content")
        if has_pictures(content):
            pictures += [part["image"] for part in content if is_picture_part(part)]
            content = [{"type": "image"} if is_picture_part(part) else part for part in content]
        chat.append({**message, "content": content} if "content" in message else dict(message))
    return chat, pictures


def without_pictures(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages without the parts that are pictures."""
    return [
        {**one, "content": [part for part in one["content"] if not is_picture_part(part)]}
        if has_pictures(one.get("content"))
        else dict(one)
        for one in messages
    ]


def check_no_marks(text: str) -> None:
    """Raise InvalidRequest for a rendered text that could be taken for one with marks."""
    if PICTURE_MARK in text:
        raise InvalidRequest("U+FDD1, which is no character, cannot be in a chat of this model")


def with_marks(text: str, marker: str, pictures: Sequence[Picture]) -> str:
    """Returns a rendered text with the mark of a picture after each marker of the template's own.
    Raises InvalidRequest where it has another number of them."""
    taint, starts, start = taint_of(text), [], str.find(text, marker)
    while start >= 0:
        if not any(taint[start : start + len(marker)]):
            starts.append(start)
        start = str.find(text, marker, start + len(marker))
    if len(starts) != len(pictures):
        raise InvalidRequest(f"the chat template shows {len(starts)} of {len(pictures)} pictures")
    parts, before = [], 0
    for start, picture in zip(starts, pictures, strict=True):
        end = start + len(marker)
        parts += [text[before:end], f"{PICTURE_MARK}{picture.digest.hex()}{PICTURE_MARK}"]
        before = end
    return concatenated([*parts, text[before:]])


def split_marks(text: str, pictures: Pictures) -> tuple[str, list[Picture]]:
    """Returns a rendered text without marks of pictures, with the text around each, and these
    pictures."""
    size, found, parts, before = len(pictures.marker), [], [], 0
    for mark in _MARKS.finditer(text):
        picture = pictures.by_digest(bytes.fromhex(mark[1]))
        start, (lead, tail) = mark.start() - size, picture.around
        parts += [text[before:start], lead, text[start : mark.start()], tail]
        found.append(picture)
        before = mark.end()
    return "".join([*parts, text[before:]]), found


def shown_text(
    token_ids: Sequence[int], decode: Callable[[list[int]], str], pictures: Pictures | None
) -> str:
    """Returns the text of tokens for people, with the digest and the size of each picture."""
    parts = []
    for is_row, run in groupby(token_ids, FIRST_PICTURE_ID.__le__):
        ids = list(run)
        parts.append(_names(ids, pictures) if is_row else decode(ids))
    return "".join(parts)


def _names(rows: list[int], pictures: Pictures | None) -> str:
    try:
        found = () if pictures is None else pictures.in_tokens(np.array(rows, np.int32))
    except InvalidRequest:  # it is not kept any more
        found = ()
    names = (f"[picture {one.digest.hex()[:8]} {one.size[0]}x{one.size[1]}]" for one in found)
    return "".join(names) or "[picture]"


def with_rows(token_ids: Sequence[int], marker_id: int, pictures: Sequence[Picture]) -> list[int]:
    """Returns the tokens of a rendered text with those of a picture in place of each marker."""
    if sum(token == marker_id for token in token_ids) != len(pictures):
        raise InvalidRequest("the tokenizer does not read the marker of a picture as one token")
    rest = iter(pictures)
    ids: list[int] = []
    for token in token_ids:
        ids += next(rest).prompt_ids if token == marker_id else (token,)
    return ids
