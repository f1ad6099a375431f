"""Structured output never answers a schema of the JSON Schema Test Suite wrongly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("llguidance", reason="the extra [grammar]")

from benchmarks.json_schema_suite import run, table_of

SUITE = os.environ.get("RADIXSERVE_JSON_SCHEMA_SUITE")  # see the script's first lines
DOCS = Path(__file__).parents[2] / "docs" / "structured-output.md"


@pytest.mark.long
@pytest.mark.skipif(SUITE is None, reason="RADIXSERVE_JSON_SCHEMA_SUITE names no folder")
@pytest.mark.parametrize("closes", [False, True])
def test_no_outcome_is_wrong_and_the_table_is_this_one(closes: bool) -> None:
    assert SUITE is not None
    outcomes = run(Path(SUITE), closes=closes)
    bad = [
        (case.keyword, case.name, outcome.detail)
        for several in outcomes.values()
        for case, outcome in several
        if outcome.kind in ("wrong", "failed")
    ]
    assert not bad
    page = DOCS.read_text(encoding="utf-8")
    assert (table_of(outcomes).splitlines()[-1] if closes else table_of(outcomes)) in page
