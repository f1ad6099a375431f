"""Namespaces as records and as text, and what caches do with both."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixserve.cache import HashBlockCache, Namespace, RadixCache, SnapshotView
from radixserve.cache.namespace import as_namespace
from radixserve.errors import InvalidRequest

TEXTS = {
    "": Namespace(),
    "acme": Namespace("acme"),
    "acme/": Namespace("acme", salt=""),
    "acme/a": Namespace("acme", salt="a"),
    "acme/a/b": Namespace("acme", salt="a/b"),
    "/": Namespace(salt=""),
    "/a": Namespace(salt="a"),
    "\0sql\0acme/a": Namespace("acme", "sql", "a"),
    "\0sql\0": Namespace(adapter="sql"),
    "\0sql": Namespace("\0sql"),  # no adapter: its mark does not end
    "\0\0acme": Namespace("\0\0acme"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_and_its_record(text: str) -> None:
    namespace = TEXTS[text]
    assert as_namespace(text) == namespace
    assert str(namespace) == text
    assert as_namespace(namespace) is namespace


@given(st.text(st.sampled_from("a/\0b"), max_size=8))
def test_each_text_is_that_of_one_record(text: str) -> None:
    assert str(as_namespace(text)) == text


@pytest.mark.parametrize("wrong", [None, 5, b"acme", ["acme"]])
def test_what_is_no_text_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="namespace must be a string"):
        as_namespace(wrong)
    with pytest.raises(InvalidRequest, match="namespace must be a string"):
        RadixCache(10).lookup([1, 2], wrong)


def test_what_lies_below_a_namespace() -> None:
    def covers(above: str, below: str) -> bool:
        return as_namespace(above).covers(as_namespace(below))

    assert covers("acme", "acme")
    assert covers("acme", "acme/a")
    assert covers("acme", "\0sql\0acme/a")
    assert covers("acme/a", "acme/a/b")
    assert not covers("acme/a", "acme/ab")
    assert not covers("acme/a", "acme")
    assert not covers("acme", "acme2/a")
    assert not covers("\0sql\0acme", "acme")
    assert SnapshotView(within="acme").shows("acme/a")
    assert not SnapshotView(within="acme").shows("acme2")


def cached(cache: Any, tokens: list[int], namespace: str | Namespace) -> int:
    return int(cache.lookup(tokens, namespace, allow_full=True).cached_len)


@pytest.mark.parametrize("make", [RadixCache, HashBlockCache])
def test_each_record_has_a_cache_of_its_own(make: Any) -> None:
    cache, tokens = make(200, 4), [*range(8)]
    for namespace in TEXTS.values():
        assert cached(cache, tokens, namespace) == 0
        sequence = cache.acquire(tokens, namespace)
        assert sequence.namespace == str(namespace)
        sequence.extend(tokens)
        sequence.commit(8)
        sequence.release()
    for text, namespace in TEXTS.items():
        assert cached(cache, tokens, text) == cached(cache, tokens, namespace) == 8
    assert cache.stats()["namespaces"] == len(TEXTS)
    assert set(cache.dump()["namespaces"]) == set(TEXTS)
    below = {text for text, one in TEXTS.items() if Namespace("acme").covers(one)}
    assert len(below) > 1
    assert set(cache.dump(namespace=Namespace("acme"))["namespaces"]) == below
    cache.reset(Namespace("acme", "sql", "a"))
    assert cached(cache, tokens, "\0sql\0acme/a") == 0
    assert cached(cache, tokens, "acme/a") == 8
    cache.reset("acme")
    for text in TEXTS:
        assert cached(cache, tokens, text) == (0 if text in below else 8)
    cache.check()


@pytest.mark.parametrize("make", [RadixCache, HashBlockCache])
@pytest.mark.parametrize("compares", [True, False])
def test_a_miss_says_whose_the_rest_is(make: Any, compares: bool) -> None:
    cache, tokens = make(200, 4), [*range(12)]
    for namespace, length in (("\0sql@1\0acme/a", 8), ("other", 12)):
        with cache.acquire(tokens, namespace) as sequence:
            sequence.extend(tokens[:length])
            sequence.commit(length)

    def reason(namespace: str) -> str:
        found = cache.lookup(tokens, namespace, allow_full=True, compare_namespaces=compares)
        return str(found.reason)

    assert reason("acme/a") == "adapter"
    assert reason("\0judge@2\0acme/a") == "adapter"
    assert reason("acme/b") == ("namespace" if compares else "never_seen")
    assert reason("other") == "full"
