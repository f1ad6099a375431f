"""The two ceilings of this card that all other figures are held against."""

from __future__ import annotations

import torch
from gpu.bench import DTYPE, Bench
from gpu.limits import H200

NUM_SAMPLES = 30


def run(bench: Bench, group: str) -> None:
    del group
    num_bytes = bench.pick(4 << 30, 1 << 20)  # of each buffer, far beyond any cache
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    times = bench.clock.times(lambda: target.copy_(source), NUM_SAMPLES)
    bandwidth = 2 * num_bytes / times.median
    bench.row("copy, bytes read and written", {"TB/s": bandwidth / 1e12, **times.cells()})
    size = bench.pick(8_192, 128)
    left, right = torch.randn(2, size, size, device=bench.device).to(DTYPE)
    out = torch.empty_like(left)
    times = bench.clock.times(lambda: torch.mm(left, right, out=out), NUM_SAMPLES)
    flops = 2 * size**3 / times.median
    cells, limits = {"TFLOP/s": flops / 1e12, **times.cells()}, [bandwidth, flops]
    details = dict(zip(("bandwidth", "flops"), limits, strict=True))
    bench.row("product, bf16, random numbers", cells, details=details)
    bench.note(
        f"an H200 was seen at {H200.bandwidth / 1e12:g} TB/s and {H200.flops / 1e12:g} TFLOP/s"
    )
