"""The recorded lines of finished requests, alone and with a Runtime."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixserve import EngineConfig, InvalidRequest, Runtime, SamplingParams
from radixserve.engine.trace_recorder import TraceRecorder
from radixserve.output import Finish, Metrics, Usage
from radixserve.replay import CacheSpec, read_trace, replay_direct
from radixserve.request import Request
from tests.pacing import held, wait_until

FINISH = Finish("length", Usage(3, 1, 2, 2), Metrics(0.0, 0.1, 0.2), None)


def request(tokens: list[int], session: str = "", namespace: str = "") -> Request:
    params = SamplingParams(namespace=namespace)
    ids = np.asarray(tokens, np.int32)
    return Request("r", ids, params, 0, frozenset(), 100, session)


def objects(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_what_happened(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorder = TraceRecorder(str(path))
    recorder.on_finish(request([1, 2, 3], "chat", "n"), [4, 5], FINISH, 1000.25)
    recorder.on_finish(request([9]), [], FINISH, 1001.0)  # sampled nothing
    recorder.close()
    recorder.close()
    recorder.on_finish(request([9]), [1], FINISH, 1001.0)  # too late
    header, line = objects(path)
    assert (header["kind"], header["version"]) == ("radixserve-log", 1)
    assert line == {
        "time": 1000.25,
        "tokens": [1, 2, 3],
        "output_tokens": [4, 5],
        "finish": "length",
        "cached_tokens": 1,
        "session": "chat",
        "namespace": "n",
    }


def test_lines_are_written_in_time_though_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    recorder = TraceRecorder(str(path))
    later = time.monotonic() + 3600.0
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: later)
    recorder.on_finish(request([1, 2, 3]), [4, 5], FINISH, 1000.25)
    assert len(objects(path)) == 2
    recorder.close()


def test_hashes_tell_equal_prefixes_and_nothing_else(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    head = list(range(100, 108))
    for path in paths:
        recorder = TraceRecorder(str(path), 4)
        for at, tokens in enumerate(([*head, 1, 2, 3, 4, 5], [*head, 9, 9, 9, 9], [1, 2])):
            recorder.on_finish(request(tokens, "ann", "team"), [7], FINISH, float(at))
        recorder.on_finish(request(head, "ann"), [7], FINISH, 9.0)
        recorder.close()
        assert "ann" not in path.read_text()
        assert "team" not in path.read_text()
    header, first, second, short, elsewhere = objects(paths[0])
    assert header["block_size"] == 4
    assert (first["input_length"], first["output_length"]) == (13, 1)
    assert len(first["hash_ids"]) == 3
    assert first["hash_ids"][:2] == second["hash_ids"][:2]
    assert first["hash_ids"][2] != second["hash_ids"][2]
    assert short["hash_ids"] == []
    assert not set(elsewhere["hash_ids"]) & set(first["hash_ids"])
    assert all(0 <= one < 2**63 for one in first["hash_ids"])
    assert first["session"] == elsewhere["session"] != "ann"
    assert objects(paths[1])[1]["hash_ids"] != first["hash_ids"]  # another key
    found = replay_direct(read_trace(paths[0]), CacheSpec(1000))
    assert found.hits.tolist() == [0, 8, 0, 0]


def test_a_second_run_appends_and_drops_a_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for at in range(2):
        recorder = TraceRecorder(str(path))
        recorder.on_finish(request([1, 2]), [3], FINISH, float(at))
        recorder.close()
        with path.open("a") as file:
            file.write('{"time": 3, "tokens": [' + "1, " * 50_000)
    trace = read_trace(path)
    assert [one.prompt.tolist() for one in trace] == [[1, 2], [1, 2]]
    TraceRecorder(str(path)).close()
    assert path.read_bytes().endswith(b"}\n")
    assert len(read_trace(path)) == 2


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be written"):
        TraceRecorder(str(tmp_path / "missing" / "log.jsonl"))
    with pytest.raises(InvalidRequest, match="cannot be written"):
        TraceRecorder(str(tmp_path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_is_refused_at_the_start() -> None:
    with pytest.raises(InvalidRequest, match="cannot be written: No space left"):
        TraceRecorder("/dev/full")


def test_a_new_file_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        TraceRecorder(str(tmp_path / "log.jsonl")).close()
    finally:
        os.umask(before)
    assert (tmp_path / "log.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_disk_that_becomes_full_ends_the_trace_and_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0)
    with (
        caplog.at_level(logging.ERROR, "radixserve"),
        Runtime("demo", num_pages=256, trace=str(tmp_path / "log.jsonl")) as runtime,
    ):
        runtime.generate([5, 6, 7], params)
        full = os.open("/dev/full", os.O_WRONLY)
        for number in os.listdir("/proc/self/fd"):
            if os.path.realpath(f"/proc/self/fd/{number}") == str(tmp_path / "log.jsonl"):
                os.dup2(full, int(number))
        for _ in range(3):
            assert runtime.generate([5, 6, 8], params).finish_reason == "length"
        wait_until(lambda: runtime.cache_stats()["ended_extensions"] == ["trace"])
        assert runtime.generate([5, 6, 9], params).finish_reason == "length"
    assert caplog.text.count("trace has failed and is ended") == 1


# -- a Runtime ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "log.jsonl"
    params = SamplingParams(max_tokens=4, temperature=0.0)
    with Runtime("demo", num_pages=2048, trace=str(path)) as runtime:
        runtime.generate([[5, 6, 7, 8], [5, 6, 7, 9]], params)
        runtime.generate("The json module", SamplingParams(max_tokens=9, stop=["a", "e", "o"]))
        with held(runtime):
            for chunk in runtime.stream([5, 6, 7], SamplingParams(max_tokens=50, namespace="n")):
                if chunk.token_ids:
                    break  # aborted
        runtime.cache_stats()  # the engine has heard of it
    return path


def test_a_runtime_records_every_way_to_end(log: Path) -> None:
    header, *lines = objects(log)
    assert header["kind"] == "radixserve-log"
    assert sorted(line["tokens"] for line in lines[:2]) == [[5, 6, 7, 8], [5, 6, 7, 9]]
    assert sorted(line["cached_tokens"] for line in lines[:2]) == [0, 3]
    assert [line["finish"] for line in lines] == ["length", "length", lines[2]["finish"], "abort"]
    assert lines[2]["finish"] in ("stop", "length")
    assert lines[3]["namespace"] == "n"
    assert all(line["output_tokens"] for line in lines)
    assert header["started"] <= lines[0]["time"] <= lines[2]["time"] <= lines[3]["time"]


def test_its_log_can_be_replayed(log: Path) -> None:
    trace = read_trace(log)
    found = replay_direct(trace, CacheSpec(2048))
    assert found.hits[:2].tolist() == [0, 3]


CRASH = """
import os, sys, time
from radixserve import Runtime, SamplingParams
runtime = Runtime("demo", num_pages=512, trace=sys.argv[1])
runtime.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=2))
deadline = time.monotonic() + 200
while len(open(sys.argv[1]).readlines()) < 3 and time.monotonic() < deadline:
    time.sleep(0.01)
os._exit(1)
"""


def test_an_idle_engine_has_written_all_before_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    root = Path(__file__).parents[2]
    source = f"{root}{os.pathsep}{root / 'kernels'}"
    done = subprocess.run(
        [sys.executable, "-c", CRASH, str(path)],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert len(read_trace(path)) == 2


def test_wrong_settings_are_refused() -> None:
    for settings, words in (
        ({"trace": ""}, "path"),
        ({"trace": 5}, "trace must be"),
        ({"trace_hash_block": 16}, "needs a trace"),
        ({"trace": "x", "trace_hash_block": 0}, "trace_hash_block"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            EngineConfig(**settings)
