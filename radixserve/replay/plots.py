"""Three plots a trace: hit rate over cache size, reusable prefix lengths, reuse distances.

Needs matplotlib, which comes with `pip install radixserve[plot]`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from radixserve.errors import InvalidRequest
from radixserve.replay.report import format_tokens
from radixserve.replay.study import Study

_SIZE = (5.2, 3.9)  # inches a plot


def check_plot_path(path: str | os.PathLike[str]) -> None:
    """InvalidRequest without matplotlib, or for a file name with an unknown ending."""
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
    """A row of plots for each study, into one file; its ending gives the format.

    Raises what `check_plot_path` raises.
    """
    check_plot_path(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * _SIZE[0], len(studies) * _SIZE[1]), layout="constrained")
    rows = figure.subplots(len(studies), 3, squeeze=False)
    for study, (rates, lengths, distances) in zip(studies, rows, strict=True):
        draw_rates(study, rates)
        draw_lengths(study, lengths)
        draw_distances(study, distances)
    figure.savefig(path, dpi=110)


def draw_rates(study: Study, axes: Any) -> None:
    """Hit rate over cache size, a line for each cache, below the clairvoyant bound."""
    low, high = max(1.0, min(study.bounds) / 1.5), max(study.bounds) * 1.5
    kinds = study.by_kind()
    for (label, page_size), by_size in kinds.items():
        name = f"{label}, page {page_size}" if any(page != 1 for _, page in kinds) else label
        points = [(size, 100 * result.hit_rate) for size, result in sorted(by_size.items())]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    curve, rates = study.bound_curve(low, high)
    axes.plot(curve, 100 * rates, color="black", linewidth=1, label="clairvoyant bound")
    ideal = 100 * study.ideal_rate
    axes.axhline(ideal, color="grey", linewidth=0.8, linestyle=":", label="without end")
    axes.legend(fontsize=7)
    _name(axes, f"{study.trace.name}: hit rate", "cache size, tokens", "% of prompt tokens")
    axes.set(xlim=(low, high), ylim=(0, None))
    _log_tokens(axes)


def draw_lengths(study: Study, axes: Any) -> None:
    """The share of the requests whose reusable part of the prompt is at most x."""
    shares = study.reusable_shares()
    axes.plot(100 * shares, np.linspace(0, 100, len(shares)), color="tab:blue")
    title = "reusable part of a prompt, cache without end"
    _name(axes, title, "% of the prompt", "% of the requests, at most so much")
    axes.set(xlim=(0, 100), ylim=(0, 100))


def draw_distances(study: Study, axes: Any) -> None:
    """The share of the reused tokens whose reuse distance is at most x."""
    tokens = study.reuse.tokens
    reached = 100 * np.cumsum(tokens) / max(1.0, float(tokens.sum()))
    axes.plot(study.reuse.edges[1:], reached, color="tab:blue")
    title = "reuse distance: distinct tokens touched in between"
    _name(axes, title, "tokens", "% of the reused tokens, at most so far")
    axes.set(ylim=(0, 100))
    _log_tokens(axes)


def _name(axes: Any, title: str, across: str, up: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(across, fontsize=8)
    axes.set_ylabel(up, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)


def _log_tokens(axes: Any) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: format_tokens(value))
