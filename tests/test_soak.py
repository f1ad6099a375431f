"""The long run: everything that the other fuzz tests do, with new seeds, for as long as is asked.

    RADIXSERVE_SOAK_MINUTES=60 python -m pytest -m long tests/test_soak.py -s

Five kinds take turns, a seed each: a hypothesis machine over all that a caller of a cache may do,
random programs, and storms of the real scheduler over either index, without drafts and with right
and wrong ones. All are audited after every step, against the oracles of `tests/cache/world.py` and
`tests/scheduler/fake.py`. It prints how many steps and seeds it was.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.cache.test_oracle import CacheMachine, run_world
from tests.drafts.sources import KINDS as DRAFTS
from tests.drafts.test_storms import plug_in
from tests.scheduler.test_storm import storm

FIRST_SEED = 1_000_000
PROGRAM_STEPS, STORM_STEPS = 200, 300
MACHINE_RUNS, MACHINE_STEPS = 20, 50


def run_machine(number: int) -> int:
    """Hypothesis programs; the steps taken, counted as audits."""
    audits = 0

    class Counted(CacheMachine):
        def check_invariants(self, *args: object, **kwargs: object) -> None:
            nonlocal audits
            audits += 1
            super().check_invariants(*args, **kwargs)

    plan = settings(
        max_examples=MACHINE_RUNS,
        stateful_step_count=MACHINE_STEPS,
        derandomize=False,
    )
    run_state_machine_as_test(seed(number)(Counted), settings=plan)
    return audits


def run_program(number: int) -> int:
    run_world(number, PROGRAM_STEPS)
    return PROGRAM_STEPS


def run_radix_storm(number: int) -> int:
    return storm(number, STORM_STEPS)["steps"]


def run_hash_storm(number: int) -> int:
    return storm(number, STORM_STEPS, kind="hash")["steps"]


def run_drafted_storm(number: int) -> int:
    cache = ("radix", "hash", "states", "windows")[number % 4]
    drafts = DRAFTS[number % 3]
    counts = storm(number, STORM_STEPS, cache, lambda driver, rng: plug_in(driver, rng, drafts))
    return counts["steps"]


KINDS: dict[str, Callable[[int], int]] = {
    "hypothesis machine": run_machine,
    "random programs": run_program,
    "scheduler storms, radix": run_radix_storm,
    "scheduler storms, hash": run_hash_storm,
    "scheduler storms, drafts": run_drafted_storm,
}


@pytest.mark.long
@pytest.mark.timeout(0)
def test_soak(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    end = start + 60 * float(os.environ.get("RADIXSERVE_SOAK_MINUTES", "60"))
    steps: Counter[str] = Counter()
    seeds: Counter[str] = Counter()
    number = int(os.environ.get("RADIXSERVE_SOAK_SEED", FIRST_SEED))
    first = number
    while time.monotonic() < end:
        for name, run in KINDS.items():
            try:
                steps[name] += run(number)
            except BaseException:
                print(f"{name}, seed {number}")
                raise
            seeds[name] += 1
            number += 1
    with capsys.disabled():
        minutes = (time.monotonic() - start) / 60
        print(f"\n{minutes:.0f} minutes, seeds {first} to {number - 1}")
        for name in KINDS:
            print(f"  {name}: {seeds[name]:,} seeds, {steps[name]:,} audited steps")
