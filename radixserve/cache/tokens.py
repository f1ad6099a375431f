"""Token ids at the cache's interface: converts any sequence of ints to int32 arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray, has_negative, pack_int32
from radixserve.errors import InvalidRequest

TokenIds = Sequence[int] | NDArray[np.integer[Any]]

TOKEN_BYTES = 4  # inside the cache, tokens are int32 bytes: one memcmp compares many

_ARRAY = np.ndarray
_INT32 = np.dtype(np.int32)
as_view: Callable[[Any], memoryview] = memoryview  # numpy arrays are buffers, says 3.12 only


def as_token_ids(tokens: TokenIds) -> IntArray:
    """[n] int32. Raises InvalidRequest for anything but a flat sequence of ids, 0 to 2**31 - 1.

    An int32 array is returned as it is, unchecked: what is looked up need not be checked, since no
    negative id is ever cached. What enters a sequence is: see `token_bytes`.
    """
    ids: Any = tokens
    if type(ids) is _ARRAY and ids.dtype is _INT32 and ids.ndim == 1:
        return ids
    return np.frombuffer(_converted(tokens), np.int32)


def token_view(tokens: TokenIds) -> memoryview:
    """[n] int32, contiguous; a contiguous int32 array is not copied. Raises as `as_token_ids`. A
    view of unaligned memory may be sliced, but not indexed."""
    ids: Any = tokens
    if type(ids) is not _ARRAY or ids.dtype is not _INT32 or ids.ndim != 1:
        ids = np.frombuffer(_converted(tokens), np.int32)
    view = as_view(ids)
    return view if view.c_contiguous else as_view(ids.copy())


def token_bytes(tokens: TokenIds) -> bytes:
    """[n] int32 as bytes. Raises as `as_token_ids`, and for a negative id in any array. O(n)."""
    if type(tokens) is not _ARRAY or tokens.dtype is not _INT32 or tokens.ndim != 1:
        return _converted(tokens)
    data = tokens.tobytes()
    if has_negative(data):
        raise InvalidRequest(f"token ids must be >= 0, got {tokens.min()}")
    return data


def _converted(tokens: TokenIds) -> bytes:
    """`token_bytes` of anything but an int32 array."""
    if (type(tokens) is list or type(tokens) is tuple) and tokens and type(tokens[0]) is int:
        packed = pack_int32(tokens)
        if packed is not None:  # numpy's error names the problem
            return packed
    try:
        ids = np.asarray(tokens)
    except (ValueError, OverflowError, TypeError) as error:
        raise InvalidRequest(f"token ids must be a flat sequence of integers: {error}") from None
    if ids.ndim != 1:
        raise InvalidRequest(f"token ids must be a flat sequence, got {ids.ndim} dimensions")
    if not len(ids):
        return b""
    if not np.issubdtype(ids.dtype, np.integer):
        raise InvalidRequest(f"token ids must be integers, got {ids.dtype}")
    if ids.min() < 0 or ids.max() >= 2**31:
        raise InvalidRequest(f"token ids must be >= 0 and < 2**31, got {ids.min()} to {ids.max()}")
    return ids.astype(np.int32).tobytes()
