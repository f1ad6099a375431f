"""`find_changes`: where requests part from earlier ones although the same text follows.

    earlier   [ same ][ its own part   ][ the same text ... ]
    request   [ same ][ another part ][ the same text ... ][ new ]
                      ^ position       ^ runs                ^ cut

The tokens of the runs were computed before, but behind other tokens, so no prefix cache has them.
The earlier request is found by the hashes of chunks that are cut by their content
(`radixserve.advice.fingerprints`), then both are compared token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from radixserve.advice.fingerprints import Chunks, Fingerprints, UInts, namespace_salt
from radixserve.arrays import IntArray
from radixserve.cache.diagnosis import common_length
from radixserve.replay.fault_kinds import Decode, Gap, kind_of, kind_of_order
from radixserve.replay.paths import PathTable
from radixserve.replay.trace import Trace, TraceRequest

LEAST_MOVED = 0.5  # part of what differs that stands elsewhere, if the order has changed
_CHUNK_TOKENS = 8
_LEAST_RUN = 8  # tokens; shorter equal texts are chance
_MOST_PLACES = 8  # of an equal chunk that are tried
LEAST_LOST = 24  # tokens; requests that lose fewer count as losing none


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
    chunks: tuple[int, ...]  # ids of the lost chunks

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
    """The change of each request that loses LEAST_LOST tokens, and as many as it changes, to one.

    decode  token ids to text, by which kinds are recognised

    About 0.1 us per token of the trace, and 16 bytes for each 8 of them.
    """
    comparison = _Comparison(trace, paths, decode)
    for request in trace:
        change = comparison.follow(request)
        if change is not None:
            yield change


class _Comparison:
    """Compares each request with the earlier one that has most of the text that it loses."""

    def __init__(self, trace: Trace, paths: PathTable, decode: Decode | None) -> None:
        self._trace, self._paths, self._decode = trace, paths, decode
        self._prints = Fingerprints(_CHUNK_TOKENS)
        self._chunks: list[Chunks] = []  # by request
        self._users: dict[int, int] = {}  # by chunk: the last request that has it
        self._sessions: dict[str, int] = {}  # the last request of each

    def follow(self, request: TraceRequest) -> Change | None:
        chunks = self._prints.chunks(request.kept, namespace_salt(request.namespace))
        change = self._compare(request, chunks)
        self._chunks.append(chunks)
        self._users.update(dict.fromkeys(chunks.ids.tolist(), request.index))
        if request.session is not None:
            self._sessions[request.session] = request.index
        return change

    def _compare(self, request: TraceRequest, chunks: Chunks) -> Change | None:
        known, usable = int(self._paths.reusable[request.index]), len(request.prompt) - 1
        low, high = np.searchsorted(chunks.ends, [known, usable], "right")
        ids = chunks.ids[low + 1 : high]  # whole chunks behind what is reused
        lengths = np.diff(chunks.ends[low:high])
        users = [self._users.get(chunk, -1) for chunk in ids.tolist()]
        is_lost = np.asarray(users, np.int64) >= 0
        if not is_lost.any():
            return None
        earlier = self._find_earlier(request, ids[is_lost], lengths[is_lost], users)
        before = self._trace.request(earlier)
        position = common_length(request.prompt, before.kept)
        runs = self._runs(request.prompt, before.kept, chunks, earlier, position)
        if not runs:
            return None
        kind, runs = self._kind(request, before, position, runs)
        lost = sum(max(0, min(run.end, usable) - max(run.start, known)) for run in runs)
        num_changed = runs[-1].end - position - sum(run.end - run.start for run in runs)
        if lost < max(LEAST_LOST, num_changed):
            return None
        lost_ids = tuple(ids[is_lost].tolist())
        return Change(request.index, earlier, position, tuple(runs), lost, kind, lost_ids)

    def _find_earlier(
        self, request: TraceRequest, ids: UInts, lengths: IntArray, users: list[int]
    ) -> int:
        """The earlier request with most of these chunks: the session's last one, that which has the
        last chunk, or the one which most chunks had last."""
        known = [user for user in users if user >= 0]
        candidates = [self._sessions.get(request.session or "", -1), known[-1]]
        candidates.append(int(np.bincount(known).argmax()))
        sizes = {
            user: int(lengths[np.isin(ids, self._chunks[user].ids)].sum())
            for user in candidates
            if user >= 0
        }
        return max(sizes, key=lambda user: sizes[user])

    def _runs(
        self, prompt: IntArray, other: IntArray, chunks: Chunks, earlier: int, position: int
    ) -> list[Run]:
        """The equal text of both behind `position`, each run as long as it can be."""
        ends, ids = chunks
        other_ends, other_ids = self._chunks[earlier]
        starts = np.concatenate((np.zeros(1, np.intp), ends))[: len(ends)]
        is_candidate = (starts >= position) & (ends <= len(prompt)) & np.isin(ids, other_ids)
        runs: list[Run] = []
        for index in np.flatnonzero(is_candidate).tolist():
            start, end = int(starts[index]), int(ends[index])
            if runs and start < runs[-1].end:
                continue
            places = other_ends[other_ids == ids[index]] - (end - start)
            for run in (Run(0, position, 0), *runs):  # each text of the other one counts once
                places = places[(places < run.other_start) | (places >= run.other_end)]
            places = places[:_MOST_PLACES]
            low = runs[-1].end if runs else position
            found = [_run_at(prompt, other, start, int(place), low, position) for place in places]
            best = max(found, key=_size, default=None)
            if best is not None and _size(best) >= _LEAST_RUN:
                runs.append(best)
        return runs

    def _kind(
        self, request: TraceRequest, before: TraceRequest, position: int, runs: list[Run]
    ) -> tuple[str, list[Run]]:
        """The kind of the first change, and the runs up to one of another kind."""
        other, num_prompt = before.kept, len(before.prompt)
        ordered = _in_order(runs)
        num_ordered, num_found = sum(map(_size, ordered)), sum(map(_size, runs))
        if num_found - num_ordered > LEAST_MOVED * (runs[-1].end - position - num_ordered):
            moved = [(run.start, run.other_start, run.other_end) for run in runs]
            return kind_of_order(moved, position, num_prompt), runs
        runs = ordered
        kinds = []
        is_session = request.session is None or request.session == before.session
        # A conversation that goes on has the earlier answer; two alike questions have not.
        is_history = is_session and any(run.other_end > num_prompt for run in runs)
        start, other_start = position, position
        for run in runs:
            gap = Gap.between(
                request.prompt, other, (start, run.start), (other_start, run.other_start)
            )
            in_answer = other_start >= num_prompt - 1
            kinds.append(kind_of(gap, self._decode, in_answer=in_answer, is_history=is_history))
            start, other_start = run.end, run.other_end
        same = next((n for n, kind in enumerate(kinds) if kind != kinds[0]), len(kinds))
        return kinds[0], runs[:same]


def _run_at(
    prompt: IntArray, other: IntArray, start: int, place: int, low: int, other_low: int
) -> Run:
    """The longest run that has `start` of the prompt at `place` of the other request; it begins
    from `low` and `other_low` on."""
    room = min(start - low, place - other_low)
    back = common_length(prompt[start - room : start][::-1], other[place - room : place][::-1])
    return Run(start - back, start + common_length(prompt[start:], other[place:]), place - back)


def _size(run: Run) -> int:
    return run.end - run.start


def _in_order(runs: list[Run]) -> list[Run]:
    """The runs that follow each other in both requests, with the most tokens. O(runs squared)."""
    best: list[tuple[int, int]] = []  # for each run as the last one: tokens, the run before
    for place, run in enumerate(runs):
        before = [n for n in range(place) if runs[n].other_end <= run.other_start]
        last = max(before, key=lambda n: best[n][0], default=-1)
        best.append((_size(run) + (best[last][0] if last >= 0 else 0), last))
    place = max(range(len(runs)), key=lambda n: best[n][0])
    kept: list[Run] = []
    while place >= 0:
        kept.append(runs[place])
        place = best[place][1]
    return kept[::-1]
