"""What each source guesses, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from radixserve.cache import CacheSequence, HashBlockCache, RadixCache
from radixserve.drafts.namespace_text import NamespaceText
from radixserve.drafts.own_text import OwnText
from radixserve.drafts.prediction import Prediction
from radixserve.drafts.runs import hash_run, hash_runs
from radixserve.drafts.source import DraftContext
from radixserve.drafts.tree import CachedContinuation
from radixserve.request import Request, SamplingParams
from radixserve.text.prediction import count_matched
from radixserve.text.token_search import find_first, find_last


def context(
    tokens: Sequence[int],
    sequence: CacheSequence | None = None,
    *,
    num_prompt: int = 1,
    namespace: str = "",
    prediction: Sequence[int] | None = None,
) -> DraftContext:
    ids = np.array(tokens, np.int32)
    request = Request(
        "r",
        ids[:num_prompt],
        SamplingParams(namespace=namespace),
        0,
        frozenset(),
        1 << 20,
        prediction=None if prediction is None else np.array(prediction, np.int32),
    )
    if sequence is None:
        sequence = RadixCache(64).acquire([1])
    return DraftContext(request, ids, num_prompt, sequence, None)


def grown(context: DraftContext, *more: int) -> DraftContext:
    """The same request with further tokens."""
    context.tokens = np.append(context.tokens, np.array(more, np.int32))
    return context


def test_searches_find_whole_tokens() -> None:
    text = np.array([1 << 8, 1, 5, 1, 5], np.int32).tobytes()
    wanted = np.array([1, 5], np.int32).tobytes()
    assert find_first(text, wanted, 0) == 3
    assert find_first(text, wanted, 2) == 5
    assert find_last(text, wanted, 5) == 5
    assert find_last(text, wanted, 4) == 3
    one = np.array([1], np.int32).tobytes()
    shifted = np.array([1 << 8, 7], np.int32).tobytes()  # has the bytes of 1 between tokens
    assert find_first(shifted, one, 0) == find_last(shifted, one, 2) == -1


def test_hashes_of_a_text_are_those_of_its_runs() -> None:
    tokens = np.random.default_rng(0).integers(0, 1 << 31, 40, np.int32)
    for length in (4, 5):
        for seed in (0, 0xFFFFFFFF):
            runs = [tokens[start : start + length].tolist() for start in range(41 - length)]
            hashes = hash_runs(tokens, length, seed).tolist()
            assert hashes == [hash_run(run, seed) for run in runs]
            assert len(set(hashes)) == len(hashes)


def test_own_text() -> None:
    """The latest place counts, and is followed while it is right."""
    source = OwnText()
    asked = context([9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4])
    assert source.draft(asked, 3) == [5, 6, 7]
    assert source.draft(grown(asked, 5), 3) == [6, 7, 8]
    assert source.draft(grown(asked, 40), 3) == ()
    assert source.draft(grown(asked, 6, 7, 8, 1), 2) == [2, 3]
    assert source.draft(context([1, 2, 3]), 3) == ()
    assert source.draft(context([1, 2, 3, 4, 50, 1, 2, 3, 4, 60, 1, 2, 3, 4]), 1) == [60]
    longer = [*range(10, 18), 70, *range(14, 18), 80, *range(10, 18)]
    assert source.draft(context(longer), 1) == [70]


@pytest.mark.parametrize("count", [1, 7, 50])
def test_own_text_is_indexed_as_it_grows(count: int) -> None:
    """Whether it is asked after each token or after many."""
    source = OwnText()
    text = np.random.default_rng(1).integers(0, 49_152, 700, np.int32).tolist() * 2
    asked, num_right = context(text[:1]), 0
    for place in range(1, 1_300, count):
        found = source.draft(grown(asked, *text[place : place + count]), 2)
        num_right += found == text[place + count : place + count + 2]
    assert num_right > 0.9 * (1_300 - 704) / count


def test_prediction_is_followed_past_differences() -> None:
    source, text = Prediction(), [*range(100, 140)]
    asked = context([1], prediction=text)

    def draft(*more: int) -> list[int]:
        return list(source.draft(grown(asked, *more), 3) or ())

    assert draft() == [100, 101, 102]
    assert draft(100, 101) == [102, 103, 104]
    assert draft(7) == [103, 104, 105]  # in place of 102
    assert draft(103) == [104, 105, 106]
    assert draft(8, 104) == [105, 106, 107]  # 8 was inserted
    assert draft(110, 111) == [112, 113, 114]  # five were left out
    assert draft(1, 2, 3, 4) == []  # lost
    assert draft(120, 121, 122) == [123, 124, 125]
    assert source.draft(context([1, 2]), 3) is None  # never asked again


@pytest.mark.parametrize(
    ("answer", "num_matched"),
    [
        ([5, 6, 7, 8, 9], 5),
        ([5, 6, 7], 3),
        ([1, 2, 3], 0),
        ([5, 6, 1, 8, 9], 4),
        ([5, 6, 7, 8, 9, 5, 6, 7, 8, 9], 5),  # a token of the prediction counts once
        ([], 0),
    ],
)
def test_matched_tokens(answer: list[int], num_matched: int) -> None:
    assert count_matched(np.array([5, 6, 7, 8, 9], np.int32), answer) == num_matched


def serve(
    cache: RadixCache,
    tokens: Sequence[int],
    namespace: str = "",
    index: NamespaceText | None = None,
) -> None:
    with cache.acquire(tokens, namespace) as sequence:
        sequence.extend(tokens[sequence.length :])
        sequence.commit(len(tokens))
        if index is not None:
            index.end(context(tokens, sequence, namespace=namespace))


@pytest.mark.parametrize("page_size", [1, 4])
def test_cached_continuation(page_size: int) -> None:
    cache, source = RadixCache(256, page_size), CachedContinuation()
    answer = list(range(50, 80))
    serve(cache, [1, 2, 3, *answer])
    with cache.acquire([1, 2, 3, 50]) as sequence:
        assert sequence.length == 3
        assert source.draft(context([1, 2, 3, 50], sequence), 4) == [51, 52, 53, 54]
        assert source.draft(context([1, 2, 3, 51], sequence), 4) is None
    with cache.acquire([1, 2, 3, 50, 51, 9]) as sequence:
        sequence.extend([1, 2, 3, 50, 51, 9][sequence.length :])
        sequence.commit(6)
        assert not source.draft(context([1, 2, 3, 50, 51, 9, 52], sequence), 4)
    serve(cache, [1, 2, 3, *answer[:10], 7, 8])
    with cache.acquire([1, 2, 3, 50]) as sequence:
        found = source.draft(context([1, 2, 3, 50], sequence), 12)
        assert list(found)[:9] == answer[1:10]  # and then those of a child, if pages allow it
    with HashBlockCache(64).acquire([1, 2]) as other:
        assert source.draft(context([1, 2], other), 4) is None


@pytest.mark.parametrize("page_size", [1, 4])
def test_namespace_text(page_size: int) -> None:
    cache = RadixCache(1024 // page_size, page_size)
    source = NamespaceText(cache)
    serve(cache, [1, *range(50, 90)], index=source)

    def draft(tokens: Sequence[int], most: int, namespace: str = "") -> list[int]:
        with cache.acquire([3, 3], namespace) as sequence:
            asked = context([3, *tokens], sequence, namespace=namespace)
            return list(source.draft(asked, most) or ())

    with cache.acquire([3, 3]) as sequence:
        asked = context([3, *range(60, 66)], sequence)
        assert source.draft(asked, 4) == [66, 67, 68, 69]
        assert source.draft(grown(asked, 66, 67), 4) == [68, 69, 70, 71]
        assert source.draft(grown(asked, 5), 4) == ()
        assert source.draft(grown(asked, *range(70, 75)), 2) == [75, 76]
    assert draft(range(60, 66), 4, "b") == []  # never across namespaces
    serve(cache, [1, *range(50, 70), 7, 8, 9], index=source)  # which splits the node
    assert draft(range(60, 66), 2) == [66, 67]
    assert draft(range(75, 80), 2) == [80, 81]
    cache.evict(1024)
    assert draft(range(60, 66), 4) == []
    serve(cache, [1, *range(50, 90)], index=source)
    assert draft(range(60, 66), 1) == [66]
    cache.reset("")
    assert draft(range(60, 66), 4) == []
    assert source.draft(context([1, 2], HashBlockCache(64).acquire([1, 2])), 4) is None
    assert source.stats()["index_bytes"] <= 8 << 20


def test_evicted_nodes_are_let_go() -> None:
    cache = RadixCache(64)
    source = NamespaceText(cache)
    for number in range(100):
        serve(cache, [number, *range(200, 230)], index=source)
    cache.evict(64)
    for number in range(20):
        serve(cache, [1000 + number, *range(200, 230)], index=source)
    assert source.num_held_nodes <= 24
