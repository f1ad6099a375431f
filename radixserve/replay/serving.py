"""`Serving` and `ScheduledResult`: how a trace is served by a scheduler, and what came of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from radixserve.checks import check_choice, check_float, check_int
from radixserve.replay.caches import CacheSpec
from radixserve.replay.device import StepModel
from radixserve.replay.trace import Floats, Ints

ORDERS = ("lpm", "fcfs", "dfs-weight")


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


@dataclass(frozen=True, slots=True)
class ScheduledResult:
    """Tokens of prompts unless the name says otherwise; times in modelled seconds."""

    spec: CacheSpec
    serving: Serving
    hits: Ints  # [requests] reused tokens
    ttft_s: Floats  # [requests] from being sent to first token; nan for those that do not fit
    prompt_tokens: int  # of all requests
    computed_tokens: int  # in prefill and decode, of everything
    needed_tokens: int  # of those, computed for the first time
    repeated_tokens: int  # of those, computed again without need
    compute_ratio: float  # (needed + repeated) / needed: see `ledger`
    num_too_large: int
    max_overtaken: int  # most later requests that were admitted before one
    preemptions: int
    steps: int
    span_s: float  # from the first arrival to the last token
    evicted_tokens: int
    seconds: float  # that the replay took

    @property
    def hit_tokens(self) -> int:
        return int(self.hits.sum())

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    def ttft_at(self, percentile: float) -> float:
        """nan when nothing was served."""
        served = self.ttft_s[~np.isnan(self.ttft_s)]
        return float(np.percentile(served, percentile)) if len(served) else math.nan

    @property
    def mean_ttft_s(self) -> float:
        """nan when nothing was served."""
        served = self.ttft_s[~np.isnan(self.ttft_s)]
        return float(served.mean()) if len(served) else math.nan
