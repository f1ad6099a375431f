"""`LoadCostModel`: whether loading a stored prefix takes less time than computing it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_FIRST_BANDWIDTH = 1e9  # bytes/s that are expected until reads were timed
_FIRST_LATENCY_S = 0.1e-3  # fixed cost of a load until loads were timed, and the least assumed
_MIN_MEASURED = 64  # tokens computed before their time is known
_WEIGHT = 0.2  # of a new measurement
_FORGETTING = 0.02  # share of the measured latency forgotten each time that a load does not pay


class LoadCostModel:
    """latency + bytes / bandwidth, by the reads and loads so far, against the seconds per token of
    the prompts computed so far."""

    def __init__(
        self, token_bytes: int, token_cost: Callable[[], tuple[float, int]] = lambda: (0.0, 0)
    ) -> None:
        """`token_bytes`: of a token's K/V. `token_cost`: seconds spent on computing prompts, and
        their tokens, so far."""
        self.token_bytes = token_bytes
        self.token_cost = token_cost
        self.bandwidth = _FIRST_BANDWIDTH  # bytes/s
        self.latency_s = _FIRST_LATENCY_S

    @property
    def seconds_per_token(self) -> float | None:
        """Of computing; None until some tokens were computed."""
        seconds, computed = self.token_cost()
        return seconds / computed if computed >= _MIN_MEASURED else None

    def load_seconds(self, num_tokens: int) -> float:
        return self.latency_s + num_tokens * self.token_bytes / self.bandwidth

    def compute_seconds(self, num_tokens: int) -> float | None:
        """None until some tokens were computed."""
        seconds = self.seconds_per_token
        return None if seconds is None else num_tokens * seconds

    def pays(self, num_tokens: int, ahead: Iterable[int] = ()) -> bool:
        """Whether loading tokens, after loads of as many tokens as `ahead` says, takes less time
        than computing them. It is assumed to until some tokens were computed."""
        compute_s = self.compute_seconds(num_tokens)
        if compute_s is None:
            return True
        pays = self.load_seconds(num_tokens) + sum(map(self.load_seconds, ahead)) < compute_s
        if not pays:  # once loads do not pay, none is timed: what was slow may be fast again
            self.latency_s += _FORGETTING * (_FIRST_LATENCY_S - self.latency_s)
        return pays

    def note_read(self, num_bytes: int, seconds: float) -> None:
        """A read took so long."""
        self.bandwidth += _WEIGHT * (num_bytes / max(1e-9, seconds) - self.bandwidth)

    def note_load(self, num_tokens: int, seconds: float) -> None:
        """A load took so long, without the steps that were computed meanwhile: computing would
        have waited for them, too."""
        reading_s = num_tokens * self.token_bytes / self.bandwidth
        latency_s = max(_FIRST_LATENCY_S, seconds - reading_s)
        self.latency_s += _WEIGHT * (latency_s - self.latency_s)
