"""Counters of several replicas as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SHARED = frozenset({"page_size", "seconds"})  # the same everywhere, or nearly


def add_stats(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers are added up, records field by field, lists joined; hit_rate is that of the sum."""
    if not each:
        return {}
    found: dict[str, Any] = {}
    for name, first in each[0].items():
        values = [one[name] for one in each if name in one]
        if isinstance(first, Mapping):
            found[name] = add_stats(values)
        elif isinstance(first, list):
            found[name] = [item for value in values for item in value]
        elif name in _SHARED:
            found[name] = max(values)
        else:
            found[name] = sum(values)
    if "hit_rate" in found:
        prompted = found.get("prompted_tokens", 0)
        found["hit_rate"] = found["reused_tokens"] / prompted if prompted else 0.0
    return found
