"""The record of a step's rows on the host: what attention plans are made from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IndexArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HostIndex:
    """R rows of a step, whose T new tokens are laid end to end; the names are FlashInfer's."""

    start: IndexArray  # [R] position of each row's first new token
    qo_indptr: IndexArray  # [R + 1] row r's new tokens are [qo_indptr[r], qo_indptr[r + 1])
    kv_indptr: IndexArray  # [R + 1] row r's pages are kv_indices[kv_indptr[r] : kv_indptr[r + 1]]
    kv_indices: NDArray[np.int32]  # [total pages] page ids
    seq_lens: IndexArray  # [R] tokens of each row after the step
