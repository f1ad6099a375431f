"""The settings of a run. Light: the process that starts the jobs imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpu.limits import Ceilings


@dataclass(frozen=True)
class Settings:
    """The same for all parts."""

    is_dry: bool = False
    is_quick: bool = False
    backend: str = "auto"
    page_size: int = 1
    seed: int = 0
    ceilings: Ceilings | None = None  # None: not measured yet

    def open(self, tell: Callable[[str, Any], None]) -> Any:
        """The Bench of a job, in its process. Raises Skip where there is no GPU."""
        from gpu.bench import Bench

        return Bench(self, tell)
