"""A bar for batches: requests done, prefill and decode tokens a second, the share reused."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from radixserve.output import Completion


class BatchProgress:
    """`wanted` None: show it when there are several requests and standard error is a terminal."""

    def __init__(self, total: int, *, wanted: bool | None) -> None:
        shown = (total > 1 and sys.stderr.isatty()) if wanted is None else wanted
        self._bar: Any = None
        self._start = time.perf_counter()
        self._prompt = self._cached = self._generated = 0
        if shown:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="req", desc="generate", dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, completion: Completion) -> None:
        """One more request is done."""
        usage = completion.usage
        self._prompt += usage.prompt_tokens
        self._cached += usage.cached_tokens
        self._generated += usage.completion_tokens
        if self._bar is None:
            return
        seconds = max(1e-9, time.perf_counter() - self._start)
        computed = self._prompt - self._cached
        self._bar.set_postfix_str(
            f"prefill {computed / seconds:,.0f} tok/s, decode {self._generated / seconds:,.0f} "
            f"tok/s, reused {100 * self._cached / max(1, self._prompt):.0f} %",
            refresh=False,
        )
        self._bar.update()
