"""Pictures in messages that are typed: files that a message names, as a terminal writes the path of
one that is dropped on it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
# Quoted, or with escaped spaces; a quotation mark within a word is an apostrophe.
_WORD = re.compile(r"(?<!\S)(?:'[^']*'|\"[^\"]*\"|(?:\\.|[^\s\\])+)(?!\S)")


def take_pictures(message: str) -> tuple[list[Path], str]:
    """The files of pictures that a message names, and its text without them."""
    paths: list[Path] = []

    def take(match: re.Match[str]) -> str:
        path = picture_file(match[0])
        if path is None:
            return match[0]
        paths.append(path)
        return ""

    text = _WORD.sub(take, message)
    return paths, text.strip() if paths else message


def picture_file(word: str) -> Path | None:
    """The path that a word stands for, if it is that of a picture's file that exists."""
    try:
        (name,) = shlex.split(word)
        if name.startswith("file://"):
            name = unquote(urlsplit(name).path)
        path = Path(name).expanduser()
        is_picture = path.suffix.lower() in SUFFIXES and path.is_file()
    except (ValueError, OSError, RuntimeError):
        return None
    return path if is_picture else None


def said(content: Any) -> str:
    """A message's content as text, with its pictures in brackets."""
    if not isinstance(content, list | tuple):
        return str(content)
    parts = []
    for part in content:
        picture = part.get("image")
        size = getattr(picture, "size", None)
        shown = "[picture]" if size is None else f"[picture {size[0]} x {size[1]}]"
        parts.append(part.get("text") or shown)
    return " ".join(parts)
