"""Traces as they are read: the three forms, identical tokens, errors that say where."""

from __future__ import annotations

import gzip
import importlib.util
import json
import logging
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixserve.errors import InvalidRequest
from radixserve.replay import read_trace
from radixserve.replay.trace import block_matrix, block_tokens, tokenize
from tests.replay.traces import SHARED, SHARED_NAMES

EXPAND = SHARED / "expand.py"


def write(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


# -- tokens ---------------------------------------------------------------------------------------


def test_blocks_have_the_published_check_values() -> None:
    wanted = {
        0: [26067, 17043, 30348, 24148],
        1: [11281, 12196, 16994, 10187],
        2: [23335, 31224, 26956, 5203],
    }
    matrix = block_matrix(np.arange(3), 64)
    for block, tokens in wanted.items():
        assert block_tokens(block, 64)[:4].tolist() == tokens
        assert matrix[block].tolist() == block_tokens(block, 64).tolist()


def test_large_ids_and_odd_sizes_make_the_same_tokens_both_ways() -> None:
    ids = np.asarray([7, (1 << 40) + 3, (1 << 63) - 1])
    for size in (1, 5, 300_000):
        matrix = block_matrix(ids, size)
        for row, block in zip(matrix, ids.tolist(), strict=True):
            assert np.array_equal(row, block_tokens(block, size))


@pytest.mark.skipif(not EXPAND.exists(), reason="the shared traces are not here")
@pytest.mark.parametrize("stitch", [False, True])
@pytest.mark.parametrize("name", SHARED_NAMES)
def test_tokens_are_those_of_the_reference_reader(name: str, stitch: bool) -> None:
    spec = importlib.util.spec_from_file_location("expand", EXPAND)
    assert spec is not None
    assert spec.loader is not None
    expand = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(expand)
    path, count = SHARED / f"{name}.jsonl.gz", 250
    trace = read_trace(path, limit=count, stitch=stitch)
    wanted = expand.iter_tokens(str(path), stitch=stitch, max_requests=count)
    first = None
    for found, (record, prompt, output) in zip(trace, islice(wanted, count), strict=True):
        first = record["timestamp"] if first is None else first
        assert found.time == pytest.approx((record["timestamp"] - first) / 1000)
        assert found.session == record.get("session") or trace.sessions_inferred
        assert np.array_equal(found.prompt, prompt)
        assert np.array_equal(found.output, output)


def test_stitching_takes_tail_and_output_from_what_goes_on(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"trace": "t", "block_size": 4},
        {"timestamp": 0, "input_length": 6, "output_length": 3, "hash_ids": [1]},
        {"timestamp": 9, "input_length": 14, "output_length": 1, "hash_runs": [[1, 2], [7, 1]]},
        {"timestamp": 10, "input_length": 6, "output_length": 3, "hash_ids": [3]},
    )
    blocks = [*block_tokens(1, 4), *block_tokens(2, 4), *block_tokens(7, 4)]
    first, second, alone = read_trace(path)
    assert [*first.prompt, *first.output] == blocks[:9]
    assert second.prompt[:12].tolist() == blocks
    assert first.session == second.session != alone.session
    plain = read_trace(path, stitch=False)
    assert plain.request(0).prompt[:4].tolist() == blocks[:4]
    assert plain.request(0).prompt[4:].tolist() != blocks[4:6]
    assert not plain.sessions_inferred


def test_texts_follow_their_parents(tmp_path: Path) -> None:
    lines = [
        {"trace": "t", "prefixes": {"p": "You are a pirate. "}},
        {"id": 0, "timestamp": 0, "parent": -1, "prefix": "p", "text": "Hi", "output": "Ahoy"},
        {"id": 1, "timestamp": 5, "parent": 0, "text": " and", "output": ""},
    ]
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    first, second = read_trace(path)
    assert np.array_equal(
        first.prompt, np.concatenate((tokenize("You are a pirate. "), tokenize("Hi")))
    )
    assert np.array_equal(
        second.prompt, np.concatenate((first.prompt, first.output, tokenize(" and")))
    )
    assert len(second.output) == 0


def test_plain_lines_have_tokens_or_text(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"tokens": [1, 2, 3], "output_tokens": [4, 5], "time": 3.5, "session": "a"},
        {"prompt": "one two", "output": "three", "time": 1.5, "namespace": "n"},
        "",
        {"prompt": [7, 8], "output_length": 3, "timestamp": 2500, "session": 7},
    )
    early, middle, late = read_trace(path)
    assert [one.time for one in (early, middle, late)] == [0.0, 1.0, 2.0]
    assert early.prompt.tolist() == tokenize("one two").tolist()
    assert early.output.tolist() == tokenize("three").tolist()
    assert early.namespace == "n"
    assert (middle.prompt.tolist(), len(middle.output), middle.session) == ([7, 8], 3, "7")
    assert late.kept.tolist() == [1, 2, 3, 4]
    assert read_trace(path, limit=2).num_prompt.tolist() == [len(early.prompt), 2]


def test_without_times_all_arrive_at_once(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", {"tokens": [2]}, {"tokens": [1]}))
    assert not trace.has_times
    assert trace.times.tolist() == [0.0, 0.0]
    assert [one.prompt.tolist() for one in trace] == [[2], [1]]


# -- errors ---------------------------------------------------------------------------------------

HEADER = {"trace": "t", "block_size": 4}
HASHES = {"timestamp": 0, "input_length": 6, "hash_ids": [1]}


@pytest.mark.parametrize(
    ("lines", "number", "words"),
    [
        (["{"], 1, "not a line of JSON"),
        (["[1]"], 1, "JSON object"),
        ([{"tokens": [1]}, "nonsense"], 2, "not a line of JSON"),
        ([{"tokens": [1]}, {"tokens": []}], 2, "empty"),
        ([{"tokens": [1]}, {"other": 1}], 2, '"hash_ids"'),
        ([{"other": 1}], 1, "needs one of"),
        ([{"tokens": [1.5]}], 1, "token ids"),
        ([{"tokens": [-1]}], 1, "token ids"),
        ([{"tokens": [2**31]}], 1, "token ids"),
        ([{"tokens": [2**80]}], 1, "token ids"),
        ([{"tokens": [[1], [2]]}], 1, "token ids"),
        ([{"tokens": "text"}], 1, "token ids"),
        ([{"prompt": 5}], 1, "text or a list"),
        ([{"tokens": [1], "time": "now"}], 1, '"time" must be a number'),
        ([{"tokens": [1], "time": -1}], 1, '"time" must be >= 0'),
        (['{"tokens": [1], "time": NaN}'], 1, '"time"'),
        ([{"tokens": [1], "time": 1}, {"tokens": [1]}], 2, "all records"),
        ([{"tokens": [1], "session": [1]}], 1, '"session" must be text'),
        ([{"tokens": [1], "output_length": 1.5}], 1, '"output_length"'),
        ([HEADER, HASHES, {**HASHES, "hash_ids": [1, 2, 3]}], 3, "do not fit"),
        ([HEADER, {**HASHES, "input_length": 10}], 2, "do not fit"),
        ([HEADER, {**HASHES, "hash_ids": ["a"]}], 2, "block ids"),
        ([HEADER, {**HASHES, "hash_ids": [-1]}], 2, "block ids"),
        ([HEADER, {"input_length": 6, "hash_runs": [[1, 0]]}], 2, "pairs"),
        ([HEADER, {"input_length": 6, "hash_runs": [1]}], 2, "pairs"),
        ([HEADER, {"hash_ids": [1]}], 2, '"input_length" is missing'),
        ([{**HEADER, "block_size": 0}, HASHES], 1, "block_size"),
        ([HEADER, {"id": 1, "text": "a", "parent": 7}], 2, '"parent" 7'),
        ([HEADER, {"id": 1, "text": "a", "prefix": "p"}], 2, '"prefix" p'),
        ([HEADER, {"id": 1, "text": "a"}, {"id": 1, "text": "a"}], 3, "that of an earlier line"),
        ([{"trace": "t", "prefixes": [1]}, {"id": 1, "text": "a"}], 1, "prefixes"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, lines: list[Any], number: int, words: str) -> None:
    path = write(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(InvalidRequest) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:{number}: ")
    assert words in str(caught.value)


def test_files_without_requests_and_broken_archives(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        read_trace(write(tmp_path / "a.jsonl", ""))
    with pytest.raises(InvalidRequest, match="no requests"):
        read_trace(write(tmp_path / "b.jsonl", HEADER))
    broken = tmp_path / "c.jsonl.gz"
    broken.write_bytes(gzip.compress(b'{"tokens": [1]}\n' * 1000)[:-20])
    with pytest.raises(InvalidRequest, match="gzip"):
        read_trace(broken)
    with pytest.raises(OSError):
        read_trace(tmp_path / "missing.jsonl")


def test_only_a_log_may_be_cut_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = {"trace": "t", "kind": "radixserve-log", "version": 1}
    request = '{"time": 1, "tokens": [1, 2]}\n'
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(log) + "\n" + request + request[:12])
    with caplog.at_level(logging.WARNING, "radixserve"):
        assert len(read_trace(path)) == 1
    assert "t.jsonl:3: the last line is cut off" in caplog.text
    path.write_text(json.dumps(log) + "\n" + request[:12] + "\n" + request)
    with pytest.raises(InvalidRequest, match=r"t\.jsonl:2"):
        read_trace(path)


def test_a_log_may_have_several_headers_of_one_form(tmp_path: Path) -> None:
    log = {"trace": "t", "kind": "radixserve-log", "version": 1}
    request = {"time": 1, "tokens": [1, 2]}
    path = write(tmp_path / "t.jsonl", log, request, log, request)
    assert len(read_trace(path)) == 2
    path = write(tmp_path / "u.jsonl", log, request, {**log, "block_size": 4}, request)
    with pytest.raises(InvalidRequest, match=r"u\.jsonl:3: .*another format"):
        read_trace(path)
