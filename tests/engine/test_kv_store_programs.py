"""Random programs over a cache with a store, against the oracle of `tests/cache/world.py`: no page
ever holds K/V of other tokens, whatever is aborted, evicted, damaged, slow or restarted."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from radixserve import SamplingParams
from radixserve.arrays import IntArray
from radixserve.cache import RadixSequence
from radixserve.config import KVStoreWrite
from radixserve.request import Request
from radixserve.runner.kv_layout import ByteArray, KVLayout
from radixserve.store import (
    HostStore,
    RunStore,
    StoredPrefixes,
    TieredStore,
    saver,
    stored_prefixes,
    use_counts,
)
from radixserve.store.connector import KVConnector
from radixserve.store.limits import StoreLimits
from tests.cache.world import Prefix, World, random_step, random_tokens
from tests.store.faulty_store import DAMAGES, Faults

LAYOUT = KVLayout(1, 1, 2, "float32", 4)  # 8 bytes of keys and as many of values a token
NAMESPACES = ("", "", "b")
MODEL = "0" * 32
LIMITS = StoreLimits(min_tokens=2, idle_s=0.0, pacing_s=0.001, first_pause_s=0.01)


class CellPool:
    """A world's cells as a pool: the K/V of a slot is a digest of the prefix in it."""

    def __init__(self, world: World, prefixes: dict[bytes, Prefix]) -> None:
        """`prefixes`: by digest, of all pools that used the store."""
        self._world, self._prefixes = world, prefixes

    is_in_host_memory = True

    def read(self, slots: IntArray, into: ByteArray) -> ByteArray:
        kv = into[: 16 * len(slots)].reshape(1, 2, len(slots), 8)
        for index, slot in enumerate(slots.tolist()):
            prefix = self._world.cells[divmod(slot, self._world.page_size)]
            digest = hashlib.sha256(repr(prefix).encode()).digest()[:16]
            self._prefixes[digest] = prefix
            kv[0, :, index] = np.frombuffer(digest, np.uint8).reshape(2, 8)
        return kv

    def write(self, slots: IntArray, kv: ByteArray) -> None:
        shared = self._world.shared_cells()
        for index, slot in enumerate(slots.tolist()):
            digest = kv[0, :, index].tobytes()
            assert digest in self._prefixes, "loaded K/V that was never computed"
            cell = divmod(slot, self._world.page_size)
            assert cell not in shared, "a slot that others may read would be overwritten"
            self._world.cells[cell] = self._prefixes[digest]

    def copy_page_prefixes(self, copies: IntArray) -> None:
        cells = self._world.cells
        for source, target, count in copies.tolist():
            for slot in range(count):
                cells[target, slot] = cells[source, slot]


class StoreWorld(World):
    """A world whose sequences are stored when they are released, and loaded when they return."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        folder: Path,
        max_bytes: int,
        faults: Faults,
        host_bytes: int,
        policy: KVStoreWrite,
        rng: random.Random,
    ) -> None:
        super().__init__(num_pages, page_size)
        self.host_bytes, self.policy, self.rng = host_bytes, policy, rng
        self.folder, self.max_bytes, self.faults = folder, max_bytes, faults
        self.prefixes: dict[bytes, Prefix] = {}
        self.loading: dict[str, tuple[Prefix, str]] = {}  # requests by id: tokens and namespace
        self.num_requests = self.num_loaded = 0
        self.connector = self.open_store()

    def open_store(self) -> KVConnector:
        store: RunStore = self.faults.store(self.folder, self.max_bytes)
        if self.host_bytes:
            store = TieredStore(HostStore(self.host_bytes), store)
        prefixes = StoredPrefixes(store, MODEL, LAYOUT)
        pool = CellPool(self, self.prefixes)
        return KVConnector(
            prefixes,
            pool,  # type: ignore[arg-type]
            self.cache,
            policy=self.policy,
            step_tokens=4,
            token_cost=lambda: (self.rng.choice([1e-9, 1.0, 1.0, 1.0]), self.rng.choice([0, 1000])),
            has_room=lambda _, __: self.rng.random() < 0.9,
            limits=LIMITS,
        )

    def restart(self) -> None:
        """Another process: an empty cache over what is stored."""
        self.connector.loader.cancel()
        self.drain()
        self.connector.close(30.0)
        self.connector = self.open_store()

    def request(self, tokens: Prefix, namespace: str) -> None:
        """A prompt arrives. It is acquired at once, or when its stored part is loaded."""
        self.num_requests += 1
        name, params = f"r{self.num_requests}", SamplingParams(namespace=namespace)
        ids = np.array(tokens, np.int32)
        request = Request(name, ids, params, 0, frozenset(), len(tokens) + 9)
        self.loading[name] = tokens, namespace

        def finish(num_loaded: int | None) -> None:
            del self.loading[name]
            self.num_loaded += num_loaded or 0
            self.compute(tokens, namespace)

        if not self.connector.loader.queue(request, 0.0, finish):
            finish(0)

    def compute(self, tokens: Prefix, namespace: str) -> None:
        """Acquire a prompt, and compute what is not cached of it if the pool holds it."""
        self.acquire(tokens, namespace)
        seq = self.open[-1]
        if seq.length < len(tokens) and self.extend(seq, tokens[seq.length :]):
            self.commit(seq, len(tokens))

    def release(self, seq: RadixSequence) -> None:
        self.connector.on_release(seq, seq.committed_len, seq.cached_len)
        super().release(seq)

    def preempt(self, seq: RadixSequence) -> None:
        """It lets go of its pages without an end."""
        super().release(seq)

    def reset(self, namespace: str | None) -> None:
        super().reset(namespace)
        self.connector.forget(namespace)

    def check(self) -> None:
        super().check()
        if hasattr(self, "connector"):
            self.connector.check().result()
            assert len(self.connector.loader) == len(self.loading)

    def close(self) -> None:
        self.connector.loader.cancel()
        self.drain()
        self.connector.close(30.0)


def store_step(world: StoreWorld, rng: random.Random, max_len: int) -> None:
    """One random thing that an engine with a store does."""
    action = rng.choices(
        ["request", "end", "steps", "copy", "abort", "preempt", "fault", "restart"],
        [10, 7, 10, 4, 1, 1, 1.5, 0.7],
    )[0]
    if action == "request" and len(world.open) + len(world.loading) < 12:
        tokens, namespace = random_tokens(world, rng, max_len), rng.choice(NAMESPACES)
        if world.prefixes and rng.random() < 0.8:  # often of something that was stored
            head = max(rng.choices(list(world.prefixes.values()), k=4), key=len)
            tokens = head[: rng.randint(len(head) // 2, len(head))] + tokens[:3]
        world.request(tokens or (0,), namespace)
    elif action == "end" and world.open:
        world.release(rng.choice(world.open))
    elif action == "steps":
        for _ in range(rng.randint(1, 4)):
            world.connector.before_step(may_wait=rng.random() < 0.8)
    elif action == "copy":
        world.connector.after_step(is_idle=True)
    elif action == "abort" and world.loading:
        world.connector.loader.cancel(rng.choice(list(world.loading)))
    elif action == "preempt" and world.open:
        world.preempt(rng.choice(world.open))
    elif action == "fault":
        usual = [""] * 8
        world.faults.read = rng.choice([*usual, *DAMAGES, "failing", "gone"])
        world.faults.write = rng.choice([*usual, *DAMAGES, "failing", "full"])
    elif action == "restart":
        world.restart()


def run_program(folder: Path, seed: int, num_steps: int) -> StoreWorld:
    rng = random.Random(seed)
    page_size = rng.choice([1, 1, 2, 5, 16])
    num_pages = rng.randint(60, 400) // page_size
    max_bytes = rng.choice([3_000, 20_000, 1 << 30])
    policy = rng.choice(["finish", "finish", *get_args(KVStoreWrite)])
    host_bytes = rng.choice([0, 0, 500, 3000, 1 << 30])
    world = StoreWorld(
        num_pages,
        page_size,
        folder / str(seed),
        max_bytes,
        Faults(),
        host_bytes,
        policy,
        random.Random(seed),
    )
    for _ in range(num_steps):
        if rng.random() < 0.3:
            random_step(world, rng, 40)
        else:
            store_step(world, rng, 40)
        if rng.random() < 0.2:
            world.check()
    world.close()
    return world


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a few tokens."""
    for module in (saver, stored_prefixes):
        monkeypatch.setattr(module, "MAX_RUN_TOKENS", 7)
    monkeypatch.setattr(use_counts, "_STEP", 4)


def test_random_programs_with_a_store(tmp_path: Path) -> None:
    worlds = [run_program(tmp_path, seed, 400) for seed in range(5)]
    # About 100; fewer on a busy machine, where pauses after faults take more of the steps.
    assert sum(world.num_loaded for world in worlds) > 10
    assert sum(world.faults.num_calls for world in worlds) > 10


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_random_programs_with_a_store(tmp_path: Path) -> None:
    first = int(os.environ.get("RADIXSERVE_SEED", "1000"))
    worlds = [run_program(tmp_path, seed, 300) for seed in range(first, first + 400)]
    assert sum(world.num_loaded for world in worlds) > 4_000
