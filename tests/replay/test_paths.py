"""A trace as paths in one tree, and reuse distances, against plain counting."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixserve.replay.bounds import reuse_distances, reuse_spans
from radixserve.replay.paths import build_paths
from tests.replay.naive_lru import naive_lru_hits
from tests.replay.traces import make_trace, random_turns, synthetic_trace


@pytest.mark.parametrize("seed", range(20))
def test_paths_against_sets_of_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    turns = random_turns(rng, 40, longest=12, alphabet=2, fresh=False)
    names = [rng.choice("ab") for _ in turns]
    trace = make_trace(turns, namespaces=names)
    paths = build_paths(trace)
    known: set[tuple[object, ...]] = set()
    for request in trace:
        path = paths.path(request.index)
        lengths = paths.lengths[path]
        assert lengths.sum() == len(request.kept)
        assert (paths.starts[path] == np.cumsum(lengths) - lengths).all()
        usable = int(paths.num_usable[request.index])
        assert lengths[:usable].sum() == len(request.prompt) - 1
        kept = request.kept.tolist()
        prefixes = [(request.namespace, *kept[:end]) for end in range(1, len(kept) + 1)]
        wanted = next(
            (at for at in range(len(request.prompt) - 1) if prefixes[at] not in known),
            len(request.prompt) - 1,
        )
        assert paths.reusable[request.index] == wanted
        known.update(prefixes)
    assert paths.distinct_tokens == len(known)


def test_a_prompt_of_one_token_reuses_nothing() -> None:
    paths = build_paths(make_trace([([5], ()), ([5], [6, 7]), ([5, 6, 8], ())]))
    assert paths.reusable.tolist() == [0, 0, 2]
    assert paths.distinct_tokens == 3


@pytest.mark.parametrize("seed", range(4))
def test_reuse_distances_are_the_hits_of_lru_at_every_size(seed: int) -> None:
    trace = synthetic_trace(80, seed)
    spans = reuse_spans(build_paths(trace))
    for size in (trace.longest, 2 * trace.longest, 5 * trace.longest, 10**6):
        hits = np.bincount(
            spans[:, 0], np.clip(size - spans[:, 1], 0, spans[:, 2]), minlength=len(trace)
        )
        assert hits.tolist() == naive_lru_hits(trace, size)


def test_the_distribution_holds_every_reused_token() -> None:
    trace = synthetic_trace(80)
    paths = build_paths(trace)
    distances = reuse_distances(reuse_spans(paths))
    assert distances.tokens.sum() == pytest.approx(paths.reusable_tokens)
    assert (distances.tokens >= 0).all()
    assert len(distances.edges) == len(distances.tokens) + 1
    assert (np.diff(distances.edges) > 0).all()


def test_a_trace_without_reuse_has_no_distances() -> None:
    distances = reuse_distances(reuse_spans(build_paths(make_trace([([1, 2], ()), ([3], ())]))))
    assert distances.tokens.sum() == 0.0
