"""`VirtualTimes`: how much of the engine each tenant has used, in computed tokens over its weight.

Of the tenants that wait, the one with the least virtual time is served next. A tenant that comes
back does not get what it left unused: its virtual time is raised to that of the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

_MAX_IDLE = 10_000  # tenants without a request whose virtual time is remembered


class Tenant:
    """One tenant, as the scheduler sees it."""

    __slots__ = ("name", "num_requests", "virtual_time", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name, self.weight = name, weight
        self.virtual_time = 0.0  # computed tokens over `weight`
        self.num_requests = 0  # waiting and running ones

    def charge(self, num_tokens: float) -> None:
        self.virtual_time += num_tokens / self.weight


class VirtualTimes:
    """The tenants that have requests, and some that had."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: of tenants by name; the others have 1."""
        self._weights = dict(weights or {})
        self.active: dict[str, Tenant] = {}
        self.idle: OrderedDict[str, Tenant] = OrderedDict()  # the first to leave is first
        self.are_shared = False  # whether more than one tenant has requests
        self._last = 0.0  # of the tenant whose queue emptied last: its virtual time
        self._least = 0.0  # to which `begin_waiting` raises

    def enter(self, name: str) -> Tenant:
        """A request of the tenant of that name was added; returns the tenant. O(1)."""
        tenant = self.active.get(name)
        if tenant is None:
            tenant = self.idle.pop(name, None) or Tenant(name, self._weights.get(name, 1.0))
            self.active[name] = tenant
            self.are_shared = len(self.active) > 1
        tenant.num_requests += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """A request of the tenant has ended. O(1) amortised."""
        tenant.num_requests -= 1
        if tenant.num_requests:
            return
        del self.active[tenant.name]
        self.are_shared = len(self.active) > 1
        self.idle[tenant.name] = tenant
        while self.idle:  # what `begin_waiting` would raise need not be remembered
            oldest = next(iter(self.idle.values()))
            if oldest.virtual_time > self._least and len(self.idle) <= _MAX_IDLE:
                return
            del self.idle[oldest.name]

    def begin_waiting(self, tenant: Tenant, waiting: Iterable[Tenant]) -> None:
        """The tenant had no waiting request and gets one; `waiting`: the tenants that have."""
        self._least = self.raise_to_least(tenant, waiting)

    def raise_to_least(self, tenant: Tenant, others: Iterable[Tenant]) -> float:
        """Raise its virtual time to the least of the others, which is returned; without others, to
        that of the tenant whose queue emptied last."""
        least = min((other.virtual_time for other in others), default=self._last)
        tenant.virtual_time = max(tenant.virtual_time, least)
        return least

    def end_waiting(self, tenant: Tenant) -> None:
        """The last waiting request of the tenant was started or has ended; no other tenant has
        any."""
        self._last = max(self._last, tenant.virtual_time)
