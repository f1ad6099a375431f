"""What `Runtime` reports has the keys and types that its annotations promise."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest

from radixserve.api.runtime import Runtime
from radixserve.reports import (
    EngineStats,
    EvictionCandidate,
    FlatTreeDump,
    HeldByHints,
    TreeDump,
)
from radixserve.request import SamplingParams


@pytest.fixture(scope="module", params=["radix", "hash"])
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    with Runtime("demo", num_pages=256, page_size=4, cache=request.param) as runtime:
        runtime.generate("The json module", SamplingParams(max_tokens=8))
        if request.param == "radix":
            runtime.hint("pin", "The json module")
            with runtime.branch("The json module reads") as branch:
                branch.generate(SamplingParams(max_tokens=4))
                yield runtime
        else:
            yield runtime


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, all its parts included."""
    if is_typeddict(hint):
        hints = get_type_hints(hint, include_extras=True)
        needed = {key for key, of_key in hints.items() if get_origin(of_key) is not NotRequired}
        assert needed <= value.keys() <= hints.keys(), needed ^ value.keys()
        for key, item in value.items():
            assert fits(item, hints[key]), f"{key}: {item!r} is not of {hints[key]}"
        return True
    kind, parts = get_origin(hint), get_args(hint)
    if kind is NotRequired:
        return fits(value, parts[0])
    if kind in (types.UnionType, Union):
        return any(fits(value, part) for part in parts)
    if kind is list:
        return type(value) is list and all(fits(item, parts[0]) for item in value)
    if kind is dict:
        return all(fits(k, parts[0]) and fits(item, parts[1]) for k, item in value.items())
    return type(value) is hint or (hint is float and type(value) is int)


def test_reports_have_their_types(runtime: Runtime) -> None:
    assert fits(runtime.cache_stats(), EngineStats)
    assert fits(runtime.held_by_hints(), HeldByHints)
    assert fits(runtime.cache_tree(), TreeDump)
    assert fits(runtime.cache_tree(flat=True), FlatTreeDump)
    preview = runtime.eviction_preview()
    assert preview
    assert fits(preview, list[EvictionCandidate])


def test_they_are_plain_dicts(runtime: Runtime) -> None:
    stats = runtime.cache_stats()
    assert type(stats) is dict
    assert stats["hit_rate"] == {**stats}["hit_rate"]
