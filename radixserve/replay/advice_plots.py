"""Pictures of an advice: the hit rate by cache size, why tokens are computed over time, the time to
the first token with the cache and without, and the tree's edges.

`draw_advice` writes them into a file, `write_report` into one HTML file with the tables. Needs
matplotlib.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from radixserve.replay.edges import TreeEdges, tree_edges
from radixserve.replay.losses import Losses
from radixserve.replay.plots import check_plot_path
from radixserve.replay.report import Finding, format_tokens
from radixserve.replay.sizing import Advice, LruCurve
from radixserve.replay.trace import Ints

_SIZE = (6.4, 3.9)  # inches per plot
_POINTS = 64
_LEAST_WIDTH = 1 / 500  # of the requests: edges that fewer use are not drawn
_MOST_EDGES = 3000
_COLORS = {  # by reason that tokens are computed
    "new": "#9aa5b1",
    "diverged": "#d1495b",
    "evicted": "#edae49",
    "namespace": "#7768ae",
    "page": "#00798c",
    "twice": "#30638e",
}
_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: .5em 0; font-variant-numeric: tabular-nums; }
th, td { padding: .15em .8em; text-align: right; } th { border-bottom: 1px solid #999; }
th:first-child, td:first-child { text-align: left; } svg { max-width: 100%; height: auto; }
"""


class Pictured(NamedTuple):
    """What the pictures of an advice show: a cache of one size."""

    advice: Advice
    losses: Losses
    cache_tokens: int

    @property
    def hits(self) -> Ints:
        """[requests] the reused tokens."""
        return LruCurve(self.advice.trace, self.advice.paths).hits(self.cache_tokens)

    @property
    def edges(self) -> TreeEdges:
        return tree_edges(self.advice.trace, self.advice.paths, self.hits)


def draw_advice(pictured: Pictured, path: str | os.PathLike[str]) -> None:
    """Draw the plots into a file, whose ending determines the format. Raises InvalidRequest
    without matplotlib, or for a file name with an unknown ending."""
    check_plot_path(path)
    _figure(pictured).savefig(path, dpi=110)


def write_report(pages: Sequence[tuple[Sequence[Finding], Pictured | None]], path: str) -> None:
    """Write tables, and the plots of advices, as one HTML file. Raises what `draw_advice`
    raises, and OSError."""
    parts = []
    for findings, pictured in pages:
        if pictured is not None:
            drawing = io.StringIO()
            _figure(pictured).savefig(drawing, format="svg")
            parts.append(drawing.getvalue()[drawing.getvalue().index("<svg") :])
        parts += [_html(finding) for finding in findings]
    text = (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>radixserve: advice'
        f"</title>\n<style>\n{_STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n"
    )
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _figure(pictured: Pictured) -> Any:
    check_plot_path("advice.svg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 * _SIZE[0], 2 * _SIZE[1]), layout="constrained")
    (rates, reasons), (times, tree) = figure.subplots(2, 2)
    _draw_rates(pictured.advice, rates)
    _draw_losses(pictured.advice, pictured.losses, reasons)
    _draw_first_tokens(pictured, times)
    _draw_edges(pictured.edges, pictured.cache_tokens, tree)
    return figure


def _draw_rates(advice: Advice, axes: Any) -> None:
    """The predicted hit rate by size, the recommended size, and the given ones as replayed."""
    curve = LruCurve(advice.trace, advice.paths)
    most = max([curve.most, *(row.cache_tokens for row in advice.given)])
    sizes = np.unique(np.geomspace(curve.least, max(most, curve.least + 1), _POINTS).astype(int))
    rates = [100 * curve.total(int(size)) / advice.trace.prompt_tokens for size in sizes]
    axes.plot(sizes, rates, color="tab:blue", label="LRU, predicted")
    axes.axhline(100 * advice.ideal_rate, color="dimgrey", linestyle=":", label="unlimited cache")
    best = advice.recommended
    name = f"advised: {format_tokens(best.cache_tokens)} tokens, {best.gib:.1f} GiB"
    star = {"marker": "*", "markersize": 14, "linestyle": "", "color": "tab:green"}
    axes.plot(best.cache_tokens, 100 * best.predicted, label=name, **star)
    given = [(row.cache_tokens, 100 * (row.replayed or 0.0)) for row in advice.given]
    if given:
        axes.plot(*zip(*given, strict=True), "o", color="tab:red", label="given, replayed")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: format_tokens(value))
    axes.set_title(f"{advice.trace.name}: hit rate by cache size", fontsize=11, loc="left")
    axes.set_xlabel("cache size (tokens)")
    axes.set_ylabel("prompt tokens found in the cache (%)")
    axes.legend(fontsize=9, loc="lower right")
    axes.grid(alpha=0.25)


def _draw_losses(advice: Advice, losses: Losses, axes: Any) -> None:
    """Computed tokens by reason, as parts of the prompts' tokens, over time."""
    total = np.maximum(1, losses.prompts)
    names = [name for name in _COLORS if losses.computed[name].any()]
    parts = [100 * np.append(losses.computed[name], losses.computed[name][-1:]) for name in names]
    shares = [part / np.append(total, total[-1:]) for part in parts]
    if shares:
        colors = [_COLORS[name] for name in names]
        axes.stackplot(losses.edges, shares, labels=names, colors=colors, step="post")
        axes.legend(fontsize=9, loc="upper right")
    unit = "seconds" if advice.trace.has_times else "requests"
    axes.set_title("computed prompt tokens by reason", fontsize=11, loc="left")
    axes.set_xlabel(unit)
    axes.set_ylabel("of the prompt tokens (%)")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.25)


def _draw_first_tokens(pictured: Pictured, axes: Any) -> None:
    """The time to the first token of each request, with the cache and without."""
    num_prompt, pricing = pictured.advice.trace.num_prompt, pictured.advice.pricing
    shares = np.linspace(0, 100, len(num_prompt))
    name = f"cache of {format_tokens(pictured.cache_tokens)} tokens"
    for label, hits, color in (
        ("no cache", np.zeros_like(num_prompt), "dimgrey"),
        (name, pictured.hits, "tab:green"),
    ):
        times = 1000 * np.sort(pricing.first_token_s(num_prompt, hits))
        label = f"{label}: mean {times.mean():,.0f} ms"
        axes.plot(shares, times, label=label, color=color, drawstyle="steps-post")
    axes.set_yscale("log")
    axes.set_title("time to the first token, alone, by the step costs", fontsize=11, loc="left")
    axes.set_xlabel("requests (%), the fastest first")
    axes.set_ylabel("milliseconds")
    axes.legend(fontsize=9, loc="upper left")
    axes.grid(alpha=0.25, which="both")


def _draw_edges(edges: TreeEdges, cache_tokens: int, axes: Any) -> None:
    """The tree from the top: an edge is as wide as the number of requests that use it. The redder,
    the more of its uses computed it again."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("lost", ["#3a9d5d", "#edae49", "#d1495b"])
    lefts = np.zeros(len(edges.starts))
    used = np.zeros(len(edges.starts) + 1)  # by parent: the width that its children have so far
    num_requests = float(edges.requests[edges.parents < 0].sum())
    shown = np.flatnonzero(edges.requests >= max(1.0, num_requests * _LEAST_WIDTH))[:_MOST_EDGES]
    for edge in shown.tolist():
        parent, width = int(edges.parents[edge]), float(edges.requests[edge])
        lefts[edge] = used[parent] + (lefts[parent] if parent >= 0 else 0.0)
        used[parent] += width
        uses = float(edges.hit_tokens[edge] + edges.lost_tokens[edge])
        color = colors(edges.lost_tokens[edge] / uses) if uses else "#d9dde2"
        axes.bar(
            lefts[edge],
            edges.lengths[edge],
            width,
            bottom=edges.starts[edge],
            align="edge",
            color=color,
            edgecolor="white",
            linewidth=0.4,
        )
    axes.set_xlim(0, max(1.0, num_requests))
    axes.invert_yaxis()
    axes.yaxis.set_major_formatter(lambda value, _: format_tokens(value))
    title = (
        f"the tree: read (green) and computed again (red) with {format_tokens(cache_tokens)} tokens"
    )
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("requests that use an edge")
    axes.set_ylabel("position (tokens)")


def _html(finding: Finding) -> str:
    parts = [f"<h2>{escape(finding.title)}</h2>"]
    if finding.rows:
        rows = [(finding.heads, "th"), *((row, "td") for row in finding.rows)]
        lines = [
            "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
            for row, tag in rows
        ]
        parts.append("<table>\n" + "\n".join(lines) + "\n</table>")
    parts += [f"<p>{escape(line)}</p>" for line in finding.lines]
    return "\n".join(parts)
