"""The rows of a step that adapters compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from radixserve.attention.base import AdapterRows
from radixserve.runner.input_batch import InputBatch


def adapter_rows(inputs: InputBatch, loaded: Mapping[int, Any]) -> list[AdapterRows[Any]]:
    """Returns the tokens of each adapter, grouped. loaded: adapters by their number."""
    starts, bounds = inputs.rows.starts, inputs.host.qo_indptr
    ranges: dict[int, list[np.ndarray[Any, np.dtype[np.int64]]]] = {}
    for row, adapter in inputs.rows.adapters.items():
        first = bounds[row] + max(0, adapter.start - starts[row])
        if first < bounds[row + 1]:
            tokens = np.arange(first, bounds[row + 1])
            ranges.setdefault(adapter.number, []).append(tokens)
    groups = []
    for number, parts in ranges.items():
        tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
        sampled = np.flatnonzero(np.isin(inputs.logits_indices, tokens, assume_unique=True))
        groups.append(AdapterRows(loaded[number], tokens, sampled))
    return groups
