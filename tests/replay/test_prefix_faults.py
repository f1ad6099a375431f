"""Faults that are planted in chats are found, told apart, ranked, and mended as predicted."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixserve.cli import main
from radixserve.replay import CacheSpec, Trace, build_paths, read_trace, replay_direct
from radixserve.replay.changes import find_changes
from radixserve.replay.fault_kinds import COMPACTED, MENDS, OTHER, PAGE, THOUGHTS
from radixserve.replay.prefix_faults import (
    LEAST_SHARE,
    Diagnosis,
    Fault,
    diagnosis_document,
    diagnosis_findings,
    find_faults,
    mend,
)
from radixserve.replay.trace import PackedTokens
from radixserve.replay.workloads import WORKLOADS, make_turns, make_workload
from tests.replay import faulty_traffic
from tests.replay.faulty_traffic import RENDERERS, traffic

KINDS = [kind for kind in RENDERERS if kind != "clean"]
MIXED = traffic(KINDS, sizes=dict.fromkeys(KINDS, 12))
SIZES = {kind: 80 + 60 * number for number, kind in enumerate(KINDS)}


def decoder(trace: Trace) -> Callable[[Sequence[int]], str]:
    return lambda ids: "".join(trace.words[token] for token in ids)


def gain(diagnosis: Diagnosis, rate: float) -> float:
    return rate - diagnosis.hit_rate


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_a_planted_fault_is_found_and_its_mend_proven(kind: str, seed: int) -> None:
    trace, owners = traffic(["clean", kind, "clean"], seed)
    diagnosis = find_faults(trace, decode=decoder(trace))
    (fault,) = diagnosis.faults
    assert fault.kind == kind
    assert {owners[change.request] for change in fault.changes} == {kind}
    predicted = gain(diagnosis, fault.predicted_rate)
    assert predicted > 0.01
    assert gain(diagnosis, fault.mended_rate) == pytest.approx(predicted, abs=0.02)
    assert fault.expected != fault.found or kind == "tokenisation"
    clean, _ = traffic(["clean", kind, "clean"], seed, is_faulty=False)
    wanted = build_paths(clean).reusable_tokens / clean.prompt_tokens
    assert fault.mended_rate == pytest.approx(wanted, abs=0.02)


@pytest.mark.parametrize("kind", ["renamed tool", "changing order"])
def test_tools_in_the_form_of_responses(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose schemas are more alike than they differ."""
    schema = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}

    def render_tools(tools: Iterable[tuple[str, str]]) -> str:
        rows = [
            {"type": "function", "name": name, "description": text[:30], "parameters": schema}
            for name, text in tools
        ]
        return json.dumps(rows)

    monkeypatch.setattr(faulty_traffic, "render_tools", render_tools)
    trace, _ = traffic(["clean", kind])
    diagnosis = find_faults(trace, decode=decoder(trace))
    (fault,) = diagnosis.faults
    assert fault.kind == kind
    assert fault.mended_rate == pytest.approx(fault.predicted_rate, abs=0.02)


@pytest.mark.parametrize("page_size", [1, 256])
def test_ten_faults_in_one_mix_are_ranked_by_what_they_lose(page_size: int) -> None:
    trace, owners = traffic([*KINDS, "clean", "clean"], sizes=SIZES)
    diagnosis = find_faults(trace, decode=decoder(trace), page_size=page_size)
    kinds = [fault.kind for fault in diagnosis.faults]
    assert sorted(kinds) == sorted([*KINDS, PAGE] if page_size > 1 else KINDS)
    lost = [fault.lost for fault in diagnosis.faults]
    assert lost == sorted(lost, reverse=True)
    clean, _ = traffic([*KINDS, "clean", "clean"], sizes=SIZES, is_faulty=False)
    without, with_faults = build_paths(clean), build_paths(trace)
    for fault in diagnosis.faults:
        predicted = gain(diagnosis, fault.predicted_rate)
        assert gain(diagnosis, fault.mended_rate) == pytest.approx(predicted, abs=0.02)
        if fault.kind == PAGE:
            assert fault.lost == int((with_faults.reusable % page_size).sum())
            continue
        assert {owners[change.request] for change in fault.changes} == {fault.kind}
        if fault.kind not in (COMPACTED, THOUGHTS):  # whose prompts are shorter than clean ones
            is_of = np.asarray([owner == fault.kind for owner in owners])
            wanted = int((without.reusable - with_faults.reusable)[is_of].sum())
            assert fault.lost == pytest.approx(wanted, rel=0.1), fault.kind


@pytest.mark.parametrize("page_size", [1, 256])
def test_rates_are_those_of_replays(page_size: int) -> None:
    """With a cache that holds everything, of the trace and of the mended one."""
    trace, _ = traffic(["clean", "date or time", "compacted history"])
    diagnosis = find_faults(trace, decode=decoder(trace), page_size=page_size)
    assert len(diagnosis.faults) == (2 if page_size == 1 else 3)
    index = "radix" if page_size == 1 else "hash"
    spec = CacheSpec(256_000, page_size=page_size, index=index)
    assert replay_direct(trace, spec).hit_rate == pytest.approx(diagnosis.hit_rate)
    paths = build_paths(trace)
    for fault in diagnosis.faults:
        if fault.kind != PAGE:
            mended = mend(trace, paths, fault)
            assert replay_direct(mended, spec).hit_rate == pytest.approx(fault.mended_rate)


def test_a_mended_prompt_says_the_same() -> None:
    """A date goes to the end of the message; nothing else is lost or doubled."""
    trace, owners = traffic(["clean", "date or time"])
    (fault,) = find_faults(trace, decode=decoder(trace)).faults
    mended = mend(trace, build_paths(trace), fault)
    chats: dict[str, int] = {}
    for request, other in zip(trace, mended, strict=True):
        session = request.session or ""
        if owners[request.index] == "clean":
            assert np.array_equal(request.prompt, other.prompt)
            continue
        assert np.isin(request.prompt, other.prompt).all()
        past = chats.setdefault(session, len(other.prompt) - len(request.prompt))
        assert past <= len(other.prompt) - len(request.prompt) <= past + 20 * 4
        assert np.array_equal(request.output, other.output)


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_findings_depend_on_which_tokens_are_equal_alone(seed: int) -> None:
    """Other ids for the same tokens, by which all hashes differ, give the same changes."""
    trace, _ = MIXED
    ids = np.random.default_rng(seed).permutation(1 << 18).astype(np.int32)
    other = PackedTokens()
    for request in trace:
        other.add(ids[request.prompt], ids[request.output])
    words = {int(ids[token]): word for token, word in trace.words.items()}
    renamed = replace(trace, source=other, words=words)
    found = list(find_changes(renamed, build_paths(renamed), decoder(renamed)))
    assert found == list(find_changes(trace, build_paths(trace), decoder(trace)))
    assert len(found) > 100


def test_clean_traffic_has_no_fault() -> None:
    for seed in range(3):
        trace, _ = traffic(["clean"] * 4, seed)
        assert find_faults(trace, decode=decoder(trace)).faults == []
    for name in WORKLOADS:
        if name != "code":
            assert find_faults(make_workload(name, 120)).faults == [], name


def test_edits_are_changed_text() -> None:
    """In files that are completed, some above the cursor: they are all that is found."""
    turns = make_turns("code", 200)
    last: dict[str, np.ndarray] = {}
    edited = set()
    for index, turn in enumerate(turns):
        before = last.get(turn.session)
        if before is not None and not np.array_equal(turn.text[: len(before)], before):
            edited.add(index)
        last[turn.session] = turn.text
    diagnosis = find_faults(make_workload("code", 200))
    assert {fault.kind for fault in diagnosis.faults} == {OTHER}
    found = {change.request for fault in diagnosis.faults for change in fault.changes}
    assert found <= edited
    assert len(found) > 0.6 * len(edited)
    for fault in diagnosis.faults:
        assert fault.mended_rate == pytest.approx(fault.predicted_rate, abs=0.02)


def test_without_text_places_and_counts_remain() -> None:
    trace, _ = traffic(["clean", "date or time", "clean"])
    with_text = find_faults(trace, decode=decoder(trace)).faults
    (fault,) = find_faults(trace).faults
    assert fault.kind == OTHER
    assert fault.expected is fault.found is None
    assert (fault.lost, fault.positions) == (with_text[0].lost, with_text[0].positions)


def test_a_hashed_trace_shows_where_prompts_part(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rows = [
        {"timestamp": number, "input_length": 64, "hash_ids": [7, 8, 100 + number, 200 + number]}
        for number in range(6)
    ]
    rows.append({"timestamp": 9, "input_length": 80, "hash_ids": [7, 8, 100, 200, 300]})
    lines = [json.dumps(row) for row in ({"trace": "hashed", "block_size": 16}, *rows)]
    path.write_text("\n".join(lines))
    diagnosis = find_faults(read_trace(path))
    assert diagnosis.faults == []
    (parting,) = diagnosis.partings
    assert parting == (32, 5, 5 * 32)
    (finding,) = diagnosis_findings(diagnosis_document(diagnosis))
    assert finding.rows[0][:3] == ("32", "5", "160")


def test_what_pages_lose() -> None:
    trace, _ = traffic(["clean", "clean"])
    (fault,) = find_faults(trace, page_size=512).faults
    reusable = build_paths(trace).reusable
    assert fault.kind == PAGE
    assert fault.lost == int((reusable % 512).sum()) > LEAST_SHARE * trace.prompt_tokens


def write_text_trace(trace: Trace, path: Path) -> None:
    """The same chats as a file of texts."""
    decode = decoder(trace)
    with gzip.open(path, "wt") as file:
        for request in trace:
            row = {"time": request.time, "session": request.session}
            texts = {
                "prompt": decode(request.prompt.tolist()),
                "output": decode(request.output.tolist()),
            }
            file.write(json.dumps({**row, **texts}) + "\n")


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl.gz"
    trace, _ = traffic(["clean", "request id"])
    write_text_trace(trace, path)
    assert main(["replay", str(path), "--diagnose", "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["traces"]
    (fault,) = document["faults"]
    assert fault["kind"] == "request id"
    assert fault["mend"] == MENDS["request id"]
    assert fault["mended_hit_rate"] > document["hit_rate"] + 0.2
    assert main(["replay", str(path), "--diagnose"]) == 0
    text = capsys.readouterr().out
    assert "1 request id" in text
    assert "found '" in text
    assert main(["replay", "workload:chat", "--limit", "20", "--diagnose"]) == 0
    assert "no change makes prompts part" in capsys.readouterr().out
    for wrong in (["--cache-tokens", "9k"], ["--baseline"], ["--page-size", "1,2"]):
        assert main(["replay", str(path), "--diagnose", *wrong]) != 0
    assert main(["replay", str(path), "--tokenizer", "demo"]) != 0
    assert "--diagnose" in capsys.readouterr().err


def test_faults_of_nothing() -> None:
    assert Fault(OTHER).positions == []
