"""Checks of arguments that are objects of ours, or paths."""

from __future__ import annotations

import os
from typing import TypeVar

from radixserve.checks import shown
from radixserve.errors import InvalidRequest

T = TypeVar("T")


def check_type(name: str, value: object, kind: type[T]) -> T:
    """Returns `value` if it is a `kind`. Raises InvalidRequest for other values."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise InvalidRequest(f"{name} must be {article} {kind.__name__}, got {shown(value)}")
    return value


def check_path(name: str, value: object) -> str:
    """Returns the path of a file or folder as text. Raises InvalidRequest for what is no path, and
    for an empty one."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path:
        raise InvalidRequest(f"{name} must be a path, got {shown(value)}")
    return path
