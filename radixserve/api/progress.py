"""Progress bars in a terminal, for batches and for loading a model."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from radixserve.completion import Completion
from radixserve.errors import EngineDead
from radixserve.models.names import TENSORS_READ

EVERY_S = 0.25  # the shortest time between two reads of the engine's counters
WIDE = 118  # columns from which the rates have room
LOAD_REFRESH_S = 0.5
_LOAD_FORMAT = "{desc}: {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} tensors [{elapsed}]"
_FORMAT = "{percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}]"


class BatchProgress:
    """Shows a line such as

         37%|####      | 185/500, 2 failed, 48.2k + 9.1k tok, 81% cached [00:42<01:11]

    with the tokens of prompts, cached ones included, and of answers so far, those of unfinished
    requests too. It fits into 80 columns. A wider terminal also shows the rates of prefill (tokens
    of prompts over the time that the engine spent on them) and decode. Tokens and rates are those
    of the whole engine since the bar began.
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
        self._num_done = self._num_failed = 0
        self._tokens = ""
        if shown:
            from tqdm import tqdm

            self._before = stats()
            self._asked_at = time.perf_counter()
            self._bar = tqdm(total=total, bar_format=_FORMAT, dynamic_ncols=True)

    @property
    def is_shown(self) -> bool:
        return self._bar is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, stats: Mapping[str, Any]) -> None:
        """Count from `stats` on, in place of the counters when it was made."""
        self._before = stats

    def add(self, completion: Completion | None) -> None:
        """Count a request that has ended; None: it failed."""
        self._num_done += 1
        self._num_failed += completion is None
        if self._bar is None:
            return
        is_last = self._num_done == self._total
        if is_last or time.perf_counter() - self._asked_at >= EVERY_S:
            self._read_tokens()
        self._show(refresh=is_last)
        self._bar.update()

    def refresh(self, stats: Mapping[str, Any] | None = None) -> None:
        """Update the token counts to `stats`, by default those of now. May be called from another
        thread than `add`."""
        if self._bar is not None:
            self._read_tokens(stats)
            self._show(refresh=True)

    def _show(self, *, refresh: bool) -> None:
        failed = f"{self._num_failed:,} failed, " if self._num_failed else ""
        self._bar.set_postfix_str(failed + self._tokens, refresh=refresh)

    def _read_tokens(self, stats: Mapping[str, Any] | None = None) -> None:
        self._asked_at = time.perf_counter()
        try:
            counts = self._stats() if stats is None else stats
        except EngineDead:  # the Runtime was closed meanwhile: keep the last counts
            return

        def since(name: str) -> float:
            return max(0.0, float(counts[name] - self._before[name]))  # a status may be older

        cached, decoded = since("reused_tokens"), since("decoded_tokens")
        prompts = cached + since("prefilled_tokens")
        self._tokens = f"{_short(prompts)} + {_short(since('generated_tokens'))} tok"
        if prompts:
            self._tokens += f", {cached / prompts:.0%} cached"
        if shutil.get_terminal_size().columns >= WIDE:
            self._tokens += f", prefill {_rate(prompts, since('prefill_s'))}"
            if decoded:
                self._tokens += f", decode {_rate(decoded, since('decode_s'))}"


def _short(count: float) -> str:
    """48213 -> "48.2k"."""
    if count < 1_000:
        return f"{count:.0f}"
    return f"{count / 1e3:.3g}k" if count < 999_500 else f"{count / 1e6:.3g}M"


def _rate(tokens: float, seconds: float) -> str:
    return f"{tokens / max(1e-9, seconds):,.0f} tok/s"


@contextlib.contextmanager
def loading_bar(name: str) -> Iterator[None]:
    """Show a line while a model is loaded, if standard error is a terminal:

         loading smollm2:  41%|########            | 112/272 tensors [00:03]

    Before the first tensor it shows the seconds only. Log messages of the package appear above it.
    The line is removed at the end.
    """
    if not sys.stderr.isatty():
        yield
        return
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    name = name if len(name) <= 32 else f"...{name[-29:]}"
    bar = tqdm(
        desc=f"loading {name}",
        bar_format="{desc} [{elapsed}]",
        total=1,
        leave=False,
        dynamic_ncols=True,
    )
    tensors, counter = logging.getLogger(TENSORS_READ), _TensorCounter(bar)
    before = tensors.level, tensors.propagate
    tensors.addHandler(counter)
    tensors.setLevel(logging.DEBUG)
    tensors.propagate = False
    is_loaded = threading.Event()

    def refresh() -> None:
        while not is_loaded.wait(LOAD_REFRESH_S):
            bar.refresh()

    ticker = threading.Thread(target=refresh, daemon=True)
    ticker.start()
    try:
        with logging_redirect_tqdm():
            yield
    finally:
        is_loaded.set()
        ticker.join()
        tensors.removeHandler(counter)
        tensors.setLevel(before[0])
        tensors.propagate = before[1]
        bar.refresh()
        bar.close()


class _TensorCounter(logging.Handler):
    """Sets a bar to the tensors read so far; the bar shows them when it is refreshed."""

    def __init__(self, bar: Any) -> None:
        super().__init__()
        self._bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple):
            self._bar.n, self._bar.total = record.args
            self._bar.bar_format = _LOAD_FORMAT
