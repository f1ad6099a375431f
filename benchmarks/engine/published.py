"""What other engines needed for the same workloads: measured elsewhere, on one thread.

CPU seconds on a machine of this kind (two cores with AVX-512), with the shapes and lengths of
harness/shapes.py and harness/workloads.py, W1 to W5 in that order. They show where the field is;
what runs here is measured in the same run.
"""

from __future__ import annotations

_PUBLISHED: dict[tuple[str, str], dict[str, dict[str, tuple[float, ...]]]] = {
    ("tiny", "float32"): {
        "burst": {
            "vLLM CPU 0.32": (0.39, 2.6, 0.72, 1.06, 0.42),
            "llama.cpp server": (1.9, 3.0, 7.9, 1.8, 2.6),
            "OpenVINO GenAI": (2.5, 1.75, 6.9, 1.1, 3.0),
            "transformers": (4.6, 6.8, 12.0, 2.0, 5.3),
            "transformers, copied prefix": (1.4, 2.6, 1.9, 2.1, 1.3),
            "transformers, continuous": (9.4, 9.2, 10.4, 7.2, 9.2),
        },
        "sequential": {
            "vLLM CPU 0.32": (2.5, 7.4, 1.5, 2.0, 2.6),
            "llama.cpp server": (1.6, 3.4, 1.9, 2.1, 1.2),
            "OpenVINO GenAI": (1.6, 3.9, 1.2, 1.6, 1.6),
            "transformers": (5.8, 12.5, 9.7, 3.0, 5.8),
            "transformers, copied prefix": (3.7, 9.1, 1.9, 2.6, 3.1),
            "transformers, continuous": (3.2, 11.7, 2.4, 3.1, 3.4),
        },
    },
    ("small", "bfloat16"): {
        "burst": {
            "vLLM CPU 0.32": (4.0, 24.5, 8.7, 14.2, 4.0),
            "llama.cpp server": (16.2, 35.4, 66.5),
        },
        "sequential": {
            "vLLM CPU 0.32": (18.6, 61.6, 13.0, 20.3, 19.1),
            "llama.cpp server": (17.0, 43.5, 17.0),
        },
    },
}


def published(model: str, dtype: str, workload: str, arrival: str) -> dict[str, float]:
    """CPU seconds by engine, best first; none where the case was not measured."""
    at = int(workload[1:]) - 1
    rows = _PUBLISHED.get((model, dtype), {}).get(arrival, {})
    found = {engine: row[at] for engine, row in rows.items() if at < len(row)}
    return dict(sorted(found.items(), key=lambda one: one[1]))
