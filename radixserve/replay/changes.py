"""`find_changes`: where requests part from earlier ones although the same text follows.

    earlier   [ same ][ its own part   ][ the same text ... ]
    request   [ same ][ another part ][ the same text ... ][ new ]
                      ^ position       ^ runs                ^ cut

The tokens of the runs were computed before, but behind other tokens, so no prefix cache has them.
The earlier request is found by `TextIndex`, then both are compared token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray
from radixserve.cache.diagnosis import common_length
from radixserve.replay.fault_kinds import (
    ORDER,
    OTHER,
    Decode,
    Gap,
    is_reordered,
    kind_of,
    kind_of_order,
)
from radixserve.replay.paths import PathTable
from radixserve.replay.text_index import GRAM, TextIndex
from radixserve.replay.trace import Trace, TraceRequest

Places = NDArray[np.intp]

LEAST_MOVED = 0.5  # part of what differs that stands elsewhere, if the order has changed
_MOST_PLACES = 64  # of an equal gram, before and behind the last run, that are tried
LEAST_LOST = 24  # tokens; requests that lose fewer count as losing none
MORE_THAN_OTHER = 2  # times as many tokens are lost as are changed, where no kind is recognised


class Run(NamedTuple):
    """Tokens that a request has in common with an earlier one, behind their parting."""

    start: int
    end: int
    other_start: int  # in the earlier request

    @property
    def other_end(self) -> int:
        return self.other_start + self.end - self.start


class Change(NamedTuple):
    """Where a request parts from an earlier one although the same text follows."""

    request: int
    earlier: int
    position: int  # of the first other token in both
    runs: tuple[Run, ...]  # the same text, in the request's order
    lost: int  # tokens of the runs that were computed again
    kind: str  # see `fault_kinds`
    text: tuple[tuple[int, int], ...]  # the lost grams: spans of their numbers in `TextIndex`

    @property
    def cut(self) -> int:
        """Where the request's own text begins, after the last run."""
        return self.runs[-1].end if self.runs else self.position

    @property
    def earlier_cut(self) -> int:
        return max((run.other_end for run in self.runs), default=self.position)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The request's tokens between position and cut that are in no run, as [start, end)."""
        gaps, start = [], self.position
        for run in self.runs:
            gaps += [(start, run.start)] if run.start > start else []
            start = run.end
        return gaps


def find_changes(trace: Trace, paths: PathTable, decode: Decode | None = None) -> Iterator[Change]:
    """The change of each request that loses LEAST_LOST tokens, and as many as it changes, to one;
    where no kind is recognised, MORE_THAN_OTHER times as many: questions may be alike.

    decode  token ids to text, by which kinds are recognised

    The findings depend on which tokens are equal alone. About 0.3 us and 40 bytes for each distinct
    token of the trace, and 10 ns for each token of the requests that are compared.
    """
    comparison = _Comparison(trace, paths, decode)
    for request in range(len(trace)):
        change = comparison.follow(request)
        if change is not None:
            yield change


class _Comparison:
    """Compares each request with the earlier one that has most of the text that it loses."""

    def __init__(self, trace: Trace, paths: PathTable, decode: Decode | None) -> None:
        self._trace, self._paths, self._decode = trace, paths, decode
        self._index = TextIndex(trace, paths)
        num_places = len(self._index.grams)
        self._latest = np.full(num_places, -1, np.int32)  # by gram: where it was computed last
        self._users = np.full(len(paths.lengths), -1, np.int32)  # by segment: its last request
        self._is_there = np.zeros(num_places, np.bool_)  # by gram; all False between two uses
        self._sessions: dict[str, int] = {}  # the last request of each

    def follow(self, request: int) -> Change | None:
        change = self._compare(request)
        places = self._index.own_places(request)
        self._latest[self._index.grams[places]] = np.arange(places.start, places.stop)
        self._users[self._paths.path(request)] = request
        session = self._trace.sessions[request]
        if session is not None:
            self._sessions[session] = request
        return change

    def _compare(self, request: int) -> Change | None:
        known, usable = int(self._paths.reusable[request]), int(self._trace.num_prompt[request]) - 1
        own = self._index.own_places(request)
        grams = self._index.grams[own.start + GRAM - 1 : own.start + usable - known]
        places = self._latest[grams]
        lost_grams, places = grams[places >= 0], places[places >= 0]
        if len(lost_grams) <= LEAST_LOST - GRAM:
            return None
        earlier = self._find_earlier(request, lost_grams, self._index.segments[places])
        asked, before = self._trace.request(request), self._trace.request(earlier)
        position = common_length(asked.prompt, before.kept)
        runs = self._runs(asked, before, position)
        if not runs:
            return None
        kind, runs = self._kind(asked, before, position, runs)
        lost = sum(max(0, min(run.end, usable) - max(run.start, known)) for run in runs)
        num_changed = runs[-1].end - position - sum(map(_size, runs))
        if lost < max(LEAST_LOST, num_changed * (MORE_THAN_OTHER if kind == OTHER else 1)):
            return None
        return Change(request, earlier, position, tuple(runs), lost, kind, _spans(lost_grams))

    def _find_earlier(self, request: int, grams: IntArray, segments: IntArray) -> int:
        """The earlier request with most of these grams: the session's last one, that which has the
        last gram, or the one which most grams had last. `segments`: where each was last."""
        users = self._users[segments]
        session = self._trace.sessions[request]
        candidates = [-1 if session is None else self._sessions.get(session, -1)]
        candidates += [int(users[-1]), int(np.bincount(users).argmax())]
        sizes = {}
        for user in candidates:
            if user >= 0:
                theirs = self._index.grams_of(user)
                self._is_there[theirs] = True
                sizes[user] = int(np.count_nonzero(self._is_there[grams]))
                self._is_there[theirs] = False
        return max(sizes, key=lambda user: sizes[user])

    def _runs(self, request: TraceRequest, before: TraceRequest, position: int) -> list[Run]:
        """The equal text of both behind `position`: from the left, each run as long as it can be.
        Each text of the earlier request counts once."""
        prompt, other = request.prompt, before.kept
        theirs = self._index.grams_of(before.index)[GRAM - 1 :]  # by first token
        ours = self._index.grams_of(request.index)[GRAM - 1 : len(prompt)]
        order = np.argsort(theirs, kind="stable")
        lows, highs = (np.searchsorted(theirs[order], ours, side) for side in ("left", "right"))
        starts = np.flatnonzero(highs[position:] > lows[position:]) + position
        is_used = np.zeros(len(other) + 1, np.bool_)
        is_used[:position], is_used[-1] = True, True
        runs: list[Run] = []

        def run_at(start: int) -> Run:
            places = _near(order[lows[start] : highs[start]], runs[-1].other_end if runs else 0)
            place = _longest(ours[start:], theirs, places[~is_used[places]])
            size = 0 if place < 0 else common_length(prompt[start:], other[place:])
            size = min(size, int(is_used[place:].argmax())) if size else 0
            return Run(start, start + size, place)

        at = 0
        while at < len(starts):
            first = int(starts[at])
            until = int(np.searchsorted(starts, first + GRAM))
            # Its first tokens may be of what has changed, and the text begins behind them.
            best = max((run_at(start) for start in starts[at:until].tolist()), key=_size)
            if _size(best) < GRAM:
                at = until
                continue
            runs.append(best)
            is_used[best.other_start : best.other_end] = True
            at = int(np.searchsorted(starts, best.end))
        return runs

    def _kind(
        self, request: TraceRequest, before: TraceRequest, position: int, runs: list[Run]
    ) -> tuple[str, list[Run]]:
        """The kind of the first change, and the runs up to one of another kind."""
        other, num_prompt = before.kept, len(before.prompt)
        ordered = _in_order(runs)
        num_ordered, num_found = sum(map(_size, ordered)), sum(map(_size, runs))
        num_moved, num_other = num_found - num_ordered, runs[-1].end - position - num_ordered
        if num_moved > max(LEAST_LOST, LEAST_MOVED * num_other):
            moved = [(run.start, run.other_start, run.other_end) for run in runs]
            return kind_of_order(moved, position, num_prompt), runs
        runs = ordered
        spans = (position, runs[-1].start), (position, runs[-1].other_start)
        if is_reordered(Gap.between(request.prompt, other, *spans), self._decode):
            return ORDER, runs
        is_session = request.session is None or request.session == before.session
        # A conversation that goes on has the earlier answer; two alike questions have not.
        is_history = is_session and any(run.other_end > num_prompt for run in runs)
        first, start, other_start = "", position, position
        for number, run in enumerate(runs):
            gap = Gap.between(
                request.prompt, other, (start, run.start), (other_start, run.other_start)
            )
            in_answer = other_start >= num_prompt - 1
            kind = kind_of(gap, self._decode, in_answer=in_answer, is_history=is_history)
            if number and kind != first:
                return first, runs[:number]
            first, start, other_start = kind, run.end, run.other_end
        return first, runs


def _near(places: Places, end: int) -> Places:
    """Those of ascending places that follow `end`, then those before: _MOST_PLACES of each."""
    at = int(np.searchsorted(places, end))
    return np.concatenate((places[at : at + _MOST_PLACES], places[max(0, at - _MOST_PLACES) : at]))


def _longest(ours: IntArray, theirs: IntArray, places: Places) -> int:
    """The place from which most grams are `ours`; -1 for none. The first one of several."""
    step = GRAM
    while len(places) > 1 and step < len(ours):
        inside = places[places + step < len(theirs)]
        same = inside[theirs[inside + step] == ours[step]]
        if not len(same):
            break
        places, step = same, step + GRAM
    return int(places[0]) if len(places) else -1


def _spans(grams: IntArray) -> tuple[tuple[int, int], ...]:
    """Numbers as spans [start, end), in order."""
    numbers = np.unique(grams)
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    first, last = numbers[np.r_[0, cuts]], numbers[np.r_[cuts - 1, -1]]
    return tuple(zip(first.tolist(), (last + 1).tolist(), strict=True))


def _size(run: Run) -> int:
    return run.end - run.start


def _in_order(runs: list[Run]) -> list[Run]:
    """The runs that follow each other in both requests, with the most tokens. O(runs squared), with
    few operations of Python for each."""
    sizes, starts, ends = np.asarray([(_size(r), r.other_start, r.other_end) for r in runs]).T
    best, before = sizes.copy(), np.full(len(runs), -1)  # of sequences that end with each run
    for place in range(1, len(runs)):
        sums = np.where(ends[:place] <= starts[place], best[:place], 0)
        last = int(sums.argmax())
        if sums[last]:
            best[place] += sums[last]
            before[place] = last
    place = int(best.argmax())
    kept: list[Run] = []
    while place >= 0:
        kept.append(runs[place])
        place = int(before[place])
    return kept[::-1]
