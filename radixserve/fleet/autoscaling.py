"""`Autoscaling`: the rule for the number of replicas, by their load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from radixserve.checks import StrictFields, check_choice, check_float, check_int, shown
from radixserve.errors import InvalidRequest

_MAX_REPLICAS = 1024
_MAX_S = 1e9
_TARGET_SHARE = 0.5  # of max_running_requests: the rest is for requests until a replica has started


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling(StrictFields):
    """Ray Serve's autoscaling_config: the same fields and rule and, except for the target, the same
    defaults.

    A replica's load is its number of requests, running and waiting, as a mean over
    `look_back_period_s`. The wanted number of replicas is the one at which their average load is
    the target. Replicas are added when more have been wanted for `upscale_delay_s`, and removed
    when fewer have been wanted for `downscale_delay_s`.
    """

    max_replicas: int = 0  # required
    min_replicas: int = 1
    target_ongoing_requests: float | None = None  # per replica; None: max_running_requests / 2
    metrics_interval_s: float = 10.0  # between two reports of the load
    look_back_period_s: float = 30.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0

    def __post_init__(self) -> None:
        check_int("min_replicas", self.min_replicas, 1, _MAX_REPLICAS)
        if self.max_replicas == 0:
            raise InvalidRequest("autoscaling needs max_replicas, such as max_replicas=4")
        check_int("max_replicas", self.max_replicas, self.min_replicas, _MAX_REPLICAS)
        if self.target_ongoing_requests is not None:
            name = "target_ongoing_requests"
            check_float(name, self.target_ongoing_requests, 0.0, _MAX_S, open_low=True)
        for name in ("metrics_interval_s", "look_back_period_s"):
            check_float(name, getattr(self, name), 0.0, _MAX_S, open_low=True)
        for name in ("upscale_delay_s", "downscale_delay_s"):
            check_float(name, getattr(self, name), 0.0, _MAX_S)
        if self.look_back_period_s <= self.metrics_interval_s:
            raise InvalidRequest(
                f"look_back_period_s must be above metrics_interval_s={self.metrics_interval_s:g}, "
                f"got {self.look_back_period_s:g}"
            )

    @classmethod
    def read(cls, name: str, given: object) -> Self:
        """The rule in `given`: an Autoscaling, a mapping of its fields, or a text such as
        "max_replicas=4,min_replicas=2". Raises InvalidRequest, which names the setting `name`."""
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            return cls(**given)
        if not isinstance(given, str):
            raise InvalidRequest(
                f"{name} must be a text such as max_replicas=4, got {shown(given)}"
            )
        settings: dict[str, Any] = {}
        for item in filter(None, map(str.strip, given.split(","))):
            field, _, value = item.partition("=")
            check_choice(name, field, tuple(known.name for known in fields(cls)))
            try:
                settings[field] = int(value) if field.endswith("_replicas") else float(value)
            except ValueError:
                raise InvalidRequest(f"{name}: {field} must be a number, got {value!r}") from None
        return cls(**settings)

    def target(self, max_running_requests: int) -> float:
        """The number of requests that a replica should have on average."""
        return self.target_ongoing_requests or max(1.0, _TARGET_SHARE * max_running_requests)

    def num_wanted(self, num_ongoing: float, target: float) -> int:
        """The wanted number of replicas for `num_ongoing` requests, within the bounds."""
        return min(max(math.ceil(num_ongoing / target), self.min_replicas), self.max_replicas)
