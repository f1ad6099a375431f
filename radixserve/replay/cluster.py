"""A cluster to replay a trace through: replicas, router, failures, autoscaling."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from radixserve.checks import check_choice, check_float, check_int
from radixserve.errors import InvalidRequest
from radixserve.replay.routers import ROUTERS
from radixserve.replay.serving import Serving, StepModel
from radixserve.routing.autoscaling import Autoscaling

_MAX_REPLICAS = 1024
_MAX_S = 1e9
_EPSILON_S = 1e-6  # of delays, against rounding


@dataclass(frozen=True, slots=True)
class Failures:
    """When replicas are lost. They depend on the seed, not on the router."""

    mean_s: float | None = None  # a replica's mean time to failure, drawn at each start; None: none
    at: tuple[tuple[float, int], ...] = ()  # besides: seconds, number of a replica that is there
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mean_s is not None:
            check_float("mean_s", self.mean_s, 0.0, _MAX_S, open_low=True)

    def time_to_failure(self, replica: int, start: int) -> float:
        """`start`: number of its start, from 0."""
        if self.mean_s is None:
            return math.inf
        return random.Random(f"{self.seed} {replica} {start}").expovariate(1.0 / self.mean_s)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal replicas and their router. InvalidRequest for what there is not."""

    num_replicas: int  # with autoscaling those at the beginning
    router: str = "tree"
    event_delay_s: float = 0.1  # from a cache to the router, in time of the trace
    step: StepModel = field(default_factory=StepModel)
    failures: Failures | None = None
    autoscaling: Autoscaling | None = None
    start_s: float = 60.0  # until a replica that was added or lost serves, its cache empty

    def __post_init__(self) -> None:
        check_int("num_replicas", self.num_replicas, 1, _MAX_REPLICAS)
        check_choice("router", self.router, tuple(ROUTERS))
        check_float("event_delay_s", self.event_delay_s, 0.0, 1e6)
        check_float("start_s", self.start_s, 0.0, _MAX_S)
        rule = self.autoscaling
        if rule is not None:
            check_int("num_replicas", self.num_replicas, rule.min_replicas, rule.max_replicas)
        if self.router == "offline" and not self.is_fixed:
            raise InvalidRequest("the router offline knows neither failures nor autoscaling")

    @property
    def is_fixed(self) -> bool:
        """All replicas are there all the time."""
        return self.failures is None and self.autoscaling is None

    @property
    def most_replicas(self) -> int:
        return self.num_replicas if self.autoscaling is None else self.autoscaling.max_replicas


class Autoscaler:
    """Ray Serve's default policy: as many replicas as the ongoing requests need, once that has been
    more, or less, than there are throughout the delay."""

    def __init__(self, rule: Autoscaling, num_replicas: int) -> None:
        self.num_replicas = num_replicas  # that there are to be
        self._rule = rule
        self._target = rule.target(Serving().max_running_requests)
        self._direction = 0
        self._since = 0.0

    def decide(self, now: float, num_ongoing: float) -> int:
        """`num_ongoing`: mean of the look-back period, all replicas together."""
        rule = self._rule
        wanted = rule.num_wanted(num_ongoing, self._target)
        direction = (wanted > self.num_replicas) - (wanted < self.num_replicas)
        if direction != self._direction:
            self._direction, self._since = direction, now
        delay_s = rule.upscale_delay_s if direction > 0 else rule.downscale_delay_s
        if direction and now - self._since + _EPSILON_S >= delay_s:
            self.num_replicas, self._direction = wanted, 0
        return self.num_replicas
