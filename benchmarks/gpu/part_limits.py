"""What this card can do: the two ceilings that all other figures are held against."""

from __future__ import annotations

from dataclasses import asdict

from gpu_bench import Bench
from gpu_clock import measure_copy, measure_product
from gpu_limits import Ceilings

EXPECTED = Ceilings(4.3e12, 790e12)  # of an H200


def run(bench: Bench, group: str) -> None:
    del group
    copied, copy_times = measure_copy(bench.clock, bench.pick(4 << 30, 1 << 30, 1 << 20))
    bench.row("copy, bytes read and written", {"TB/s": copied / 1e12, **copy_times.cells()})
    rate, times = measure_product(bench.clock, bench.pick(8_192, 8_192, 128))
    bench.row(
        "product, bf16, random numbers",
        {"TFLOP/s": rate / 1e12, **times.cells()},
        details=asdict(Ceilings(copied, rate)),
    )
    bench.note(
        f"an H200 was seen at {EXPECTED.bandwidth / 1e12:g} TB/s and"
        f" {EXPECTED.flops / 1e12:g} TFLOP/s"
    )
