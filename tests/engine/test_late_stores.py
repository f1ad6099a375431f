"""A store that hangs or fails holds nobody but the request that asks it, and that one no longer
than its deadline; then it is left alone for a while."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixserve import Runtime, SamplingParams
from radixserve.store import FolderStore
from tests.engine.stores import connector_of, flush, set_limits, store_stats
from tests.pacing import wait_until
from tests.store.faulty_store import Faults

PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, digest=True)
LONG = SamplingParams(max_tokens=100_000, temperature=0.0, ignore_eos=True)
SLACK_S = 20.0  # the machine may be busy; what hangs would hang for a minute


def prompt(seed: int, count: int = 300) -> list[int]:
    return [3 + (seed * 7919 + index * index) % 800 for index in range(count)]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Of the stores of all engines that follow."""
    faults = Faults()
    monkeypatch.setattr("radixserve.store.connector.FolderStore", faults.store)
    yield faults
    faults.let_go.set()


def runtime_with(store: str, **settings: Any) -> Runtime:
    return Runtime("demo", num_pages=8000, kv_store=store, kv_store_write="finish", **settings)


def check_that_others_continue(runtime: Runtime, held: list[int], deadline_s: float) -> None:
    """A prompt asks a store that hangs while another answer is streamed: that one gets its tokens
    one by one, and the prompt is computed after the deadline."""
    ended: list[float] = []

    def ask() -> None:
        completion = runtime.generate(held, PARAMS)
        assert completion.usage.loaded_tokens == 0
        ended.append(time.monotonic())

    before, after, began = 0, 0, 0.0
    thread = threading.Thread(target=ask)
    for _ in runtime.stream([5, 6, 7], LONG):
        if before < 20:
            before += 1
            continue
        if not began:
            began = time.monotonic()
            thread.start()
        after += 1
        if ended:
            break
    thread.join()
    assert ended[0] - began < deadline_s + SLACK_S
    assert after > 20, "the other request has waited"


@pytest.mark.parametrize("fault", ["find", "read"])
def test_a_folder_that_hangs_holds_one_request_until_its_deadline(
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with runtime_with(str(tmp_path)) as runtime:
        expected = runtime.generate(prompt(0), PARAMS)
    set_limits(monkeypatch, lookup_s=0.3, read_s=0.3)
    with runtime_with(str(tmp_path)) as runtime:
        setattr(faults, fault, "stalled")
        check_that_others_continue(runtime, prompt(0), 0.3)
        stats = store_stats(runtime)
        assert (stats["failed_reads"], stats["is_paused"]) == (1, 1)
        began = time.monotonic()  # nothing more waits for it
        lookup = runtime.lookup(prompt(0))
        runtime.generate(prompt(1), PARAMS)
        assert time.monotonic() - began < SLACK_S
        assert lookup.stored is not None
        setattr(faults, fault, "")
        faults.let_go.set()
        wait_until(lambda: not store_stats(runtime)["is_paused"])
        runtime.flush_cache("another")
        flush(runtime)
        runtime.check()
    with runtime_with(str(tmp_path)) as runtime:
        again = runtime.generate(prompt(0), PARAMS)
        assert again.usage.loaded_tokens == 299
        assert (again.token_ids, again.digest) == (expected.token_ids, expected.digest)


def test_a_server_that_hangs_holds_one_request_until_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("redis")
    from tests.store.redis_server import RedisServer

    set_limits(monkeypatch, lookup_s=0.3, read_s=0.3, close_s=0.3)
    with RedisServer() as server, runtime_with(server.url) as runtime:
        runtime.generate(prompt(0), PARAMS)
        flush(runtime)
        server.fault = "hang"
        check_that_others_continue(runtime, prompt(1), 0.3)
        assert store_stats(runtime)["is_paused"] == 1


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    """A pipe named like a run that nobody writes to, and its kin."""
    with runtime_with(str(tmp_path)) as runtime:
        runtime.generate(prompt(0), PARAMS)
    (path,) = tmp_path.glob("*/*/*.kv")
    path.rename(tmp_path / "elsewhere")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    with runtime_with(str(tmp_path)) as runtime:
        began = time.monotonic()
        assert runtime.generate(prompt(0), PARAMS).usage.loaded_tokens == 0
        assert time.monotonic() - began < SLACK_S
        assert store_stats(runtime)["refused_files"] == 1
        runtime.check()
    with runtime_with(str(tmp_path)) as runtime:  # it was written again
        assert runtime.generate(prompt(0), PARAMS).usage.loaded_tokens == 299


def test_a_store_that_fails_again_and_again_is_left_alone_and_tried_again(
    tmp_path: Path,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_limits(monkeypatch, first_pause_s=0.5)
    with runtime_with(str(tmp_path)) as runtime:
        runtime.generate(prompt(50), PARAMS)
        flush(runtime)
        faults.find = "failing"
        for seed in range(3):
            runtime.generate(prompt(seed), PARAMS)
        assert store_stats(runtime)["pauses"] >= 1
        num_calls = faults.num_calls
        while store_stats(runtime)["is_paused"] and faults.num_calls == num_calls:
            runtime.generate(prompt(60, 40), PARAMS)
        faults.find = ""
        wait_until(lambda: not store_stats(runtime)["is_paused"])
        runtime.flush_cache("x")
        flush(runtime)
        runtime.check()
    assert caplog.text.count("reading has failed 3 times in a row and is left alone") == 1


def test_the_engines_thread_reads_and_writes_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is asked of it."""
    threads: Counter[str] = Counter()

    class Watched(FolderStore):
        """Notes which threads call it."""

        def __getattribute__(self, name: str) -> Any:
            if name in ("put", "get", "has", "drop", "set_aside", "list", "drop_folder", "touch",
                        "check", "prune"):  # fmt: skip
                threads[threading.current_thread().name] += 1
            return super().__getattribute__(name)

    monkeypatch.setattr("radixserve.store.connector.FolderStore", Watched)
    folder = str(tmp_path / "main")
    for policy in ("finish", "auto", "reuse", "evict"):
        with Runtime(
            "demo",
            num_pages=700,
            kv_store=folder,
            kv_store_write=policy,  # type: ignore[arg-type]
        ) as runtime:
            runtime.generate([prompt(seed) for seed in range(4)], PARAMS)
            runtime.generate([prompt(seed) for seed in range(4)], PARAMS)
            runtime.lookup(prompt(0))
            runtime.stored_len(prompt(1))
            runtime.save_cache(tmp_path / "other")
            runtime.load_cache(tmp_path / "other")
            runtime.load_cache(folder)
            runtime.check()
            if policy == "evict":
                runtime.flush_cache()
            runtime.check()
    assert threads["radixserve-store-finder"] > 0
    assert threads["radixserve-store-writer"] > 0
    assert threads["radixserve-store-folders"] > 0
    assert threads["radixserve-engine"] == 0


def test_a_store_whose_code_fails_is_ended_and_the_engine_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Even in the middle of a load."""
    with runtime_with(str(tmp_path)) as runtime:
        expected = runtime.generate(prompt(0, 1300), PARAMS)
    with runtime_with(str(tmp_path)) as runtime:

        def fail(*_: object) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(connector_of(runtime).cost, "note_load", fail)
        monkeypatch.setattr(runtime._core._engine.runner.storable_pool()[0], "write", fail)
        completions = runtime.generate([prompt(0, 1300), prompt(0, 700), prompt(1)], PARAMS)
        assert (completions[0].token_ids, completions[0].digest) == (
            expected.token_ids,
            expected.digest,
        )
        stats: Any = runtime.cache_stats()
        assert stats["ended_extensions"] == ["kv_store"]
        assert "kv_store" not in stats
        runtime.check()
        assert runtime.stored_len(prompt(0)) == 0
        with pytest.raises(OSError, match="has failed and was ended"):
            runtime.load_cache(str(tmp_path))
    assert caplog.text.count("kv_store has failed and is ended") == 1
