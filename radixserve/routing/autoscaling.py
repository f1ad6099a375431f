"""`Autoscaling`: the wanted number of replicas, computed from their load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from radixserve.checks import StrictFields, check_choice, check_float, check_int, shown
from radixserve.errors import InvalidRequest

_MAX_REPLICAS = 1024
_MAX_S = 1e9
_TARGET_SHARE = 0.5  # of max_running_requests: as many again may come while a replica starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling(StrictFields):
    """Fields, rule and, but for the target, defaults of Ray Serve's autoscaling_config.

    The load of a replica is its requests, running and waiting; its mean over `look_back_period_s`
    counts. There are to be as many replicas as have the target on average, once that has been more
    than there are for `upscale_delay_s`, or less for `downscale_delay_s`.
    """

    max_replicas: int = 0  # to be given
    min_replicas: int = 1
    target_ongoing_requests: float | None = None  # of a replica; None: max_running_requests / 2
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
        """One as it is, its fields as a mapping, or as text: "max_replicas=4,min_replicas=2".

        Raises InvalidRequest, which calls it `name`.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            return cls(**given)
        if not isinstance(given, str):
            raise InvalidRequest(f"{name} must be such as max_replicas=4, got {shown(given)}")
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
        """Requests that a replica is to have on average."""
        return self.target_ongoing_requests or max(1.0, _TARGET_SHARE * max_running_requests)

    def num_wanted(self, num_ongoing: float, target: float) -> int:
        """Replicas for so many requests."""
        return min(max(math.ceil(num_ongoing / target), self.min_replicas), self.max_replicas)
