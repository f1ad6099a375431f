"""Draws docs/img/computed-tokens.svg: prompt tokens computed with the prefix tree and without it.

    python tools/draw_computed_tokens.py [--results FILE] [--output FILE]

FILE is a result of `benchmarks/bench_engine.py --save DIR`. Its rows "radix" and "off" are the same
requests with the tree and with cache="off".
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "engine-cpu-tiny-float32.json"
OUTPUT = ROOT / "docs" / "img" / "computed-tokens.svg"
NAMES = {
    "W1": "a shared system prompt",
    "W2": "chats of six turns",
    "W3": "few-shot examples",
    "W4": "nothing shared",
    "W5": "branches of one prompt",
}
WIDTH, LEFT, BAR, ROW, TOP = 760, 184, 13, 42, 58  # pixels
LONGEST = WIDTH - LEFT - 120  # of a bar, beside its label
WITH, WITHOUT = "#2563a8", "#c3cfdd"


class Bars(NamedTuple):
    """The two bars of a workload, in tokens."""

    name: str
    computed: int
    computed_without: int


def read_bars(path: Path) -> list[Bars]:
    """The bars of the workloads in a result file whose requests arrived at once. Raises KeyError
    without both rows."""
    cases = json.loads(path.read_text())["cases"]
    bars = []
    for case in cases:
        if case["arrival"] != "burst":
            continue
        tokens = {row["engine"]: row["num_prefilled"] for row in case["rows"]}
        bars.append(Bars(NAMES[case["workload"]], tokens["radix"], tokens["off"]))
    return bars


def svg(rows: list[Bars]) -> str:
    """The chart as text."""
    height = TOP + ROW * len(rows) + 6
    longest = max(row.computed_without for row in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" font-size="13">',
        '<rect width="100%" height="100%" rx="8" fill="white"/>',
        '<text x="16" y="24" font-size="15" font-weight="600" fill="#111">'
        "Prompt tokens computed</text>",
        *_legend(),
    ]
    for index, row in enumerate(rows):
        parts += _draw(row, TOP + ROW * index, LONGEST / longest)
    return "\n".join([*parts, "</svg>\n"])


def _legend() -> Iterator[str]:
    for x, colour, text in ((LEFT, WITH, "with the tree"), (LEFT + 130, WITHOUT, "without")):
        yield f'<rect x="{x}" y="36" width="12" height="12" rx="2" fill="{colour}"/>'
        yield f'<text x="{x + 18}" y="46" fill="#333">{text}</text>'


def _draw(row: Bars, y: int, scale: float) -> Iterator[str]:
    """Both bars of a workload, their numbers of tokens, and the factor that the tree saves."""
    yield f'<text x="16" y="{y + 19}" fill="#111">{escape(row.name)}</text>'
    factor = row.computed_without / row.computed
    saved = f" ({factor:.1f} times fewer)" if factor > 1 else ""
    bars = ((row.computed, WITH, saved), (row.computed_without, WITHOUT, ""))
    for index, (tokens, colour, note) in enumerate(bars):
        top, length = y + index * (BAR + 2), max(2, round(tokens * scale))
        yield (
            f'<rect x="{LEFT}" y="{top}" width="{length}" height="{BAR}" rx="2" fill="{colour}"/>'
        )
        yield (
            f'<text x="{LEFT + length + 6}" y="{top + 11}" font-size="12" fill="#333">'
            f"{tokens:,}{note}</text>"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    args.output.write_text(svg(read_bars(args.results)))


if __name__ == "__main__":
    main()
