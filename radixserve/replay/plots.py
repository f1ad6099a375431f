"""Draws three plots per trace: hit rate over cache size, reusable prefixes, reuse distances.

Needs matplotlib, which comes with `pip install radixserve[plot]`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from radixserve.errors import InvalidRequest
from radixserve.replay.caches import ReplayResult
from radixserve.replay.report import format_tokens
from radixserve.replay.study import Study

_SIZE = (5.6, 3.9)  # inches per plot
_SHAPES = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚"}  # markers in labels
_MARKERS = tuple(_SHAPES)
_LABEL_STEP = 0.068  # between two labels, as a share of the plot's height
# The style of a line that may run along the edge of the frame.
_FREE: dict[str, Any] = {"linewidth": 2, "clip_on": False, "zorder": 3}


class _End(NamedTuple):
    """The right end of a line."""

    name: str
    rate: float  # percent
    color: Any


def check_plot_path(path: str | os.PathLike[str]) -> None:
    """Raise InvalidRequest without matplotlib, or for a file name with an unknown ending."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise InvalidRequest(
            "plots need matplotlib: pip install matplotlib, or radixserve[plot]"
        ) from None
    allowed = sorted(FigureCanvasAgg.get_supported_filetypes())
    if os.path.splitext(path)[1].removeprefix(".").lower() not in allowed:
        raise InvalidRequest(f"a plot's name must end in one of {', '.join(allowed)}")


def draw(studies: Sequence[Study], path: str | os.PathLike[str]) -> None:
    """Draw a row of plots for each study into a file, whose ending determines the format. Raises
    what `check_plot_path` raises."""
    check_plot_path(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * _SIZE[0], len(studies) * _SIZE[1]), layout="constrained")
    rows = figure.subplots(len(studies), 3, squeeze=False, width_ratios=(1.25, 1, 1))
    for study, (rates, lengths, distances) in zip(studies, rows, strict=True):
        draw_rates(study, rates)
        draw_lengths(study, lengths)
        draw_distances(study, distances)
    figure.savefig(path, dpi=110)


def draw_rates(study: Study, axes: Any) -> None:
    """Draw the hit rate over the cache size: a line for each cache, and the clairvoyant bound.

    The axis of rates does not begin at 0, since the caches differ by a few percent.
    """
    low, high = max(1.0, min(study.bounds) / 1.25), float(max(study.bounds))
    kinds = sorted(study.by_kind().items(), key=lambda item: -_mean_rate(item[1]))
    ends: list[_End] = []
    for number, ((label, page_size), by_size) in enumerate(kinds):
        name = f"{label}, page {page_size}" if any(page != 1 for (_, page), _ in kinds) else label
        sizes = sorted(by_size)
        rates = [100 * by_size[size].hit_rate for size in sizes]
        marker = _MARKERS[number % len(_MARKERS)]
        style = {"marker": marker, "markersize": 6, "markeredgecolor": "white", "linewidth": 1.6}
        (line,) = axes.plot(sizes, rates, label=name, zorder=3, clip_on=False, **style)
        ends.append(_End(f"{_SHAPES[marker]} {name}", rates[-1], line.get_color()))
    curve, bound = study.bound_curve(low, high)
    axes.plot(curve, 100 * bound, color="black", linewidth=1.2, zorder=2)
    ideal = 100 * study.ideal_rate
    axes.axhline(ideal, color="dimgrey", linewidth=1, linestyle=(0, (1, 2)), zorder=1)
    ends = [
        _End("··· unlimited cache", ideal, "dimgrey"),
        _End("— best possible", 100 * float(bound[-1]), "black"),
        *ends,
    ]
    lowest = min([*(100 * result.hit_rate for result in study.direct), 100 * float(bound[0])])
    bottom = max(0.0, 10 * math.floor((lowest - 3) / 10))
    top = min(100.0, 10 * math.ceil((ideal + 1) / 10))
    _name(
        axes,
        f"{study.trace.name}: how much the cache saves",
        "cache size (tokens)",
        "prompt tokens found in the cache (%)",
    )
    axes.set(ylim=(bottom, top + 0.03 * (top - bottom)))
    _log_tokens(axes, low, high)
    _label_ends(axes, ends)


def draw_lengths(study: Study, axes: Any) -> None:
    """Draw the share of requests at least x of whose prompt was seen before."""
    shares = study.reusable_shares()
    axes.plot(100 * shares, np.linspace(100, 0, len(shares)), color="tab:blue", **_FREE)
    _name(
        axes,
        "how much of a prompt was seen before",
        "at least this part of the prompt (%)",
        "requests (%)",
    )
    axes.set(xlim=(-2, 102), ylim=(-2, 103))


def draw_distances(study: Study, axes: Any) -> None:
    """Draw the share of reused tokens whose reuse distance is at most x."""
    tokens = study.reuse.tokens
    reached = 100 * np.cumsum(tokens) / max(1.0, float(tokens.sum()))
    begin = max(0, int(np.searchsorted(reached, 0.5)) - 1)
    edges = study.reuse.edges[1:]
    axes.plot(edges[begin:], reached[begin:], color="tab:blue", **_FREE)
    _name(
        axes,
        "how soon tokens are used again",
        "other tokens used in between, at most",
        "reused tokens (%)",
    )
    axes.set(ylim=(-2, 103))
    _log_tokens(axes, float(edges[begin]), float(edges[-1]))


def _mean_rate(by_size: dict[int, ReplayResult]) -> float:
    return sum(result.hit_rate for result in by_size.values()) / len(by_size)


def _name(axes: Any, title: str, across: str, up: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(across, fontsize=9)
    axes.set_ylabel(up, fontsize=9)
    axes.tick_params(labelsize=9, length=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def _log_tokens(axes: Any, low: float, high: float) -> None:
    """Make the x axis logarithmic, with token counts at about eight ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    decades = math.log10(high / low)
    steps = (1, 2, 5) if decades < 2.5 else (1,)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tokens(value)))


def _label_ends(axes: Any, ends: Sequence[_End]) -> None:
    """Write the name of each line to the right of its end, in its colour, without overlaps."""
    bottom, top = axes.get_ylim()
    heights = _spread([(end.rate - bottom) / (top - bottom) for end in ends], _LABEL_STEP)
    for end, height in zip(ends, heights, strict=True):
        axes.annotate(
            end.name,
            (1.0, (end.rate - bottom) / (top - bottom)),
            xytext=(1.07, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=end.color,
            arrowprops={
                "arrowstyle": "-",
                "color": end.color,
                "linewidth": 0.8,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 5,
            },
        )


def _spread(heights: Sequence[float], step: float) -> list[float]:
    """The heights of labels, in the order of `heights` from top to bottom, at least `step` apart
    and near their lines: labels that touch are a group around the mean of their lines."""
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _bottom(groups[-2], step) - step < _top(groups[-1], step):
            lower = groups.pop()
            groups[-1] += lower
    placed = []
    for group in groups:
        first = min(_top(group, step), 1.0)
        placed += [first - step * number for number in range(len(group))]
    return placed


def _top(group: Sequence[float], step: float) -> float:
    return sum(group) / len(group) + step * (len(group) - 1) / 2


def _bottom(group: Sequence[float], step: float) -> float:
    return _top(group, step) - step * (len(group) - 1)
