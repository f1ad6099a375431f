"""The parts of a scheduled replay: settings, the model of a step, the ledger, the result."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from radixserve.checks import check_choice, check_float, check_int
from radixserve.replay.caches import ReplayResult
from radixserve.replay.paths import PathTable
from radixserve.replay.trace import Floats, Trace
from radixserve.schedule import SchedulerOutput

ORDERS = ("lpm", "fcfs", "dfs-weight")


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds of a step: a sum of four terms. A row reads the K/V of its sequence once.

    The defaults are those of a model of 8 billion parameters in bfloat16, with 128 KiB of K/V a
    token, on a GPU that moves 2.6 TB/s and computes 600 TFLOP/s: 16 GB of weights a step and some
    overhead; 16 GFLOP a prefilled token; sampling and bookkeeping of a row; 128 KiB a K/V token.
    """

    fixed_s: float = 0.007
    prefill_token_s: float = 27e-6
    decode_row_s: float = 20e-6
    kv_token_s: float = 50e-9

    def __post_init__(self) -> None:
        for one in fields(self):
            check_float(one.name, getattr(self, one.name), 0.0, 1e6)

    def seconds(self, schedule: SchedulerOutput) -> float:
        return (
            self.fixed_s
            + self.prefill_token_s * schedule.num_prefill_tokens
            + self.decode_row_s * schedule.num_decode_tokens
            + self.kv_token_s * sum(row.end for row in schedule.rows)
        )


@dataclass(frozen=True, slots=True)
class Serving:
    """How requests are served: the scheduler's settings and the model of a step."""

    order: str = "lpm"
    chunked_prefill_size: int = 2048
    max_running_requests: int = 64
    max_overtake: int = 64
    time_scale: float = 1.0  # arrivals are this many times as far apart as recorded
    step: StepModel = field(default_factory=StepModel)

    def __post_init__(self) -> None:
        check_choice("order", self.order, ORDERS)
        check_int("chunked_prefill_size", self.chunked_prefill_size, 1)
        check_int("max_running_requests", self.max_running_requests, 1)
        check_int("max_overtake", self.max_overtake, 0)
        check_float("time_scale", self.time_scale, 0.0, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledResult(ReplayResult):
    """One replay through the scheduler and a cache; times in modelled seconds."""

    serving: Serving
    ttft_s: Floats  # [requests] from being sent to first token; nan for those that do not fit
    computed_tokens: int  # in prefill and decode, of everything
    needed_tokens: int  # tokens computed for the first time
    repeated_tokens: int  # tokens computed again without need
    compute_ratio: float  # (needed + repeated) / needed: see `ComputeLedger`
    max_overtaken: int  # most later requests that were admitted before one
    preemptions: int
    steps: int
    span_s: float  # from the first arrival to the last token

    def ttft_at(self, percentile: float) -> float:
        """nan when nothing was served."""
        return float(np.percentile(self._served_ttft, percentile))

    @property
    def mean_ttft_s(self) -> float:
        """nan when nothing was served."""
        return float(self._served_ttft.mean())

    @property
    def _served_ttft(self) -> Floats:
        """[served requests]; [nan] without any."""
        served = self.ttft_s[~np.isnan(self.ttft_s)]
        return served if len(served) else np.full(1, np.nan)


@dataclass(slots=True)
class _Entry:
    slots: NDArray[np.int32]  # [kept tokens] the number of each of a request's token prefixes
    reached: int = 0  # tokens that the request has computed or found so far


class ComputeLedger:
    """Counts computed tokens: first time, or again without need.

    Tokens are counted by their whole prefix. A token is needed once. Computing it again is
    unavoidable in two cases: the last token of a prompt, which the first output needs, and a
    token that was drawn, since it is unknown before. Any other token computed again is repeated:
    it was dropped meanwhile, or two requests computed it at the same time.

        compute-once ratio = (needed + repeated) / needed, 1.0 at best

    Memory: a byte a distinct token of the trace.
    """

    def __init__(self, trace: Trace, paths: PathTable) -> None:
        self._num_prompt = trace.num_prompt
        self._paths = paths
        assert paths.distinct_tokens < 2**31
        self._first_slot = (np.cumsum(paths.lengths) - paths.lengths).astype(np.int32)  # by segment
        self._is_known = np.zeros(paths.distinct_tokens, np.bool_)
        self._entries: dict[int, _Entry] = {}
        self.computed = 0  # tokens in all rows
        self.needed = 0  # tokens computed for the first time
        self.repeated = 0  # tokens computed again without need

    @property
    def ratio(self) -> float:
        """1.0 when nothing was computed at all."""
        return (self.needed + self.repeated) / self.needed if self.needed else 1.0

    def note(self, request: int, start: int, end: int) -> None:
        """A row has computed the tokens [start, end) of a request. O(end - start)."""
        if request not in self._entries:
            self._entries[request] = self._open(request)
        entry = self._entries[request]
        slots = entry.slots[start:end]
        known = self._is_known[slots]
        num_known = int(np.count_nonzero(known))
        self._is_known[slots] = True
        self.computed += end - start
        self.needed += end - start - num_known
        if num_known:
            first_excused = max(entry.reached, int(self._num_prompt[request]) - 1, start)
            self.repeated += num_known - int(np.count_nonzero(known[first_excused - start :]))
        entry.reached = max(entry.reached, end)

    def close(self, request: int) -> None:
        """The request has ended."""
        self._entries.pop(request, None)

    def _open(self, request: int) -> _Entry:
        path = self._paths.path(request)
        firsts, lengths = self._first_slot[path], self._paths.lengths[path]
        shifts = firsts - (np.cumsum(lengths) - lengths).astype(np.int32)
        slots = np.repeat(shifts, lengths) + np.arange(lengths.sum(), dtype=np.int32)
        return _Entry(slots)
