"""`TenantUsage`: what each tenant's requests added up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

_NAMES = ("requests", "prompt_tokens", "cached_tokens", "computed_tokens", "completion_tokens")


class TenantUsage:
    """Owned by the event loop."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, Counter[str]] = {}

    def add(self, tenant: str, usage: Mapping[str, Any]) -> None:
        """A request has ended with this usage, in the format in which it was answered."""
        counts = self._by_tenant.setdefault(tenant, Counter())
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        counts["requests"] += 1
        counts["prompt_tokens"] += prompt
        counts["cached_tokens"] += cached
        counts["computed_tokens"] += prompt - cached
        counts["completion_tokens"] += usage["completion_tokens"]

    def of(self, tenant: str) -> dict[str, int | str]:
        counts = self._by_tenant.get(tenant, Counter())
        return {"tenant": tenant, **{name: counts[name] for name in _NAMES}}
