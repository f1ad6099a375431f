"""The blocks that events add up to are the whole blocks of what the cache holds."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("msgspec")
pytest.importorskip("zmq")

from radixserve.adapters.table import AdapterInfo, AdapterTable
from radixserve.cache import HashBlockCache, Namespace, PrefixCache, RadixCache
from radixserve.kv_events.blocks import BlockView
from radixserve.kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored
from radixserve.request import AdapterUse, keyed_tokens
from tests.cache.hash_world import HashWorld
from tests.cache.mirror import Prefix, contents
from tests.cache.world import World, random_step
from tests.kv_events.consumer import Index


def blocks(cache: PrefixCache, size: int) -> set[tuple[str, Prefix]]:
    """Of the cache itself: whole blocks of all prefixes that it holds."""
    return {
        (name, path[:end])
        for name, paths in contents(cache).items()
        for path in paths
        for end in range(size, len(path) + 1, size)
    }


@pytest.mark.parametrize("make", [World, HashWorld])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_random_programs(make: type[World], block_size: int) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        world = make(rng.choice([8, 20, 60]), rng.choice([1, 2, 4, 16]))
        log, view, index = world.cache.open_events(), BlockView(block_size), Index(block_size)
        index.take(view.restart(log.snapshot()))
        for step in range(80):
            random_step(world, rng, 3 * world.page_size + 2 * block_size)
            if rng.random() < 0.5:  # else several at once
                index.take(view.apply(log.take()))
                assert index.known() == blocks(world.cache, block_size)
            if step % 20 == 19:  # a consumer that comes late, and one that has lost events
                late = Index(block_size)
                index.take(view.apply(log.take()))
                late.take(view.stored())
                assert late.known() == index.known()
                index.take(view.restart(log.snapshot()))
                assert index.known() == blocks(world.cache, block_size)


def test_blocks_of_adapters_have_their_names_and_the_texts_ids() -> None:
    table = AdapterTable()
    plain = table.add(AdapterInfo("sql", "", 4, (), 100, "12"))
    judge = table.add(AdapterInfo("judge", "", 4, (7,), 100, "34"))
    cache = RadixCache(30, 1)
    log, view = cache.open_events(), BlockView(4, table)
    text = np.arange(100, 116, dtype=np.int32)
    keyed = keyed_tokens(text, AdapterUse(judge.number, 6, judge.mark))
    namespace = str(Namespace("acme", plain.key))
    for tokens, name in ((text[:8], namespace), (text[:5], "acme"), (keyed, "acme")):
        with cache.acquire(tokens, name) as sequence:
            sequence.extend(tokens[sequence.cached_len :])
            sequence.commit(len(tokens))
    events = [event for event in view.apply(log.take()) if isinstance(event, BlockStored)]
    of_sql, first, of_judge = events
    assert (of_sql.lora_name, of_sql.lora_id, of_sql.cache_salt) == ("sql", 1, "acme")
    assert of_sql.extra_keys == [("sql", "acme"), ("sql",)]
    assert (first.lora_name, first.lora_id, first.token_ids) == (None, None, [*range(100, 104)])
    assert first.extra_keys == [("acme",)]
    assert (of_judge.lora_name, of_judge.lora_id) == ("judge", 2)
    assert of_judge.token_ids == [*range(104, 116)]
    assert of_judge.parent_block_hash == first.block_hashes[0]
    assert of_judge.extra_keys == [("judge",)] * 3
    late = [event for event in view.stored() if isinstance(event, BlockStored)]
    assert sorted(late, key=str) == sorted(events, key=str)


@pytest.mark.parametrize("cache", [RadixCache(8, 4), HashBlockCache(8, 4)])
def test_a_reset_of_all_is_said_as_such(cache: PrefixCache) -> None:
    log, view = cache.open_events(), BlockView(4)
    for namespace in ("", "b"):
        with cache.acquire([1, 2, 3, 4], namespace) as sequence:
            sequence.extend([1, 2, 3, 4])
            sequence.commit(4)
    one, other = view.apply(log.take())
    assert isinstance(one, BlockStored)
    assert isinstance(other, BlockStored)
    cache.reset("b")
    assert view.apply(log.take()) == [BlockRemoved(other.block_hashes, "GPU")]
    cache.reset()
    assert view.apply(log.take()) == [AllBlocksCleared()]
