"""`OpenRequests`: an extension of the scheduler for open requests when the weights change."""

from __future__ import annotations

import math

from radixserve.completion import WeightEpoch
from radixserve.scheduler.extension import SchedulerExtension, SchedulerParts
from radixserve.scheduler.request_state import RequestState


class OpenRequests(SchedulerExtension):
    """Notes which weights sampled which tokens, see `WeightEpoch`."""

    def __init__(self) -> None:
        self.epoch = 0
        self._kv: dict[int, str] = {}  # by arrival, of requests that were open at an update

    def attach(self, parts: SchedulerParts) -> None:
        self._parts = parts

    def begin_epoch(self, epoch: int, *, keeps_kv: bool) -> None:
        """The weights have changed, and the cache has begun the epoch; no step is in flight. Open
        requests continue from their tokens: their K/V is computed again, or with `keeps_kv` stays
        as it is where it can: not that of beams, nor beside recurrent or windowed layers."""
        parts, before = self._parts, self.epoch
        self.epoch, states = epoch, list(parts.requests.values())
        arrivals = {state.arrival for state in states}  # beams end without `on_end`
        self._kv = {key: kv for key, kv in self._kv.items() if key in arrivals}
        for state in states:
            sequence, keeps = state.sequence, keeps_kv and state.group is None
            keeps = keeps and sequence is not None and sequence.detach()
            if not keeps:
                if sequence is not None and sequence.is_detached:  # since an earlier update
                    parts.suspend(state)
                self._forget_scores(state)
            state.output_logprobs = [math.nan] * len(state.output_logprobs)
            if state.lookup is not None:  # it has started
                self._end_range(state, before)
                self._kv[state.arrival] = "stale" if keeps else "recompute"
        for extension in parts.extensions:
            extension.on_epoch()
        for state in states:
            if state.sequence is not None and state.sequence.is_detached:
                woken, state.waiters = state.waiters, []
                for waiter in woken:  # its tokens will not be found
                    waiter.producer = None
                parts.waiting.mark_unblocked(woken)
            elif state in parts.running:
                parts.suspend(state)

    def before_start(self, state: RequestState) -> None:
        if self._kv.get(state.arrival) == "stale":  # it was preempted: that K/V is gone
            self._end_range(state, self.epoch)
            self._kv[state.arrival] = "recompute"
            self._forget_scores(state)
            state.output_logprobs = [math.nan] * len(state.output_logprobs)

    def on_end(self, state: RequestState) -> None:
        self._end_range(state, self.epoch)
        self._kv.pop(state.arrival, None)

    def _forget_scores(self, state: RequestState) -> None:
        """Have the scores of a prompt computed again with its K/V."""
        if state.scores is not None:
            state.scores = type(state.scores)()
            if state in self._parts.waiting:
                self._parts.waiting.rewatch(state)

    def _end_range(self, state: RequestState, epoch: int) -> None:
        start = state.weight_epochs[-1].end if state.weight_epochs else 0
        end = state.num_output if state.group is None else state.group.num_output
        if end > start:
            kv = self._kv.get(state.arrival, "computed")
            state.weight_epochs += (WeightEpoch(start, end, epoch, kv),)
