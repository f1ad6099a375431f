"""Runs in host memory, alone and before another store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from radixserve import InvalidRequest, Runtime
from radixserve.config import EngineConfig
from radixserve.runner.kv_layout import ByteArray
from radixserve.store import FolderStore, HostStore, TieredStore
from radixserve.store.connector import open_store

A, B, C = (f"{'0' * 32}/{'1' * 32}/{'2' * 32}-{index:08x}" for index in range(3))
FOLDER = A[:65]


def test_put_get_has_drop_list() -> None:
    store = HostStore(100)
    assert store.get(A) is None
    assert store.put(A, [b"abc", b"def"]) == 6
    assert store.get(A) == b"abcdef"
    assert store.get(A, 2) == b"ab"
    assert store.has(A)
    store.put(A, [b"xyz"])
    assert store.num_bytes == 3
    assert [(file.name, file.num_bytes) for file in store.list(FOLDER)] == [(A, 3)]
    assert not list(store.list("f" * 32))
    store.check()
    store.drop_folder(FOLDER)
    store.drop(A)
    assert store.num_bytes == 0
    store.check()


def test_what_was_not_used_for_longest_goes() -> None:
    store = HostStore(10)
    for name in (A, B):
        store.put(name, [bytes(5)])
    store.touch(A)
    store.put(C, [bytes(5)])
    assert [file.name for file in store.list()] == [A, C]
    assert store.num_dropped == 1
    with pytest.raises(OSError, match="more than the store may hold"):
        store.put(B, [bytes(11)])
    store.check()


def test_a_file_that_is_replaced_stays_whole_for_its_reader() -> None:
    store = HostStore(10)
    store.put(A, [b"old"])
    data = store.get(A)
    store.put(A, [b"new"])
    assert data == b"old"
    assert store.get(A) == b"new"


def test_a_tiered_store_reads_memory_first_and_keeps_what_it_read(tmp_path: Path) -> None:
    disk = FolderStore(tmp_path / "kv", 1 << 20)
    store = TieredStore(HostStore(10), disk)
    store.put(A, [b"abcdef"])
    store.put(B, [b"ghijkl"])  # A leaves the memory
    assert not store.in_memory(A)
    assert store.in_memory(B)
    assert (store.tier_of(A), store.tier_of(B), disk.tier_of(B)) == ("disk", "host", "disk")
    assert disk.has(A)
    assert store.get(A, 2) == b"ab"
    assert not store.in_memory(A)  # a head is not worth it
    assert store.get(A) == b"abcdef"
    assert store.in_memory(A)
    disk.drop(A)
    assert store.get(A) == b"abcdef"
    assert {file.name for file in store.list()} == {A, B}
    store.put(C, [bytes(11)])  # larger than the memory
    assert store.get(C) == bytes(11)
    store.check()
    store.drop(C)
    store.drop_folder(FOLDER)
    assert not list(store.list())
    store.check()


class DevicePool:
    """As a pool on a device; its pinned memory is plain memory."""

    def __init__(self, *, is_in_host_memory: bool = False) -> None:
        self.is_in_host_memory = is_in_host_memory
        self.num_pinned = 0

    def make_pinned(self, num_bytes: int) -> ByteArray:
        self.num_pinned += num_bytes
        return np.empty(num_bytes, np.uint8)


def test_settings_name_the_tiers(tmp_path: Path) -> None:
    pool = DevicePool()
    store = open_store(EngineConfig(host_cache_memory="1MB"), pool)  # type: ignore[arg-type]
    assert isinstance(store, HostStore)
    store.put(A, [bytes(7)])
    assert pool.num_pinned == 7
    config = EngineConfig(host_cache_memory="1MB", kv_store=str(tmp_path))
    store = open_store(config, pool)  # type: ignore[arg-type]
    assert isinstance(store, TieredStore)
    assert isinstance(store.store, FolderStore)
    store.put(B, [bytes(9)])
    assert pool.num_pinned == 16


def test_a_pool_in_host_memory_has_no_tier_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="the pool is in host memory"):
        Runtime("demo", num_pages=100, host_cache_memory="1MB", kv_store=str(tmp_path))
    with pytest.raises(InvalidRequest, match='host_cache_memory needs cache="radix"'):
        Runtime("demo", num_pages=100, host_cache_memory="1MB", cache="hash")
    with pytest.raises(InvalidRequest, match="host_cache_memory"):
        Runtime("demo", num_pages=100, host_cache_memory="much")
