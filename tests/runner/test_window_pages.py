"""Layers with windows in window pages: how much memory they get, and what their attention reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from radixserve.attention.base import (
    AttentionBackend,
    AttentionFeatures,
    WindowBatch,
    WindowKV,
    kv_view,
)
from radixserve.attention.choice import make_backend
from radixserve.attention.cuda import flashinfer as flashinfer_backend
from radixserve.attention.cuda import flashinfer_calls
from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest
from radixserve.models.base import ModelInfo, distinct_variants, layer_windows
from radixserve.runner.input_batch import padding_batch, prepare_inputs
from radixserve.runner.kv_pool import KVPool
from radixserve.runner.pool_sizing import PoolSize, choose_pool_size, divide_pool
from radixserve.runner.window_table import DeviceWindows, WindowTable, independent_runs
from radixserve.schedule import ScheduledRequest, ScheduledRows, WindowUpdates
from radixserve_kernels import cpu_ops
from tests.attention.cases import store_and_attend
from tests.attention.fake_flashinfer import Fake, mark_sides

CPU = torch.device("cpu")
WINDOW = 20
FEATURES = [AttentionFeatures(), AttentionFeatures(sliding_window=WINDOW)] * 3
TOKEN_BYTES = 2 * 2 * 8 * 4  # K and V of a layer
INFO = ModelInfo(
    architecture="Test",
    is_native=True,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    vocab_size=50,
    max_positions=4096,
    eos_ids=(),
    dtype=torch.float32,
    num_parameters=1,
    **layer_windows(FEATURES),
)


def test_layers_with_windows() -> None:
    assert layer_windows([]) == {"window_layers": (), "window_size": 0}
    chunked = [AttentionFeatures(attention_chunk_size=7), AttentionFeatures(logits_soft_cap=3.0)]
    assert layer_windows([*FEATURES, *chunked]) == {
        "window_layers": (1, 3, 5, 6),
        "window_size": 20,
    }
    both = AttentionFeatures(sliding_window=9, attention_chunk_size=7)
    assert layer_windows([both])["window_size"] == 7
    assert INFO.kv_bytes_per_token == 6 * TOKEN_BYTES
    assert INFO.window_bytes_per_token == 3 * TOKEN_BYTES


def size(info: ModelInfo = INFO, **settings: Any) -> PoolSize:
    return choose_pool_size(EngineConfig(chunked_prefill_size=64, **settings), info)


def test_pages_of_a_given_memory() -> None:
    memory = 1000 * 6 * TOKEN_BYTES
    assert size(kv_cache_memory=memory) == (1334, 666)  # 1334 + 666 == 2 * 1000
    assert size(kv_cache_memory=memory, swa_full_tokens_ratio=0.25) == (1600, 400)
    assert size(kv_cache_memory=memory, swa_full_tokens_ratio=1) == (1000, 0)
    assert size(kv_cache_memory=memory, page_size=16, swa_full_tokens_ratio=0.25) == (100, 24)
    least = WINDOW + 64 + 3
    assert size(kv_cache_memory=memory, swa_full_tokens_ratio=0.01) == (2000 - least, least)


def test_pages_of_a_memory_that_was_measured() -> None:
    config = EngineConfig(max_running_requests=4, chunked_prefill_size=64)
    assert divide_pool(config, INFO, 1000) == (1334, 666)
    assert divide_pool(config, INFO, 4 * 4096 - 1).num_window_pages > 0
    for enough in (4 * 4096, 5 * 4096):
        assert divide_pool(config, INFO, enough) == (enough, 0)


def test_no_window_pages_where_they_would_save_nothing() -> None:
    assert size(num_pages=100) == (100, 0)  # so many pages were asked for
    assert size(num_pages=100, swa_full_tokens_ratio=0.5) == (100, 87)
    assert size(num_pages=87, swa_full_tokens_ratio=0.5) == (87, 0)  # of a window and a chunk
    assert size(kv_cache_memory=100 * 6 * TOKEN_BYTES) == (113, 87)
    assert size(kv_cache_memory=80 * 6 * TOKEN_BYTES) == (80, 0)
    assert size(kv_cache_memory="1MB", max_seq_len=WINDOW).num_window_pages == 0
    assert size(max_running_requests=4) == (4 * 4096, 0)  # memory for all there can be
    none = replace(INFO, window_layers=(), window_size=0)
    assert size(none, num_pages=500, swa_full_tokens_ratio=0.5) == (500, 0)
    long, memory = replace(INFO, window_size=1025), 3000 * 6 * TOKEN_BYTES
    assert size(long, kv_cache_memory=memory) == (3000, 0)
    assert size(long, kv_cache_memory=memory, swa_full_tokens_ratio=0.5) == (4000, 2000)


def test_layers_with_windows_alone() -> None:
    info = replace(INFO, num_layers=3, window_layers=(0, 1, 2))
    found = size(info, kv_cache_memory=1000 * 3 * TOKEN_BYTES)
    assert found == (2000, 1000)
    pool = KVPool(info, found, 1, CPU)
    assert pool.num_bytes == 1001 * 3 * TOKEN_BYTES


def test_wrong_ratios_are_refused() -> None:
    wrong: list[Any] = [0, -1, 1.5, float("nan"), "half"]
    for ratio in wrong:
        with pytest.raises(InvalidRequest, match="swa_full_tokens_ratio"):
            EngineConfig(swa_full_tokens_ratio=ratio)
    for name, value in (("cache", "hash"), ("tensor_parallel_size", 2)):
        EngineConfig(swa_full_tokens_ratio=1.0, **{name: value})
        with pytest.raises(InvalidRequest, match=f"must be None or 1 with {name}"):
            EngineConfig(swa_full_tokens_ratio=0.5, **{name: value})


def test_copies_are_made_one_after_the_other() -> None:
    pool = KVPool(INFO, PoolSize(9, 4), 2, CPU)
    assert pool.kv.shape == (3, 2, 9, 2, 2, 8)
    assert pool.windows is not None
    kv = pool.windows.kv
    assert kv.shape == (3, 2, 5, 2, 2, 8)
    kv.copy_(torch.randn_like(kv))
    before = kv.clone()
    pool.copy_window_prefixes([(0, 1, 2), (1, 2, 1)])
    assert torch.equal(kv[:, :, 1], before[:, :, 0])
    assert torch.equal(kv[:, :, 2, :1], before[:, :, 0, :1])
    assert torch.equal(kv[:, :, 2, 1:], before[:, :, 2, 1:])
    assert torch.equal(kv[:, :, 3:], before[:, :, 3:])


def attended_pages(
    lengths: list[tuple[int, int]], page_size: int
) -> tuple[list[ScheduledRequest], NDArray[np.int32], NDArray[np.int32]]:
    """Rows of (computed already, new) tokens, all their pages, and those whose window pages their
    new tokens see."""
    num_pages = [-(-(start + new) // page_size) for start, new in lengths]
    order = np.random.default_rng(0).permutation(sum(num_pages)).astype(np.int32)
    tables = np.split(order, np.cumsum(num_pages)[:-1])
    rows = [
        ScheduledRequest(f"r{at}", np.zeros(new, np.int32), start, pages, None, slot=at)
        for at, ((start, new), pages) in enumerate(zip(lengths, tables, strict=True))
    ]
    first_seen = [max(0, start + 1 - WINDOW) // page_size for start, _ in lengths]
    kept = np.concatenate([pages[at:] for pages, at in zip(tables, first_seen, strict=True)])
    return rows, order, kept


def on_device(window: WindowBatch) -> WindowBatch:
    return replace(window, device_page_table=torch.from_numpy(window.page_table))


def maker(name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AttentionBackend]:
    """Makes that backend, over a FlashInfer that computes here."""
    if name == "flashinfer":
        mark_sides(monkeypatch)
        monkeypatch.setattr(flashinfer_calls, "flashinfer_unsupported_reason", lambda *_: "")
        monkeypatch.setattr(flashinfer_calls, "import_error", lambda: "")
        monkeypatch.setattr(flashinfer_backend, "load_library", lambda: Fake().library)
    variants = distinct_variants(FEATURES)
    shares = name in ("cpu", "torch")

    def make(kv: torch.Tensor, windows: WindowKV | None = None) -> AttentionBackend:
        return make_backend(name, kv, 4, windows=windows, variants=variants, shares=shares)

    return make


@pytest.mark.parametrize(
    ("name", "page_size"),
    [(name, size) for name in ("cpu", "torch", "flashinfer", "triton") for size in (1, 4, 16)]
    + [("flashinfer", 96), ("triton", 96)],  # read as two pages of 48
)
def test_attention_reads_window_pages(
    name: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows whose early window pages were dropped, beside the same with all K and V in one pool."""
    if name == "cpu" and (reason := cpu_ops.unsupported_reason(torch.float32)):
        pytest.skip(reason)
    torch.manual_seed(0)
    rows, order, kept = attended_pages([(0, 30), (37, 1), (411, 1), (230, 50)], page_size)
    window_pages = np.random.default_rng(1).permutation(len(kept)).astype(np.int32)

    inputs = prepare_inputs(ScheduledRows.of(rows), page_size)
    table = WindowTable(PoolSize(len(order), len(kept)), page_size)
    dropped = np.setdiff1d(order, kept)
    table.update(np.stack((order, order), 1))  # as before, and dropped since
    table.update(np.stack((dropped, np.full_like(dropped, -1)), 1))
    table.update(np.stack((kept, window_pages), 1))
    batch = inputs.to_device(CPU)

    heads = (page_size, 2, 16)
    whole = torch.randn(3, 2, len(order), *heads)
    others, windowed = whole[[0, 2]].clone(), torch.zeros(1, 2, len(kept) + 1, *heads)
    windowed[:, :, window_pages] = whole[1:2, :, kept]
    make = maker(name, monkeypatch)
    plain, backend = make(whole), make(others, WindowKV(windowed, (1,)))
    plain.plan(batch)
    backend.plan(replace(batch, window=on_device(table.of_batch(inputs))))
    for layer, features in enumerate(FEATURES[:3]):
        q, k, v = (torch.randn(inputs.num_tokens, n, 16) for n in (4, 2, 2))
        expected = store_and_attend(plain, q, k, v, layer, features=features)
        assert torch.equal(store_and_attend(backend, q, k, v, layer, features=features), expected)
    assert torch.equal(others[1], kv_all(whole, 2))
    assert torch.equal(windowed[:, :, window_pages], whole[1:2, :, kept])
    assert not windowed[:, :, -1].any()


@pytest.mark.parametrize("page_size", [1, 16, 96])
@pytest.mark.parametrize("name", ["flashinfer", "triton"])
def test_graphs_read_the_window_pages_of_their_last_plan(
    name: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned for padding first, then for rows whose window pages move, and for fewer of them."""
    torch.manual_seed(0)
    rows, order, kept = attended_pages([(37, 1), (411, 1), (5, 1)], page_size)
    whole = torch.randn(2, 2, len(order), page_size, 2, 16)
    windowed = torch.zeros(1, 2, len(kept) + 1, page_size, 2, 16)
    make = maker(name, monkeypatch)
    plain, backend = make(whole), make(whole[:1].clone(), WindowKV(windowed, (1,)))
    large = backend.make_graph_backend(4, len(order) + 4)
    small = backend.make_graph_backend(2, len(order) + 2)
    expected = plain.make_graph_backend(4, len(order) + 4)
    table = WindowTable(PoolSize(len(order), len(kept)), page_size)
    q = torch.randn(4, 4, 16)
    for turn, (graph, count) in enumerate([(large, 3), (small, 1), (large, 2), (small, 2)]):
        window_pages = np.random.default_rng(turn).permutation(len(kept)).astype(np.int32)
        table.update(np.stack((kept, window_pages), 1))
        windowed[:, :, window_pages] = whole[1:, :, kept]
        inputs = prepare_inputs(ScheduledRows.of(rows[:count]), page_size).padded(
            4 if graph is large else 2
        )
        batch = inputs.to_device(CPU)
        window = on_device(table.of_batch(inputs))
        assert (window.slot_mapping[count:] == -1).all()  # nothing is stored
        expected.plan(batch)
        graph.plan(replace(batch, window=window))
        for layer, features in enumerate(FEATURES[:2]):
            found = graph.attend(q[: inputs.num_tokens], layer, features=features)
            wanted = expected.attend(q, layer, features=features)
            assert torch.equal(found[:count], wanted[:count])


def test_a_device_is_told_what_changed() -> None:
    """Of launches that failed, too; copies are made in order, by as few calls as can be."""
    assert list(independent_runs([])) == []
    copies = [(0, 1, 2), (0, 2, 1), (1, 3, 2), (4, 5, 1), (5, 4, 1), (6, 4, 2), (7, 6, 1)]
    runs = [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6), slice(6, 7)]
    assert list(independent_runs(copies)) == runs

    torch.manual_seed(0)
    pools = [KVPool(INFO, PoolSize(30, 8), 2, CPU) for _ in range(2)]
    assert pools[0].windows is not None
    assert pools[1].windows is not None
    pools[1].windows.kv.copy_(pools[0].windows.kv.normal_())
    device, host = DeviceWindows(pools[0], CPU), WindowTable(PoolSize(30, 8), 2)
    rng, inputs = np.random.default_rng(0), padding_batch(1, 2)
    assert device.changes() == {}
    for turn in range(40):
        for _ in range(rng.integers(1, 4)):  # launches, of which the last one came through
            pages = np.sort(rng.choice(30, rng.integers(0, 25), replace=False)).astype(np.int32)
            changed = np.stack((pages, rng.integers(-1, 8, len(pages), dtype=np.int32)), 1)
            made = [(int(a), int(b), 1 + turn % 2) for a, b in rng.integers(0, 8, (turn % 5, 2))]
            made = [(a, b, count) for a, b, count in made if a != b]
            device.update(WindowUpdates(changed, made))
            host.update(changed)
            pools[1].copy_window_prefixes(made)
        sent = {name: torch.from_numpy(array) for name, array in device.changes().items()}
        assert len(sent.get("windowed_pages", ())) in (0, 16, 32)  # few sizes
        device.apply(sent)
        assert device.changes() == {}
        found = device.of_batch(inputs, torch.zeros(1, dtype=torch.int64)).device_page_table
        assert found is not None
        assert found.tolist() == host.pages.tolist()
        assert torch.equal(pools[0].windows.kv, pools[1].windows.kv)


def kv_all(kv: torch.Tensor, layer: int) -> torch.Tensor:
    return torch.stack(kv_view(kv, layer)).view(kv[layer].shape)
