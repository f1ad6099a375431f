"""`find_faults`: what makes prompts part although the same text follows; what mending it brings.

Equal changes (`changes.py`) are one fault. What mending brings is predicted from the changes and
proven: the prompts are rewritten as if it had not been made, and replayed with an unlimited cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radixserve.arrays import IntArray
from radixserve.replay.changes import Change, find_changes
from radixserve.replay.fault_kinds import HISTORIES, KEPT_AT_THE_END, MENDS, PAGE, Decode
from radixserve.replay.partings import Parting, find_partings
from radixserve.replay.paths import PathTable, build_paths
from radixserve.replay.report import Finding
from radixserve.replay.trace import HashTokens, Ints, PackedTokens, Trace, TraceRequest

LEAST_SHARE = 0.01  # of the computed tokens, that a fault loses, or it is not told
LEAST_GAIN = 0.01  # of hit rate, that mending brings, or the fault is not told
_LEAST_CHANGES = 3  # that lose the same text; fewer are joined to one fault of a kind
_SHOWN, _BEFORE = 24, 8  # tokens of a change that are shown, and in front of it


@dataclass(slots=True)
class Fault:
    """Changes of one kind in front of the same text, or at various places. Counts are prompt
    tokens."""

    kind: str  # see `fault_kinds.MENDS`
    changes: list[Change] = field(default_factory=list)
    lost: int = 0
    expected: str | None = None  # an example: the earlier text, and that in its place
    found: str | None = None
    predicted_rate: float = 0.0  # hit rate of an unlimited cache once this alone is mended
    mended_rate: float = 0.0  # the same, by a replay of the rewritten trace

    @property
    def num_requests(self) -> int:
        return len(self.changes)

    @property
    def positions(self) -> list[tuple[int, int]]:
        """The positions where prompts part, and how often; the most frequent first."""
        return Counter(change.position for change in self.changes).most_common()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The faults of a trace by the tokens lost; of hashed traces only where prompts part."""

    trace: Trace
    page_size: int
    prompt_tokens: int
    reused_tokens: int  # by an unlimited cache with these pages
    faults: list[Fault]
    partings: list[Parting]

    @property
    def hit_rate(self) -> float:
        return self.reused_tokens / self.prompt_tokens

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.reused_tokens


def find_faults(
    trace: Trace,
    paths: PathTable | None = None,
    decode: Decode | None = None,
    *,
    page_size: int = 1,
) -> Diagnosis:
    """The faults of a trace that lose LEAST_SHARE of the computed tokens, by the tokens lost; those
    alone that three requests have, and whose mending raises the hit rate by LEAST_GAIN in a replay.

    decode     token ids to text, by which kinds are recognised and examples shown
    page_size  of a cache that matches whole pages only; what its pages lose is a fault, too

    O(tokens of the trace), and for each fault once more. A trace of block hashes has no text that
    could follow: only where its prompts part is told.
    """
    paths = build_paths(trace) if paths is None else paths
    reused = _whole(paths.reusable, page_size)
    total, prompted = int(reused.sum()), trace.prompt_tokens
    partings: list[Parting] = []
    faults: list[Fault] = []
    if isinstance(trace.source, HashTokens):
        partings = find_partings(trace, paths)
    else:
        faults = group(find_changes(trace, paths, decode))
    if page_size > 1:
        lost = paths.reusable_tokens - total
        rate = paths.reusable_tokens / prompted
        faults.append(Fault(PAGE, lost=lost, predicted_rate=rate, mended_rate=rate))
    least = max(1.0, LEAST_SHARE * (prompted - total))
    faults = [
        one for one in faults if one.lost >= least and (one.kind == PAGE or one.num_requests > 2)
    ]
    faults.sort(key=lambda one: -one.lost)
    for fault in faults:
        if fault.kind != PAGE:
            _show(trace, fault, decode)
            fault.predicted_rate = _predict(trace, paths, fault, page_size)
            mended = mend(trace, paths, fault)
            hits = _whole(build_paths(mended).reusable, page_size).sum()
            fault.mended_rate = int(hits) / mended.prompt_tokens
    faults = [one for one in faults if one.mended_rate >= total / prompted + LEAST_GAIN]
    return Diagnosis(trace, page_size, prompted, total, faults, partings)


def _whole(reusable: Ints, page_size: int) -> Ints:
    return reusable - reusable % page_size


def group(changes: Iterable[Change]) -> list[Fault]:
    """Join changes of one kind that lose the same text. Those that lose a text of their own are one
    fault, or belong to the first of their kind."""
    kinds: dict[str, list[Change]] = {}
    for change in changes:
        kinds.setdefault(change.kind, []).append(change)
    faults = []
    for kind, same_kind in kinds.items():
        groups = [same_kind] if kind in HISTORIES else _by_text(same_kind)
        faults += [Fault(kind, same, sum(change.lost for change in same)) for same in groups]
    return faults


def _by_text(changes: list[Change]) -> list[list[Change]]:
    """Changes that lose the same text, or begin where one of these does. Those that lose a text of
    their own are one group, or belong to the first one."""
    groups: list[Ints] = []
    owners = np.repeat(np.arange(len(changes)), [len(change.text) for change in changes])
    starts, ends = np.asarray([span for change in changes for span in change.text]).T
    positions = np.asarray([change.position for change in changes])
    is_left = np.ones(len(changes), np.bool_)
    while is_left.any():
        rows = is_left[owners]
        firsts, lasts = np.sort(starts[rows]), np.sort(ends[rows])
        counts = np.arange(1, len(firsts) + 1) - np.searchsorted(lasts, firsts, "right")
        most = int(counts.argmax())
        if counts[most] < _LEAST_CHANGES:
            left = np.flatnonzero(is_left)
            groups = [np.sort(np.r_[groups[0], left]), *groups[1:]] if groups else [left]
            break
        has_it = rows & (starts <= firsts[most]) & (ends > firsts[most])
        taken = np.flatnonzero(is_left & np.isin(positions, positions[owners[has_it]]))
        groups.append(taken)
        is_left[taken] = False
    return [[changes[place] for place in places.tolist()] for places in groups]


def _show(trace: Trace, fault: Fault, decode: Decode | None) -> None:
    """Fill in the example: the change that loses most."""
    if decode is None:
        return
    change = max(fault.changes, key=lambda one: one.lost)
    first, start = change.runs[0], change.position
    sides = (
        (trace.request(change.earlier).kept, first.other_start),
        (trace.request(change.request).prompt, first.start),
    )
    fault.expected, fault.found = (
        decode(tokens[max(0, start - _BEFORE) : min(max(end, start + 4), start + _SHOWN)].tolist())
        for tokens, end in sides
    )


def _predict(trace: Trace, paths: PathTable, fault: Fault, page_size: int) -> float:
    """The hit rate of an unlimited cache if a fault were mended, from the changes alone."""
    reused, num_prompt = paths.reusable.copy(), trace.num_prompt.copy()
    more: dict[int, int] = {}  # by request: tokens by which its beginning is longer when mended
    for change in rewritten(paths, fault):
        if fault.kind not in KEPT_AT_THE_END:
            grown = change.earlier_cut - change.cut + more.get(change.earlier, 0)
            more[change.request] = grown
            end = min(change.cut, int(num_prompt[change.request]) - 1)
            num_prompt[change.request] += grown
            reused[change.request] = max(reused[change.request], end) + grown
        else:
            reused[change.request] += change.lost
    return float(_whole(reused, page_size).sum() / num_prompt.sum())


# -- mending --------------------------------------------------------------------------------------


def rewritten(paths: PathTable, fault: Fault) -> list[Change]:
    """The changes of a fault, and for each request that goes on where one of these did a change of
    no token: it begins like that one, mended. In order of the requests."""
    first_user = paths.first_users()
    changes = {change.request: change for change in fault.changes}
    for request in range(len(paths)):
        path = paths.path(request)[: paths.num_usable[request]]
        known = path[first_user[path] < request]
        if request not in changes and len(known):
            earlier, position = int(first_user[known[-1]]), int(paths.reusable[request])
            if earlier in changes:
                changes[request] = Change(request, earlier, position, (), 0, fault.kind, ())
    return [changes[request] for request in sorted(changes)]


def mend(trace: Trace, paths: PathTable, fault: Fault) -> Trace:
    """The trace as if a fault had not been made: a request begins as the earlier one did, as far as
    the same text follows. What a request says of its own there comes at its prompt's end, if it is
    one of KEPT_AT_THE_END; else it is left out."""
    mender = _Mender(rewritten(paths, fault), is_moved=fault.kind in KEPT_AT_THE_END)
    lengths = [mender.add(request) for request in trace]
    num_prompt, num_output = np.asarray(lengths, np.int64).T
    return Trace(
        name=f"{trace.name}, mended",
        source=mender.packed,
        times=trace.times,
        sessions=trace.sessions,
        namespaces=trace.namespaces,
        num_prompt=num_prompt,
        num_output=num_output,
        has_times=trace.has_times,
        sessions_inferred=trace.sessions_inferred,
    )


class _Mender:
    """Rewrites requests, in order. `_places` of a request are the new positions of its tokens."""

    def __init__(self, changes: list[Change], *, is_moved: bool) -> None:
        self.packed = PackedTokens()
        self._is_moved = is_moved
        self._changes = {change.request: change for change in changes}
        self._num_uses = Counter(change.earlier for change in changes)
        self._places: dict[int, IntArray] = {}  # of requests that later ones begin like
        self._own: dict[int, tuple[int, int]] = {}  # of unchanged ones: what is moved to the end
        for change in changes if is_moved else ():
            if change.earlier not in self._changes:
                span = change.position, change.runs[0].other_start
                low, high = self._own.get(change.earlier, span)
                self._own[change.earlier] = min(low, span[0]), max(high, span[1])

    def add(self, request: TraceRequest) -> tuple[int, int]:
        change = self._changes.get(request.index)
        size = len(request.prompt)
        if change is not None:
            prompt, places = self._follow(request, change)
        elif request.index in self._own:
            low, high = self._own[request.index]
            high = min(high, size)
            order = np.r_[0:low, high:size, low:high].astype(np.int32)
            prompt = request.prompt[order]
            places = np.empty(len(order), np.int32)
            places[order] = np.arange(len(order), dtype=np.int32)
        else:
            prompt, places = request.prompt, np.arange(size, dtype=np.int32)
        if self._num_uses[request.index]:
            answer = np.arange(len(request.kept) - size, dtype=np.int32) + len(prompt)
            self._places[request.index] = np.concatenate((places, answer))
        return self.packed.add(prompt, request.output)

    def _follow(self, request: TraceRequest, change: Change) -> tuple[IntArray, IntArray]:
        """The prompt of a request that begins like the earlier one, and its tokens' places."""
        before = self._places[change.earlier]
        self._num_uses[change.earlier] -= 1
        if not self._num_uses[change.earlier]:
            del self._places[change.earlier]
        num_head = int(before[change.earlier_cut - 1]) + 1
        head = np.concatenate(self.packed.tokens(change.earlier))[:num_head]
        rest = request.prompt[change.cut :]
        places = np.full(len(request.prompt), num_head, np.int32)
        places[: change.position] = before[: change.position]
        for run in change.runs:
            places[run.start : run.end] = before[run.other_start : run.other_end]
        places[change.cut :] = num_head + np.arange(len(rest), dtype=np.int32)
        late = [np.flatnonzero(places[: change.position] >= num_head)]
        late += [np.arange(*gap) for gap in change.gaps] if self._is_moved else []
        order = np.concatenate(late)
        places[order] = num_head + len(rest) + np.arange(len(order), dtype=np.int32)
        return np.concatenate((head, rest, request.prompt[order])), places


# -- as a document, as lines ----------------------------------------------------------------------


def diagnosis_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """A diagnosis as JSON. Counts are prompt tokens, rates of an unlimited cache, 0.0 to 1.0."""
    return {
        "trace": diagnosis.trace.name,
        "requests": len(diagnosis.trace),
        "page_size": diagnosis.page_size,
        "prompt_tokens": diagnosis.prompt_tokens,
        "computed_tokens": diagnosis.computed_tokens,
        "hit_rate": diagnosis.hit_rate,
        "faults": [_fault_document(fault, diagnosis) for fault in diagnosis.faults],
        "partings": [parting._asdict() for parting in diagnosis.partings],
    }


def _fault_document(fault: Fault, diagnosis: Diagnosis) -> dict[str, Any]:
    positions = fault.positions
    return {
        "kind": fault.kind,
        "lost_tokens": fault.lost,
        "share_of_computed": fault.lost / max(1, diagnosis.computed_tokens),
        "requests": fault.num_requests,
        "position": positions[0][0] if positions else None,
        "positions": len(positions),
        "expected": fault.expected,
        "found": fault.found,
        "mend": MENDS[fault.kind],
        "predicted_hit_rate": fault.predicted_rate,
        "mended_hit_rate": fault.mended_rate,
    }


def diagnosis_findings(document: dict[str, Any]) -> list[Finding]:
    """What a diagnosis's document says: a table of the faults with a line for each, and where the
    prompts of a hashed trace part."""
    heads = [
        "fault",
        "at token",
        "requests",
        "lost tokens",
        "share %",
        "mended %",
        "replayed %",
    ]
    rows, lines = [], [f"now: hits {100 * document['hit_rate']:.2f} %"]
    for number, fault in enumerate(document["faults"], 1):
        place = "" if fault["position"] is None else f"{fault['position']:,}"
        others = fault["positions"] - 1
        rows.append(
            (
                f"{number} {fault['kind']}",
                place + (f" and {others:,} other{'s' * (others > 1)}" if others > 0 else ""),
                f"{fault['requests']:,}" if fault["requests"] else "",
                f"{fault['lost_tokens']:,}",
                f"{100 * fault['share_of_computed']:.1f}",
                f"{100 * fault['predicted_hit_rate']:.2f}",
                f"{100 * fault['mended_hit_rate']:.2f}",
            )
        )
        text = f"{number}: {fault['mend']}"
        if fault["expected"] is not None:
            text += f"; expected {fault['expected']!r}, found {fault['found']!r}"
        lines.append(text)
    if not rows:
        lines.append("no change makes prompts part in front of text that was computed before")
    title = f"{document['trace']}: why prompts part, with an unlimited cache"
    findings = [Finding(title, heads, rows, lines)]
    if document["partings"]:
        findings = [_parting_finding(document)]
    return findings


def _parting_finding(document: dict[str, Any]) -> Finding:
    heads = ["at token", "requests", "tokens behind", "of computed %"]
    rows = [
        (
            "various" if row["position"] is None else f"{row['position']:,}",
            f"{row['requests']:,}",
            f"{row['tokens']:,}",
            f"{100 * row['tokens'] / max(1, document['computed_tokens']):.1f}",
        )
        for row in document["partings"]
    ]
    lines = ["hashes do not show whether the same text follows"]
    return Finding(f"{document['trace']}: where prompts part", heads, rows, lines)
