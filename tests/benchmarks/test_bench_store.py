"""The benchmark of the kv_store runs and prints what it says; no test asserts a time."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.benchmarks.conftest import Run

pytestmark = pytest.mark.long  # one run of everything takes twenty seconds

SESSIONS = [" ".join(f"{topic}{number}" for number in range(60)) for topic in ("sea", "hill")]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory, run: Run) -> dict[str, Any]:
    """The tables of one quick run of everything, by title."""
    folder = tmp_path_factory.mktemp("store")
    trace = folder / "trace.jsonl.gz"
    header = {"trace": "test", "kind": "text", "prefixes": {"policy": "You answer questions. "}}
    records = [
        {
            "id": number,
            "timestamp": 1000 * number,
            "session": number,
            "parent": -1,
            "prefix": "policy",
            "text": f"{text} {number}",
            "output": "yes",
            "output_length": 1,
        }
        for number, text in enumerate(SESSIONS * 3)
    ]
    with gzip.open(trace, "wt") as file:
        file.write("\n".join(json.dumps(record) for record in [header, *records]))
    options = ("--quick", "--repeats", "1", "--model", "tiny", "--trace", trace)
    result = run("bench_store.py", *options, "--json", "--save", folder)
    assert result.returncode == 0, result.stderr
    saved = (folder / "store-cpu-tiny-float32.json").read_text()
    assert saved == result.stdout
    tables: dict[str, Any] = json.loads(saved)["tables"]
    return tables


def rows_of(tables: dict[str, Any], title: str) -> list[list[Any]]:
    (rows,) = [rows for name, rows in tables.items() if title in name]
    return list(rows)


def test_every_section_has_its_table(tables: dict[str, Any]) -> None:
    for title in ("after a restart", "throughput", "engine's thread", "rounds over", "plain files"):
        assert rows_of(tables, title)
    assert rows_of(tables, "when a load pays")
    assert len(rows_of(tables, "the longest of")) == 3


def test_other_requests_get_their_tokens_beside_a_store_that_hangs(tables: dict[str, Any]) -> None:
    rows = rows_of(tables, "beside a store that hangs")
    assert [row[0] for row in rows] == ["answers", "hangs"]
    assert all(row[1] > 0 for row in rows)


def test_a_restart_computes_one_token(tables: dict[str, Any]) -> None:
    (title,) = [title for title in tables if "after a restart" in title]
    assert title.endswith("1 computed")


def test_each_workload_runs_with_and_without_a_store(tables: dict[str, Any]) -> None:
    rows = rows_of(tables, "throughput")
    assert [row[0] for row in rows] == [f"W{number}" for number in (1, 1, 2, 2, 3, 3, 4, 4, 5, 5)]
    assert all(ratio > 0 for row in rows for ratio in row[2:8])


def test_a_store_has_the_hit_rate_of_a_pool_that_holds_everything(tables: dict[str, Any]) -> None:
    everything, small, stored = rows_of(tables, "the longest of")
    assert everything[1] >= stored[1] > 0
    assert everything[2] == 1 >= stored[2] >= small[2] > 0
