"""A bar for batches: requests done, prompt tokens reused and computed, prefill and decode rates."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from radixserve.errors import EngineDead
from radixserve.output import Completion

_EVERY_S = 0.25  # at most so often the engine is asked for its counters


class BatchProgress:
    """Shows a line such as

        prompts 12,000 tok (9,000 reused, 3,000 computed), prefill 53,000 tok/s, decode 810 tok/s

    where the prefill rate is of the prompt tokens taken in, reused and computed, over the time that
    the engine spent on prompts, and the decode rate is over the rest of its time: one rises with
    hits, and neither falls because of the other. Both are of the whole engine since the bar began.
    """

    def __init__(
        self, total: int, stats: Callable[[], Mapping[str, Any]], *, wanted: bool | None
    ) -> None:
        """`stats`: `Runtime.cache_stats`. `wanted` None: show the bar when there are several
        requests and standard error is a terminal."""
        shown = (total > 1 and sys.stderr.isatty()) if wanted is None else wanted
        self._bar: Any = None
        self._stats = stats
        self._total = total
        self._num_done = self._prompt = self._cached = 0
        self._rates = ""
        if shown:
            from tqdm import tqdm

            self._before = stats()
            self._asked_at = time.perf_counter()
            self._bar = tqdm(total=total, unit="req", desc="generate", dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, completion: Completion) -> None:
        """One more request is done."""
        usage = completion.usage
        self._num_done += 1
        self._prompt += usage.prompt_tokens
        self._cached += usage.cached_tokens
        if self._bar is None:
            return
        now = time.perf_counter()
        if now - self._asked_at >= _EVERY_S or self._num_done == self._total:
            self._rates = self._read_rates()
            self._asked_at = now
        self._bar.set_postfix_str(
            f"prompts {self._prompt:,} tok ({self._cached:,} reused, "
            f"{self._prompt - self._cached:,} computed){self._rates}",
            refresh=self._num_done == self._total,
        )
        self._bar.update()

    def _read_rates(self) -> str:
        try:
            stats, before = self._stats(), self._before
        except EngineDead:  # after the answer that is shown
            return self._rates

        def spent(name: str) -> float:
            return float(stats[name] - before[name])

        taken_in = spent("reused_tokens") + spent("prefilled_tokens")
        prefill = f", prefill {_rate(taken_in, spent('prefill_s'))}"
        decoded = spent("decoded_tokens")
        return prefill + (f", decode {_rate(decoded, spent('decode_s'))}" if decoded else "")


def _rate(tokens: float, seconds: float) -> str:
    return f"{tokens / max(1e-9, seconds):,.0f} tok/s"
