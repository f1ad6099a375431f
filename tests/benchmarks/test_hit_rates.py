"""The command that makes the tables of docs/cache.md, on a trace of a few lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.benchmarks.conftest import Run


def test_tables_pictures_and_document(tmp_path: Path, run: Run) -> None:
    pytest.importorskip("matplotlib")
    texts = [f"Question {at % 7}: what is {at} and {at + 1}, and why? " * 5 for at in range(30)]
    lines: list[dict[str, object]] = [
        {"trace": "bbh_fewshot", "prefixes": {"p": "Examples. " * 40}}
    ]
    for at, text in enumerate(texts):
        one = {"id": at, "timestamp": 100 * at, "session": f"s{at % 3}", "prefix": "p"}
        lines.append({**one, "text": text, "output": "It is what it is."})
    data = "\n".join(map(json.dumps, lines)).encode()
    (tmp_path / "bbh_fewshot.jsonl.gz").write_bytes(gzip.compress(data))
    page = tmp_path / "cache.md"
    page.write_text(
        "Before\n<!-- hit-rates bbh_fewshot -->\nreplaced\n<!-- end -->\nbetween\n"
        "<!-- hit-rates orders -->\n<!-- end -->\nbehind\n"
    )
    done = run("hit_rates.py", "--traces", tmp_path, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "agentic_code: skipped" in done.stderr
    found = json.loads((tmp_path / "hit-rates.json").read_text())["traces"]["bbh_fewshot"]
    assert found["requests"] == found["scheduled_requests"] == 30
    exact = [run for run in found["scheduled"] if run["index"] == "radix"]
    assert [run["compute_once_ratio"] for run in exact] == [1.0] * 4
    assert (tmp_path / "img" / "hit-rates-bbh_fewshot.png").stat().st_size > 10_000
    text = page.read_text()
    assert "replaced" not in text
    assert text.startswith(
        "Before\n<!-- hit-rates bbh_fewshot -->\n- 30 requests in 3 s, 3 sessions"
    )
    for words in (
        "| lru+sessions | 1 |",
        "| hash | 256 |",
        "| clairvoyant bound | 1 |",
        "| lpm |",
    ):
        assert words in text
    assert text.endswith("<!-- end -->\nbehind\n")
