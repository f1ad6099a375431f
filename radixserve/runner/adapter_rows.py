"""The rows of a step that adapters compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from radixserve.attention.base import AdapterRows, IndexArray
from radixserve.runner.input_batch import InputBatch


def adapter_rows(inputs: InputBatch, loaded: Mapping[int, Any]) -> list[AdapterRows[Any]]:
    """Returns the tokens of each adapter, grouped. loaded: adapters by their number."""
    starts, bounds = inputs.rows.starts, inputs.host.qo_indptr
    ranges: dict[int, list[IndexArray]] = {}
    if inputs.num_tokens == len(starts):  # a token a row, as in most steps
        rows: dict[int, list[int]] = {}
        for row, adapter in inputs.rows.adapters.items():
            if starts[row] >= adapter.start:
                rows.setdefault(adapter.number, []).append(row)
        ranges = {number: [np.array(own, np.int64)] for number, own in rows.items()}
        return _groups(inputs, loaded, ranges)
    for row, adapter in inputs.rows.adapters.items():
        first = bounds[row] + max(0, adapter.start - starts[row])
        if first < bounds[row + 1]:
            tokens = np.arange(first, bounds[row + 1])
            ranges.setdefault(adapter.number, []).append(tokens)
    return _groups(inputs, loaded, ranges)


def _groups(
    inputs: InputBatch, loaded: Mapping[int, Any], ranges: Mapping[int, list[IndexArray]]
) -> list[AdapterRows[Any]]:
    groups = []
    for number, parts in ranges.items():
        tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
        sampled = tokens
        if len(inputs.logits_indices) < inputs.num_tokens:
            is_own = np.zeros(inputs.num_tokens, bool)
            is_own[tokens] = True
            sampled = np.flatnonzero(is_own[inputs.logits_indices])
        groups.append(AdapterRows(loaded[number], tokens, sampled))
    return groups
