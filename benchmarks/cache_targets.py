"""What the figures are held against: the targets, and the verdicts on a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stopwatch import Figure

REFERENCE = "reference"  # the key of the plain numpy comparison that each run measures
_REFERENCE_ELSEWHERE = 2.8  # its microseconds where the figures `elsewhere` below were taken


@dataclass(frozen=True)
class Target:
    """`key` of each contender in `who` is at most `at_most` of its unit or, with `peer`, of that
    peer's figure or, with `base`, of its own figure for that key.

    elsewhere: the peer's microseconds on another machine, for runs without it; they are scaled by
    the ratio of the numpy references.
    """

    key: str
    at_most: float
    peer: str = ""
    elsewhere: float = 0.0
    base: str = ""
    who: tuple[str, ...] = ("radix",)


_RUST = "sglang-rust"
_PAGES = ("page 16", "page 64", "page 256")
TARGETS = (
    Target("A.lookup", 1 / 6, _RUST),
    Target("A.take", 1 / 6, _RUST, 8.2),
    Target("B.lookup", 1 / 2.5, _RUST),
    Target("B.take", 1 / 2.5, _RUST, 17.0),
    Target("C.request", 1 / 10, _RUST, 120.0),
    Target("D.request", 1 / 10, _RUST, 187.0),  # 165 to 209
    *(Target(f"E.page.{leaves}", 8.0) for leaves in (1_000, 10_000, 100_000, 1_000_000)),
    Target("E.page.1000000", 1.5, base="E.page.1000"),
    Target("E.1000.10000", 1 / 20, _RUST, 3_100.0),
    Target("E.1000.100000", 1 / 20, _RUST),
    Target("F.chat.token", 12.0),
    Target("G.A.lookup", 2.0, who=_PAGES),
    Target("G.A.take", 2.0, who=_PAGES),
    Target("G.B.lookup", 2.0, who=_PAGES),
    Target("G.B.take", 2.0, who=_PAGES),
    Target("G.C.request", 2.0, who=_PAGES),
    Target("G.D.request", 2.0, who=_PAGES),
    *(Target(f"G.E.{tokens}.{n}", 2.0, who=_PAGES) for tokens in (256, 1024) for n in (10_000,)),
    Target("H.lookup", 80.0),
    *(Target(f"I.same.{n}", most) for n, most in ((128, 300.0), (2_000, 4_000.0))),
    *(
        Target(f"I.{change}.{n}", most)
        for change in ("commit", "evict", "arrival")
        for n, most in ((128, 600.0), (2_000, 8_000.0))
    ),
)


@dataclass(frozen=True)
class Verdict:
    """A target and what the run has to say about it."""

    key: str
    contender: str
    goal: str  # "<= 1/6 of sglang-rust"
    measured: float  # in the same terms as `at_most`
    at_most: float

    @property
    def is_reached(self) -> bool:
        return self.measured <= self.at_most

    def __str__(self) -> str:
        word = "reached" if self.is_reached else "missed"
        return f"{word}: {_short(self.measured)} ({self.goal})"


def judge(figures: Iterable[Figure], *, is_quick: bool) -> list[Verdict]:
    """A verdict for every target whose figures are there. The figures taken elsewhere are of full
    sizes: a quick run is not held against them."""
    values = {(figure.key, figure.contender): figure.value for figure in figures}
    units = {figure.key: figure.unit for figure in figures}
    verdicts = []
    for target in TARGETS:
        for who in target.who:
            value = values.get((target.key, who))
            base, goal = _base(target, who, values, units.get(target.key, ""))
            if value is not None and base and not (is_quick and "elsewhere" in goal):
                ratio = value / base
                verdicts.append(Verdict(target.key, who, goal, ratio, target.at_most))
    return verdicts


def _base(
    target: Target, who: str, values: dict[tuple[str, str], float], unit: str
) -> tuple[float, str]:
    """What the figure is divided by, 0 if that is not known, and the goal in words."""
    if target.base:
        return values.get((target.base, who), 0.0), f"<= {target.at_most:g} x {target.base}"
    if not target.peer:
        return 1.0, f"<= {target.at_most:g} {unit}"
    goal = f"<= 1/{1 / target.at_most:g} of {target.peer}"
    measured = values.get((target.key, target.peer))
    if measured:
        return measured, goal
    scale = values.get((REFERENCE, "numpy"), 0.0) / _REFERENCE_ELSEWHERE
    return target.elsewhere * scale, f"{goal}, measured elsewhere and scaled"


def _short(value: float) -> str:
    return f"1/{1 / value:.3g}" if 0 < value < 1 else f"{value:,.4g}"
