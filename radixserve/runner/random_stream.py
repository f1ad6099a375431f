"""The random numbers of a request: a function of seed and token index, whatever the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixserve.schedule import SampleSpec


def uniform_numbers(specs: Sequence[SampleSpec]) -> NDArray[np.float64]:
    """[S] numbers in (0, 1), each a pure function of its row's seed and index.

    Two rounds of splitmix64's finalizer (Steele, Lea and Flood 2014), as a counter-based generator.
    """
    seeds = np.array([spec.seed & (2**64 - 1) for spec in specs], np.uint64)
    index = np.array([spec.num_sampled for spec in specs], np.uint64)
    bits = _mix(_mix(seeds) + (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
