"""Products of packed weights of SmolLM2's shapes beside PyTorch's, by the number of rows.

    python benchmarks/bench_linear.py [--dtype float32] [--rows 1,8,16,512] [--repeats 9]

CPU milliseconds of one thread for all products of `LAYERS` layers, the least of the repeats. Both
take turns; the weights are more than the second-level cache holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from harness.arguments import parse
from harness.report import Cell, print_table
from harness.shapes import DTYPES
from torch import Tensor

from radixserve_kernels.cpu_weights import PackedWeight

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # columns and depth
LAYERS = 12


def seconds(products: list[Callable[[Tensor], Tensor]], inputs: list[Tensor]) -> float:
    began = time.process_time()
    for product, x in zip(products, inputs * LAYERS, strict=True):
        product(x)
    return time.process_time() - began


def main() -> None:
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 64, 512]
    args = parse(__doc__, dtype=DTYPES, rows=sizes, repeats=9, json=False)
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    layers = [
        torch.nn.Linear(k, n, bias=False, dtype=dtype) for _ in range(LAYERS) for n, k in SHAPES
    ]
    packed = [PackedWeight(layer.weight.detach()) for layer in layers]
    table: list[list[Cell]] = []
    for rows in args.rows:
        inputs = [torch.randn(rows, k, dtype=dtype) for _, k in SHAPES]
        with torch.inference_mode():
            times = [
                (seconds(packed, inputs), seconds(layers, inputs)) for _ in range(args.repeats)
            ]
        ours, theirs = (min(each) * 1e3 for each in zip(*times, strict=True))
        table.append([str(rows), ours, theirs, theirs / ours])
    print_table(args, ("rows", "radixserve ms", "PyTorch ms", "ratio"), table, ("torch",))


if __name__ == "__main__":
    main()
