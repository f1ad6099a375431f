"""Token ids at the cache's interface: converts any sequence of ints to int32 arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray
from radixserve.errors import InvalidRequest

TokenIds = Sequence[int] | NDArray[np.integer[Any]]

TOKEN_BYTES = 4  # inside the cache, tokens are int32 bytes: one memcmp compares many

_INT32 = np.dtype(np.int32)
as_view: Callable[[Any], memoryview] = memoryview  # numpy arrays are buffers, says 3.12 only


def as_token_ids(tokens: TokenIds) -> IntArray:
    """[n] int32. Raises InvalidRequest for anything but a flat sequence of int32 values."""
    if type(tokens) is np.ndarray and tokens.dtype is _INT32 and tokens.ndim == 1:
        return cast(IntArray, tokens)
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
    if ids.min() < -(2**31) or ids.max() >= 2**31:
        raise InvalidRequest("token ids must fit in int32")
    return ids.astype(np.int32)


def token_view(tokens: TokenIds) -> memoryview:
    """[n] int32, contiguous; not a copy where `tokens` are. Raises as `as_token_ids`."""
    if type(tokens) is np.ndarray and tokens.dtype is _INT32 and tokens.ndim == 1:
        view = as_view(tokens)
        if view.c_contiguous and view.format == "i":  # it is "=i" where memory is not aligned
            return view
    return as_view(as_token_ids(tokens).copy())
