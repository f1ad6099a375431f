"""K/V that outlives the process: a restart, a small pool, damaged files, and random programs."""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixserve import InvalidRequest, Runtime, SamplingParams
from radixserve.completion import Completion
from radixserve.errors import RequestFailed
from radixserve.store import FolderStore
from radixserve.store.connector import KVConnector
from tests.engine.stores import connector_of, flush, set_limits, store_stats
from tests.pacing import wait_until
from tests.store.faulty_store import DAMAGES, Faults

PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, digest=True)
NUM_PAGES = 4000


def tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 900, count)]


def answers(completions: Sequence[Completion]) -> list[tuple[list[int], str | None]]:
    return [(completion.token_ids, completion.digest) for completion in completions]


def run(folder: Path | None, prompts: Any, **settings: Any) -> list[Completion]:
    """The answers of a runtime of its own, closed afterwards."""
    pages = {"num_pages": NUM_PAGES // settings.get("page_size", 1)}
    store = {} if folder is None else {"kv_store": str(folder), "kv_store_write": "finish"}
    with Runtime("demo", **{**pages, **store, **settings}) as runtime:
        completions = [runtime.generate(prompt, PARAMS) for prompt in prompts]
        runtime.check()
        return completions


def runtime_with_store(folder: Path, **settings: Any) -> Runtime:
    """Which writes all tokens of a request at once, whatever was measured."""
    settings = {"num_pages": NUM_PAGES, "kv_store_write": "finish", **settings}
    return Runtime("demo", kv_store=str(folder), **settings)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


@pytest.mark.parametrize("page_sizes", [(1, 1), (1, 16), (16, 1), (16, 7)])
def test_a_restart_computes_one_token(tmp_path: Path, page_sizes: tuple[int, int]) -> None:
    """Of a prompt that was answered before, at any page size; the bits are the same."""
    prompts = [tokens(0, 1200), tokens(0, 700) + tokens(1, 100)]
    cold = run(tmp_path, prompts, page_size=page_sizes[0])
    warm = run(tmp_path, prompts, page_size=page_sizes[1])
    assert answers(warm) == answers(cold)
    first, second = (completion.usage for completion in warm)
    assert (first.computed_tokens, first.cached_tokens, first.loaded_tokens) == (1, 1199, 1199)
    assert (second.computed_tokens, second.loaded_tokens) == (1, 99)
    assert second.cached_tokens == 799


def test_another_kv_dtype_is_stored_and_kept_apart(tmp_path: Path) -> None:
    """A pool in 8 bits never loads what one of bfloat16 or float32 has stored."""
    prompt = tokens(0, 300)
    for kv_dtype in ("int8", "bfloat16", "auto"):
        cold, warm = (
            run(tmp_path, [prompt], kv_dtype=kv_dtype, dtype="float32")[0] for _ in range(2)
        )
        assert answers([warm]) == answers([cold])
        assert [cold.usage.loaded_tokens, warm.usage.loaded_tokens] == [0, 299]
    sizes = [path.stat().st_size for path in files(tmp_path)]
    assert len(sizes) == 3


def test_a_write_keeps_what_writes_before_it_store_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second prompt is copied while the first one's second run, which begins with the same
    tokens, is not written yet."""
    prompts = [tokens(0, 1200), tokens(0, 700) + tokens(1, 100)]
    put, is_first, may_continue = FolderStore.put, [True], threading.Event()

    def put_late(store: FolderStore, name: str, parts: Any) -> int:
        if is_first:
            is_first.clear()
        else:
            assert may_continue.wait(30)
        return put(store, name, parts)

    monkeypatch.setattr(FolderStore, "put", put_late)
    with runtime_with_store(tmp_path) as runtime:
        runtime.generate(prompts[0], PARAMS)
        wait_until(lambda: not is_first and runtime.stored_len(prompts[0]) == 512)
        runtime.generate(prompts[1], PARAMS)
        wait_until(lambda: store_stats(runtime)["unsaved_requests"] == 0)
        may_continue.set()
    warm = run(tmp_path, prompts)
    assert [completion.usage.loaded_tokens for completion in warm] == [1199, 99]


def test_more_than_the_pool_holds_is_loaded_again(tmp_path: Path) -> None:
    prompts = [tokens(seed, 300) for seed in range(8)]
    plain = run(None, prompts)
    with runtime_with_store(tmp_path, num_pages=700) as runtime:
        for expected in ("computed", "loaded"):
            for prompt, answer in zip(prompts, plain, strict=True):
                completion = runtime.generate(prompt, PARAMS)
                assert answers([completion]) == answers([answer])
                assert completion.usage.loaded_tokens == (299 if expected == "loaded" else 0)
        runtime.check()
        counts = runtime.cache_stats()["kv_store"]
    assert counts["loaded_tokens"] == 8 * 299
    assert counts["failed_reads"] == counts["failed_writes"] == 0


def test_requests_that_share_a_stored_prefix_load_it_once(tmp_path: Path) -> None:
    shared = tokens(0, 600)
    run(tmp_path, [shared])
    with runtime_with_store(tmp_path) as runtime:
        completions = runtime.generate([shared + tokens(seed, 20) for seed in range(1, 7)], PARAMS)
        assert sum(completion.usage.loaded_tokens for completion in completions) == 600
        assert all(completion.usage.computed_tokens == 20 for completion in completions)
        assert runtime.cache_stats()["kv_store"]["loaded_tokens"] == 600


def test_a_request_in_memory_or_not_stored_is_not_loaded(tmp_path: Path) -> None:
    with runtime_with_store(tmp_path) as runtime:
        runtime.generate([tokens(0, 100), tokens(0, 100), tokens(1, 100)], PARAMS)
        assert runtime.cache_stats()["kv_store"]["loaded_tokens"] == 0
        flush(runtime)
        assert runtime.stored_len(tokens(0, 100) + [7] * 9) == 100
        assert runtime.stored_len(tokens(5, 100)) == 0


def test_lookup_says_what_lies_where_and_what_it_costs(tmp_path: Path) -> None:
    prompt = tokens(0, 300)
    run(tmp_path, [prompt])
    with runtime_with_store(tmp_path) as runtime:
        lookup = runtime.lookup(prompt)
        assert (lookup.cached_len, lookup.reason) == (0, "never_seen")
        assert lookup.stored is not None
        assert lookup.stored[:2] == (300, 299)
        assert lookup.stored.compute_s is None  # nothing was computed yet
        assert 0 < lookup.stored.load_s < 1
        runtime.generate(tokens(1, 200), PARAMS)
        stored = runtime.lookup([*prompt, 5]).stored
        assert stored is not None
        assert stored[:2] == (300, 300)
        assert stored.compute_s is not None
        assert 0 < stored.load_s < stored.compute_s
        runtime.generate(prompt, PARAMS)
        lookup = runtime.lookup(prompt)
        assert lookup.stored is not None
        assert (lookup.cached_len, lookup.stored.load_tokens) == (299, 0)
        assert lookup.stored.load_s == lookup.stored.compute_s == 0
    with Runtime("demo", num_pages=NUM_PAGES) as runtime:
        assert runtime.lookup(prompt).stored is None


def test_a_load_that_takes_long_does_not_pay(tmp_path: Path) -> None:
    """Computing is sooner by the measured latency."""
    run(tmp_path, [tokens(seed, 40) for seed in range(2)])
    with runtime_with_store(tmp_path) as runtime:
        connector = connector_of(runtime)
        cost = connector.cost
        cost.token_cost = lambda: (1.0, 1000)  # 1 ms a token
        assert cost.pays(40)
        cost.latency_s = 0.2
        assert runtime.generate(tokens(0, 40), PARAMS).usage.loaded_tokens == 0
        for _ in range(200):  # the latency that was measured once is forgotten
            cost.pays(1, [10_000_000])
        assert runtime.generate(tokens(1, 40), PARAMS).usage.loaded_tokens == 39


def test_only_what_was_reused_is_written_on_demand(tmp_path: Path) -> None:
    shared = tokens(0, 100)
    run(tmp_path, [shared + tokens(1, 50)], kv_store_write="reuse")
    assert not files(tmp_path)
    prompts = [shared + tokens(seed, 50) for seed in (2, 3)]
    run(tmp_path, prompts, kv_store_write="reuse")
    assert run(tmp_path, [shared + tokens(9, 50)])[0].usage.loaded_tokens == 100


def test_with_auto_an_idle_or_closed_engine_writes_everything(tmp_path: Path) -> None:
    settings = {"kv_store_write": "auto"}
    with runtime_with_store(tmp_path, **settings) as runtime:
        runtime.generate(tokens(0, 100), PARAMS)
        deadline = time.monotonic() + 20
        while not files(tmp_path):
            assert time.monotonic() < deadline, "an idle engine writes nothing"
            time.sleep(0.01)
        runtime.check()
        runtime.generate(tokens(1, 100), PARAMS)
    for seed in (0, 1):
        assert run(tmp_path, [tokens(seed, 100)])[0].usage.loaded_tokens == 99


def saved(connector: KVConnector, runtime: Runtime, prompt: list[int]) -> int:
    """Tokens that are to be written while others run, of a request that has computed a prompt."""
    number = num_wanted(connector, prompt, len(prompt), 0)
    runtime.check()
    return number


def num_wanted(
    connector: KVConnector, prompt: Sequence[int], num_prompt: int, num_reused: int
) -> int:
    def num_stored(some: Any) -> int:
        return connector.prefixes.known(some).length

    ids = np.array(prompt, np.int32)
    return connector.policy.num_wanted(ids, "", num_prompt, num_reused, num_stored)


def test_with_auto_a_busy_engine_writes_what_pays(tmp_path: Path) -> None:
    """What is cheap to write beside computing it; else what had been evicted and came back."""
    with runtime_with_store(tmp_path, kv_store_write="auto") as runtime:
        connector = connector_of(runtime)
        token_bytes = connector.cost.token_bytes
        connector.policy.copy_s, connector.cost.bandwidth = 0.0, 1e15
        connector.policy.write_s = 5e-6 / token_bytes  # 5 us a token
        connector.cost.token_cost = lambda: (2.0, 1000)  # 2 ms a token
        assert saved(connector, runtime, tokens(0, 200)) == 200
        connector.cost.token_cost = lambda: (1.0, 100_000)  # 10 us a token
        assert saved(connector, runtime, tokens(1, 200)) == 0
        assert connector.counts.returned_tokens == 128 + 64 - 192
        assert saved(connector, runtime, tokens(1, 150) + tokens(2, 50)) == 128
        assert connector.counts.returned_tokens == 128
        again = tokens(1, 200)
        # 192 tokens are to be written; the third time, loads would have saved more altogether.
        for num_reused, expected in ((187, 0), (110, 0), (110, 192)):
            assert num_wanted(connector, again, 200, num_reused) == expected
        assert connector.counts.returned_tokens == 128 + 5 + 82 + 82
        # Answers that are computed again do not count: a load would not have saved them.
        assert num_wanted(connector, again, 110, 110) == 0
        assert connector.counts.returned_tokens == 128 + 5 + 82 + 82
        connector.cost.token_cost = lambda: (1.0, 10_000_000)  # computed sooner than written
        assert saved(connector, runtime, tokens(1, 200)) == 0
        connector.counts.returned_tokens = 10**9  # all that is evicted comes back
        connector.cost.token_cost = lambda: (1.0, 100_000)
        assert saved(connector, runtime, tokens(3, 200)) == 200


def test_what_does_not_pay_leaves_a_full_pool_unwritten(tmp_path: Path) -> None:
    with runtime_with_store(tmp_path, kv_store_write="auto", num_pages=700) as runtime:
        connector = connector_of(runtime)
        connector.cost.token_cost = lambda: (1e-9, 1000)
        runtime.generate([tokens(seed, 300) for seed in range(8)], PARAMS)
        flush(runtime)
        runtime.check()
        stats = connector.stats()
    assert stats["skipped_tokens"] >= 8 * 303 - 700
    assert 0 < stats["written_tokens"] <= 700
    assert stats["unwritten_tokens"] == 0


def test_on_evict_writes_when_pages_are_short_and_at_the_end(tmp_path: Path) -> None:
    with runtime_with_store(
        tmp_path, kv_store_write="evict", num_pages=1500, chunked_prefill_size=64
    ) as runtime:
        runtime.generate(tokens(0, 300), PARAMS)
        time.sleep(0.2)
        assert not files(tmp_path)
        for seed in (1, 2, 3):
            runtime.generate(tokens(seed, 300), PARAMS)
        runtime.check()
        assert files(tmp_path)
    usages = [completion.usage for completion in run(tmp_path, [tokens(s, 300) for s in range(4)])]
    assert [usage.loaded_tokens for usage in usages] == [299] * 4


def test_only_what_was_used_often_is_written_on_demand(tmp_path: Path) -> None:
    settings = {"kv_store_write": "reuse", "kv_store_min_uses": 3}
    with runtime_with_store(tmp_path, **settings) as runtime:
        for number in range(3):
            assert not files(tmp_path)
            runtime.generate(tokens(0, 150) + tokens(5 + number, 50), PARAMS)
            flush(runtime)
    assert run(tmp_path, [tokens(0, 200)])[0].usage.loaded_tokens == 128  # a multiple of 64


def test_loads_wait_for_pages(tmp_path: Path) -> None:
    """What is loaded while others hold the pool would be evicted before it is used."""
    prompts = [tokens(seed, 300) for seed in range(8)]
    expected = run(tmp_path, prompts)
    with runtime_with_store(tmp_path, num_pages=700) as runtime:
        completions = runtime.generate(prompts, PARAMS)  # all at once
        runtime.check()
        assert answers(completions) == answers(expected)
        assert [completion.usage.loaded_tokens for completion in completions] == [299] * 8
        assert runtime.cache_stats()["kv_store"]["loaded_tokens"] == 8 * 299


def test_namespaces_are_apart_and_a_flush_forgets_the_store_too(tmp_path: Path) -> None:
    mine = SamplingParams(max_tokens=2, temperature=0.0, namespace="mine")
    prompt = tokens(0, 100)
    with runtime_with_store(tmp_path) as runtime:
        runtime.generate(prompt, mine)
    with runtime_with_store(tmp_path) as runtime:
        assert runtime.generate(prompt, PARAMS).usage.loaded_tokens == 0
        assert runtime.generate(prompt, mine).usage.loaded_tokens == 99
        runtime.flush_cache("mine")
    with runtime_with_store(tmp_path) as runtime:
        assert runtime.generate(prompt, mine).usage.loaded_tokens == 0
        assert runtime.generate(prompt, PARAMS).usage.loaded_tokens == 99


class TestFaults:
    """Whatever becomes of the files: right answers, a counter, and one line in the log."""

    @pytest.fixture(scope="class")
    def written(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Completion]]:
        folder = tmp_path_factory.mktemp("cold")
        return folder, run(folder, [tokens(0, 1200)])

    @pytest.fixture
    def cold(self, tmp_path: Path, written: tuple[Path, list[Completion]]) -> list[Completion]:
        """What was answered when the files that are in `tmp_path` were written."""
        shutil.copytree(written[0], tmp_path, dirs_exist_ok=True)
        return written[1]

    def check(
        self, folder: Path, cold: list[Completion], caplog: pytest.LogCaptureFixture, **counts: int
    ) -> int:
        """Returns the tokens that were loaded."""
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING, "radixserve"),
            runtime_with_store(folder) as runtime,
        ):
            completion = runtime.generate(tokens(0, 1200), PARAMS)
            assert answers([completion]) == answers(cold)
            runtime.check()
            stats = runtime.cache_stats()["kv_store"]
        assert {name: stats[name] for name in counts} == counts
        assert len(caplog.records) == (1 if any(counts.values()) else 0)
        return completion.usage.loaded_tokens

    @pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone", "other"])
    def test_a_damaged_file(
        self,
        tmp_path: Path,
        cold: list[Completion],
        caplog: pytest.LogCaptureFixture,
        damage: str,
    ) -> None:
        """The second of three: the first is loaded, the others' tokens are computed."""
        (second,) = (path for path in files(tmp_path) if b'"start": 512' in path.read_bytes()[:200])
        data = bytearray(second.read_bytes())
        if damage == "flip":
            data[len(data) // 2] ^= 1
            second.write_bytes(data)
        elif damage == "cut":
            second.write_bytes(data[: len(data) // 2])
        elif damage == "other":
            second.write_bytes(b"GGUF" + data[4:])
        elif damage == "empty":
            second.write_bytes(b"")
        else:
            second.unlink()
        is_unreadable = damage in ("empty", "gone", "other")  # its tokens are not known either
        num_loaded = self.check(tmp_path, cold, caplog, failed_reads=0 if is_unreadable else 1)
        assert num_loaded == 512
        assert self.check(tmp_path, cold, caplog, failed_reads=0) == 1199  # it was written again

    def test_another_model(self, tmp_path: Path) -> None:
        """K/V of another dtype is not taken for that of this one."""
        prompt = [tokens(0, 1200)]
        run(tmp_path, prompt)
        expected = run(None, prompt, dtype="bfloat16")
        completions = run(tmp_path, prompt, dtype="bfloat16")
        assert answers(completions) == answers(expected)
        assert completions[0].usage.loaded_tokens == 0

    @pytest.fixture
    def faults(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
        """Of the stores of all engines that follow."""
        faults = Faults()
        monkeypatch.setattr("radixserve.store.connector.FolderStore", faults.store)
        yield faults
        faults.let_go.set()

    @pytest.mark.parametrize("fault", [*DAMAGES, "failing", "gone", "slow"])
    def test_reads_that_go_wrong(
        self,
        tmp_path: Path,
        cold: list[Completion],
        caplog: pytest.LogCaptureFixture,
        faults: Faults,
        fault: str,
    ) -> None:
        """Every read of K/V has the fault: nothing is loaded, everything is computed."""
        faults.read = fault
        num_failed = 0 if fault == "slow" else 1
        num_loaded = self.check(tmp_path, cold, caplog, failed_reads=num_failed)
        assert faults.num_calls > 0
        assert num_loaded == (1199 if fault == "slow" else 0)
        faults.read = ""
        assert self.check(tmp_path, cold, caplog, failed_reads=0) == 1199  # it was written again

    @pytest.mark.parametrize("fault", DAMAGES)
    def test_files_that_were_written_wrong(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, faults: Faults, fault: str
    ) -> None:
        """The disk takes all bytes and keeps others: found when they are read, by another engine,
        which writes them again."""
        faults.write = fault
        cold = run(tmp_path, [tokens(0, 1200)])
        faults.write = ""
        assert faults.num_calls == 3
        # Of others the head says that they are not what is sought: they are not taken for stored.
        is_head_readable = fault in ("torn", "flipped")
        num_failed = 1 if is_head_readable else 0
        assert self.check(tmp_path, cold, caplog, failed_reads=num_failed) == 0
        assert self.check(tmp_path, cold, caplog, failed_reads=0) == 1199

    @pytest.mark.parametrize("fault", ["failing", "full"])
    def test_writes_that_fail(
        self,
        tmp_path: Path,
        cold: list[Completion],
        caplog: pytest.LogCaptureFixture,
        faults: Faults,
        fault: str,
    ) -> None:
        for path in files(tmp_path):
            path.unlink()
        faults.write = fault
        with runtime_with_store(tmp_path) as runtime:
            assert answers([runtime.generate(tokens(0, 1200), PARAMS)]) == answers(cold)
            connector = connector_of(runtime)
            flush(runtime)
            runtime.check()
            stats = connector.stats()
        assert (stats["failed_writes"], stats["unwritten_tokens"]) == (1, 1203)
        assert stats["store_bytes"] == 0
        assert [record.levelname for record in caplog.records].count("WARNING") == 1
        assert not [path for path in tmp_path.rglob("*") if path.suffix in (".kv", ".tmp")]
        faults.write = ""
        assert self.check(tmp_path, cold, caplog, failed_reads=0) == 0
        assert self.check(tmp_path, cold, caplog, failed_reads=0) == 1199

    @pytest.mark.parametrize("fault", ["slow", "stalled"])
    def test_no_request_waits_for_writes(
        self, tmp_path: Path, faults: Faults, fault: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Beyond the bytes that may wait, K/V is dropped and counted."""
        set_limits(monkeypatch, backlog_bytes=3_000_000)
        faults.write = fault
        prompts = [tokens(seed, 300) for seed in range(8)]
        with runtime_with_store(tmp_path) as runtime:
            connector = connector_of(runtime)
            completions = [runtime.generate(prompt, PARAMS) for prompt in prompts]
            wait_until(lambda: store_stats(runtime)["unsaved_requests"] == 0)
            stats = connector.stats()
            if fault == "stalled":
                assert stats["written_tokens"] == 0
                assert stats["unwritten_tokens"] > 0
            faults.let_go.set()
            flush(runtime)
            runtime.check()
            stats = connector.stats()
        assert stats["written_tokens"] + stats["unwritten_tokens"] == 8 * 303
        assert stats["failed_writes"] == 0
        assert answers(run(tmp_path, prompts)) == answers(completions)

    def test_a_read_that_hangs_is_given_up(
        self,
        tmp_path: Path,
        cold: list[Completion],
        faults: Faults,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Its tokens are computed; while the reader's thread hangs, nothing waits for it."""
        faults.read = "stalled"
        set_limits(monkeypatch, read_s=0.05)
        with runtime_with_store(tmp_path) as runtime:
            completion = runtime.generate(tokens(0, 1200), PARAMS)
            assert answers([completion]) == answers(cold)
            assert completion.usage.loaded_tokens == 0
            runtime.check()
            other = runtime.generate(tokens(0, 600) + tokens(3, 10), PARAMS)
            assert other.usage.loaded_tokens == 0
            faults.let_go.set()
            runtime.check()
            assert runtime.cache_stats()["kv_store"]["failed_reads"] == 1

    def test_a_write_that_hangs_does_not_keep_an_engine_open(
        self,
        tmp_path: Path,
        faults: Faults,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        set_limits(monkeypatch, close_s=0.2)
        faults.write = "stalled"
        with runtime_with_store(tmp_path) as runtime:
            runtime.generate(tokens(0, 100), PARAMS)
            began = time.monotonic()
        assert time.monotonic() - began < 20
        assert "writing takes too long" in caplog.text
        assert not files(tmp_path)

    def test_no_request_waits_long_for_a_disk_that_is_slower_than_computing(
        self, tmp_path: Path, faults: Faults
    ) -> None:
        """Once loads were timed, what is computed sooner is not loaded."""
        prompts = [tokens(seed, 40) for seed in range(24)]
        expected = run(tmp_path, prompts)
        faults.read = "slow"  # each read takes longer than to compute a prompt
        with runtime_with_store(tmp_path) as runtime:
            connector = connector_of(runtime)
            connector.cost.token_cost = lambda: (1e-2, 1000)  # 10 us a token
            connector.cost.latency_s = 0.0
            connector.cost.bandwidth = 1e12
            completions = [runtime.generate(prompt, PARAMS) for prompt in prompts]
            runtime.check()
        assert answers(completions) == answers(expected)
        loaded = [completion.usage.loaded_tokens for completion in completions]
        assert loaded[0] == 39
        assert loaded.count(39) <= 3

    def test_an_abort_while_a_load_is_under_way(
        self, tmp_path: Path, cold: list[Completion], faults: Faults
    ) -> None:
        faults.read = "stalled"
        with runtime_with_store(tmp_path) as runtime:
            with runtime.submit([tokens(0, 1200)] * 3, PARAMS) as held:
                assert runtime.generate(tokens(5, 40), PARAMS).finish_reason == "length"
                assert runtime.status().waiting == 3
                runtime.check()
                assert runtime.abort() == 3
                faults.let_go.set()
                assert {completion.finish_reason for completion in held} == {"abort"}
            runtime.check()
            assert answers([runtime.generate(tokens(0, 1200), PARAMS)]) == answers(cold)

    def test_a_load_locks_no_page_between_steps(self, tmp_path: Path, faults: Faults) -> None:
        """While its reads hang, another request takes nearly the whole pool."""
        run(tmp_path, [tokens(0, 60)])
        faults.read = "stalled"
        with runtime_with_store(tmp_path, num_pages=88) as runtime:
            first = tokens(0, 30)
            runtime.generate(first, PARAMS)  # a part of it is cached
            with runtime.submit([tokens(0, 61)], PARAMS) as held:
                assert runtime.generate(tokens(5, 80), PARAMS).finish_reason == "length"
                faults.let_go.set()
                assert [completion.finish_reason for completion in held] == ["length"]
            runtime.check()

    def test_a_step_that_fails_stores_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its pages may lack what was to be copied into them."""

        def fail(_: object) -> None:
            raise ValueError("no step")

        with runtime_with_store(tmp_path, page_size=16) as runtime:
            runtime.generate(tokens(0, 100), PARAMS)
            flush(runtime)
            stored = files(tmp_path)
            with monkeypatch.context() as context:
                context.setattr(runtime._core._engine._runner, "launch", fail)
                with pytest.raises(RequestFailed):
                    runtime.generate(tokens(0, 90) + tokens(1, 40), PARAMS)
            flush(runtime)
            assert files(tmp_path) == stored

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(InvalidRequest, match="kv_store="):
            Runtime("demo", num_pages=10, kv_store=str(tmp_path / "file" / "kv"))
        with pytest.raises(InvalidRequest, match='needs cache="radix"'):
            Runtime("demo", num_pages=10, kv_store=str(tmp_path), cache="off")
        with pytest.raises(InvalidRequest, match="kv_store_size"):
            Runtime("demo", num_pages=10, kv_store=str(tmp_path), kv_store_size="many")
        with pytest.raises(InvalidRequest, match="kv_store_write"):
            Runtime("demo", num_pages=10, kv_store=str(tmp_path), kv_store_write="never")


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    """Both write and read; each finds what the other one wrote."""
    with (
        runtime_with_store(tmp_path) as first,
        runtime_with_store(tmp_path) as second,
    ):
        prompts = [tokens(seed, 200) for seed in range(4)]
        with (
            first.submit(prompts, PARAMS) as of_first,
            second.submit(prompts, PARAMS) as of_second,
        ):
            for handle in (of_first, of_second):
                list(handle)
        expected, also = (answers(handle.result()) for handle in (of_first, of_second))
        assert expected == also
        for runtime in (first, second):
            flush(runtime)
        first.generate(tokens(9, 300), PARAMS)
        flush(first)
        assert second.generate(tokens(9, 300), PARAMS).usage.loaded_tokens == 299
    assert [completion.usage.loaded_tokens for completion in run(tmp_path, prompts)] == [199] * 4


def test_a_cache_is_saved_and_loaded(tmp_path: Path) -> None:
    shared = tokens(0, 300)
    prompts = [shared + tokens(seed, 40) for seed in (1, 2, 3)]
    with Runtime("demo", num_pages=NUM_PAGES) as runtime:
        expected = answers(runtime.generate(prompts, PARAMS))
        assert runtime.save_cache(tmp_path / "a") == 300 + 3 * 43
        assert runtime.save_cache(tmp_path / "a") == 0
        assert runtime.save_cache(tmp_path / "b", prompts=[prompts[1]]) == 340
        assert runtime.save_cache(tmp_path / "c", namespace="other") == 0
        runtime.check()
    with Runtime("demo", num_pages=NUM_PAGES, page_size=1) as runtime:
        assert runtime.load_cache(tmp_path / "a") == 300 + 3 * 43
        assert runtime.load_cache(tmp_path / "a") == 0
        assert runtime.cache_stats()["acquired_tokens"] == 0  # only requests count
        completions = runtime.generate(prompts, PARAMS)
        assert answers(completions) == expected
        assert all(completion.usage.computed_tokens == 1 for completion in completions)
        runtime.check()
    with Runtime("demo", num_pages=360) as runtime:
        assert runtime.load_cache(tmp_path / "a") == 343  # one sequence fits
        assert runtime.load_cache(tmp_path / "b") == 0
        runtime.check()


def test_other_caches_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with Runtime("demo", num_pages=64, cache="hash") as runtime:
        for save in (lambda: runtime.save_cache(tmp_path), lambda: runtime.load_cache(tmp_path)):
            with pytest.raises(InvalidRequest, match='cache="radix"'):
                save()


def test_random_programs_with_a_store_equal_those_without(tmp_path: Path) -> None:
    """Streams that are aborted in mid-load, small pools, damaged files, small stores, restarts."""
    numbers = random.Random(3)
    bases = [tokens(seed, 300) for seed in range(5)]
    plain: dict[tuple[int, ...], tuple[list[int], str | None]] = {}
    with Runtime("demo", num_pages=NUM_PAGES) as runtime:
        prompts = [
            numbers.choice(bases)[: numbers.randint(1, 300)]
            + tokens(numbers.randrange(20), numbers.randint(1, 60))
            for _ in range(40)
        ]
        for prompt, answer in zip(prompts, runtime.generate(prompts, PARAMS), strict=True):
            plain[tuple(prompt)] = answer.token_ids, answer.digest
    for page_size in (1, 8, 16):
        settings: dict[str, Any] = {
            "num_pages": 1000 // page_size,
            "page_size": page_size,
            "kv_store": str(tmp_path),
            "kv_store_write": numbers.choice(["auto", "finish", "reuse", "evict"]),
            "kv_store_size": numbers.choice(["1MB", "4MB", "1GB"]),
            "chunked_prefill_size": numbers.choice([37, 512]),
        }
        with Runtime("demo", **settings) as runtime:
            for _ in range(6):
                chosen = numbers.sample(prompts, 6)
                with contextlib.ExitStack() as stack:
                    handles = [
                        stack.enter_context(runtime.submit([prompt], PARAMS)) for prompt in chosen
                    ]
                    for handle, prompt in zip(handles, chosen, strict=True):
                        if numbers.random() < 0.3:
                            handle.abort()
                            continue
                        (completion,) = list(handle)
                        assert (completion.token_ids, completion.digest) == plain[tuple(prompt)]
                runtime.check()
                if numbers.random() < 0.3 and (paths := files(tmp_path)):
                    with open(numbers.choice(paths), "r+b") as file:
                        file.seek(numbers.randint(0, 5000))
                        file.write(b"damaged")
