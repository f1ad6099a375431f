"""What other engines needed for the same workloads: measured elsewhere, on one thread.

CPU seconds on a machine of this kind (two cores with AVX-512), with the shapes and lengths of
harness/shapes.py and harness/workloads.py, W1 to W5 in that order. They show where the field is;
what runs here is measured in the same run.
"""

from __future__ import annotations

import json
from pathlib import Path

_FIGURES = Path(__file__).parents[1] / "results" / "engine-cpu-elsewhere.json"


def published(model: str, dtype: str, workload: str, arrival: str) -> dict[str, float]:
    """CPU seconds by engine, best first; none where the case was not measured."""
    at = int(workload[1:]) - 1
    rows = json.loads(_FIGURES.read_text()).get(f"{model} {dtype}", {}).get(arrival, {})
    found = {engine: row[at] for engine, row in rows.items() if at < len(row)}
    return dict(sorted(found.items(), key=lambda one: one[1]))
