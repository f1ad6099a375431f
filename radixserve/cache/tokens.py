"""Token ids at the cache's interface: converts any sequence of ints to int32 arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray, pack_int32
from radixserve.errors import InvalidRequest

TokenIds = Sequence[int] | NDArray[np.integer[Any]]

TOKEN_BYTES = 4  # inside the cache, tokens are int32 bytes: one memcmp compares many

_INT32 = np.dtype(np.int32)
_SIGN_BYTE = 3 if sys.byteorder == "little" else 0  # of an int32
_MANY = 4096  # bytes from which numpy finds a negative id faster
as_view: Callable[[Any], memoryview] = memoryview  # numpy arrays are buffers, says 3.12 only


def as_token_ids(tokens: TokenIds) -> IntArray:
    """[n] int32. Raises InvalidRequest for anything but a flat sequence of ids, 0 to 2**31 - 1.

    An int32 array is returned as it is: `check_not_negative` where its ids enter a sequence. What
    is looked up need not be checked, since no negative id is ever cached.
    """
    if type(tokens) is np.ndarray and tokens.dtype is _INT32 and tokens.ndim == 1:
        return cast(IntArray, tokens)
    if (type(tokens) is list or type(tokens) is tuple) and tokens and type(tokens[0]) is int:
        packed = pack_int32(tokens)
        if packed is not None:  # else numpy tells what is wrong
            return packed
    try:
        ids = np.asarray(tokens)
    except (ValueError, OverflowError, TypeError) as error:
        raise InvalidRequest(f"token ids must be a flat sequence of integers: {error}") from None
    if ids.ndim != 1:
        raise InvalidRequest(f"token ids must be a flat sequence, got {ids.ndim} dimensions")
    if not len(ids):
        return np.empty(0, np.int32)
    if not np.issubdtype(ids.dtype, np.integer):
        raise InvalidRequest(f"token ids must be integers, got {ids.dtype}")
    if ids.min() < 0 or ids.max() >= 2**31:
        raise InvalidRequest(f"token ids must be >= 0 and < 2**31, got {ids.min()} to {ids.max()}")
    return ids.astype(np.int32)


def token_view(tokens: TokenIds) -> memoryview:
    """[n] int32, contiguous; not a copy where `tokens` are. Raises as `as_token_ids`."""
    if type(tokens) is np.ndarray and tokens.dtype is _INT32:
        view = as_view(tokens)
        # its format is "=i" where memory is not aligned
        if view.format == "i" and view.ndim == 1 and view.c_contiguous:
            return view
    ids = as_token_ids(tokens)
    return as_view(ids.copy() if ids is tokens else ids)


def check_not_negative(data: bytes) -> None:
    """InvalidRequest for a negative id among `data` (int32 bytes). O(tokens)."""
    if len(data) < _MANY:
        is_valid = data[_SIGN_BYTE::TOKEN_BYTES].isascii()
    else:
        is_valid = np.frombuffer(data, np.int32).min() >= 0
    if not is_valid:
        least = np.frombuffer(data, np.int32).min()
        raise InvalidRequest(f"token ids must be >= 0, got {least}")
