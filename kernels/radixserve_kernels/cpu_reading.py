"""How packed weights are read from memory: what is prefetched, as measured on this processor.

The first start measures it in half a second and keeps the choice beside the compiled library. No
choice changes a bit of a result.

RADIXSERVE_CPU_READING  two of near, far and plain, such as "plain,far": for one row, for several
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

WAYS = ("near", "far", "plain")  # as cpu/quantized.h numbers them
_NUM_BYTES, _NUM_PARTS = 128 << 20, 4  # read in turn: more than most caches hold
_NUM_ROUNDS = 7
_INT8, _INT4_FLOAT = 1, 3  # as cpu/forms.h numbers them


class Reading(NamedTuple):
    """A name of WAYS for products of one row, and one for those of several."""

    one_row: str = "near"
    rows: str = "near"

    @classmethod
    def parse(cls, text: str) -> Reading | None:
        """The reading that `text` names, None if it names none."""
        names = text.strip().split(",")
        return cls(*names) if len(names) == 2 and set(names) <= set(WAYS) else None

    def __str__(self) -> str:
        return ",".join(self)


def asked_reading() -> Reading | None:
    """What RADIXSERVE_CPU_READING asks for. Raises ValueError."""
    text = os.environ.get("RADIXSERVE_CPU_READING")
    if not text:
        return None
    asked = Reading.parse(text)
    if asked is None:
        raise ValueError(f"RADIXSERVE_CPU_READING={text}: two of {', '.join(WAYS)}, with a comma")
    return asked


def use_reading(library: ctypes.CDLL, file: Path) -> Reading:
    """Make the library of packed weights read as asked for, else as `file` says, else as is
    measured now; then `file` is written. Returns the reading. Raises ValueError."""
    reading = asked_reading() or _kept(file)
    if reading is None:
        reading = measure(library)
        _keep(file, reading)
    library.radixserve_use_reading(*map(WAYS.index, reading))
    return reading


def measure(library: ctypes.CDLL) -> Reading:
    """The fastest ways to read 8- and 4-bit weights, by the time of products. Takes half a
    second."""
    panels = np.ones(_NUM_BYTES, np.uint8)
    parts = itertools.cycle(np.split(panels, _NUM_PARTS))  # one that no cache holds any more
    chosen = []
    for num_rows in (1, 8):
        seconds = dict.fromkeys(WAYS, 0.0)
        for form in (_INT8, _INT4_FLOAT):
            best = dict.fromkeys(WAYS, float("inf"))
            for _ in range(_NUM_ROUNDS):
                for way in WAYS:
                    library.radixserve_use_reading(*(WAYS.index(way),) * 2)
                    part = next(parts)
                    took = library.radixserve_time_reading(
                        form, num_rows, part.ctypes.data, part.nbytes
                    )
                    best[way] = min(best[way], took)
            for way, took in best.items():
                seconds[way] += took
        chosen.append(min(seconds, key=seconds.__getitem__))
    return Reading(*chosen)


def _kept(file: Path) -> Reading | None:
    try:
        return Reading.parse(file.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None


def _keep(file: Path, reading: Reading) -> None:
    """Write `file` at once, or not at all where that fails. Leaves no other file."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=file.parent) as work:
        new = Path(work, file.name)
        new.write_text(f"{reading}\n")
        os.replace(new, file)
