"""The targets of the figures, and the verdicts of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cache.timing import Figure


@dataclass(frozen=True)
class Target:
    """`key` of each contender in `who` is at most `at_most` of its unit or, with `peer`, of that
    contender's figure or, with `base`, of its own figure for that key."""

    key: str
    at_most: float
    peer: str = ""
    base: str = ""
    who: tuple[str, ...] = ("radix",)


_RUST = "sglang-rust"
_PAGES = ("page 16", "page 64", "page 256")
TARGETS = (
    Target("A.lookup", 1 / 6, _RUST),
    Target("A.take", 1 / 6, _RUST),
    Target("B.lookup", 1 / 2.5, _RUST),
    Target("B.take", 1 / 2.5, _RUST),
    Target("C.request", 1 / 10, _RUST),
    Target("D.request", 1 / 10, _RUST),
    *(Target(f"E.page.{leaves}", 8.0) for leaves in (1_000, 10_000, 100_000, 1_000_000)),
    Target("E.page.1000000", 1.5, base="E.page.1000"),
    Target("E.1000.10000", 1 / 20, _RUST),
    Target("E.1000.100000", 1 / 20, _RUST),
    Target("F.chat.token", 12.0),
    *(
        Target(f"G.{key}", 2.0, who=_PAGES)
        for key in ("A.lookup", "A.take", "B.lookup", "B.take", "C.request", "D.request")
    ),
    *(Target(f"G.E.{tokens}.10000", 2.0, who=_PAGES) for tokens in (256, 1024)),
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
    """A target and the figure that is held against it."""

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
        value = self.measured
        text = f"1/{1 / value:.3g}" if 0 < value < 1 else f"{value:,.4g}"
        return f"{word}: {text} ({self.goal})"


def judge(figures: Iterable[Figure]) -> list[Verdict]:
    """A verdict for every target whose figures are there."""
    found = {(figure.key, figure.contender): figure for figure in figures}
    verdicts = []
    for target in TARGETS:
        for who in target.who:
            mine = found.get((target.key, who))
            if mine is None:
                continue
            base, goal = 1.0, f"<= {target.at_most:g} {mine.unit}"
            if target.base or target.peer:
                other = found.get((target.base or target.key, target.peer or who))
                base = 0.0 if other is None else other.value
                goal = f"<= {target.at_most:g} x {target.base}"
            if target.peer:
                goal = f"<= 1/{1 / target.at_most:g} of {target.peer}"
            if base:
                measured = mine.value / base
                verdicts.append(Verdict(target.key, who, goal, measured, target.at_most))
    return verdicts


def describe(key: str, verdicts: Iterable[Verdict]) -> str:
    """The verdicts on a key in words; of several contenders with one goal, the worst one's."""
    worst: dict[str, Verdict] = {}
    for verdict in verdicts:
        other = worst.get(verdict.goal)
        if verdict.key == key and (other is None or verdict.measured > other.measured):
            worst[verdict.goal] = verdict
    return "; ".join(map(str, worst.values()))
