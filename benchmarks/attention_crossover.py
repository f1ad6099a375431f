"""From how many shared tokens on rows are better read together: the CPU backend's MERGE_TOKENS.

    python benchmarks/attention_crossover.py [--threads N] [--repeats N]

A line for each shape of heads, type and number of rows: time of one layer's attention with the
shared tokens read once over the time with every row on its own, by the number of shared tokens.
Each row is a decode with 100 tokens of its own besides. Both take turns; the 20th percentile of
each counts.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from cache_report import describe_machine

from radixserve.attention import cpu
from radixserve.runner.input_batch import build_forward_batch
from radixserve.schedule import ScheduledRequest

HEADS = {"tiny": (8, 2, 64), "small": (12, 4, 128)}  # query heads, K/V heads, features
ROWS = (2, 4, 8, 32)
SHARED = (8, 16, 32, 64, 128, 256)
OWN = 100
NUM_SLOTS = 8_192


def make_rows(num_rows: int, shared: int) -> list[ScheduledRequest]:
    """Decodes at page size 1, on contiguous pages."""
    pages = np.arange(NUM_SLOTS, dtype=np.int32)
    own = pages[shared:].reshape(-1)[: num_rows * (OWN + 1)].reshape(num_rows, OWN + 1)
    token = np.ones(1, np.int32)
    return [
        ScheduledRequest("", token, shared + OWN, np.concatenate([pages[:shared], mine]), None)
        for mine in own
    ]


def measure(
    heads: tuple[int, int, int], dtype: torch.dtype, num_rows: int, shared: int, repeats: int
) -> float:
    """Time together over time apart."""
    num_heads, num_kv_heads, dim = heads
    kv = torch.randn(1, 2, NUM_SLOTS, 1, num_kv_heads, dim).to(dtype)
    batch = build_forward_batch(make_rows(num_rows, shared), 1, torch.device("cpu"))
    q = torch.randn(num_rows, num_heads, dim).to(dtype)
    k = torch.randn(num_rows, num_kv_heads, dim).to(dtype)
    backends = [cpu.CpuBackend(kv, num_heads, shares=shares) for shares in (True, False)]
    for backend in backends:
        backend.plan(batch)
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        for backend, spent in zip(backends, times, strict=True):
            start = time.perf_counter()
            backend.run(q, k, k, 0)
            spent.append(time.perf_counter() - start)
    together, apart = (float(np.percentile(spent, 20)) for spent in times)
    return together / apart


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=120)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cpu.MERGE_TOKENS = 0  # whatever is shared is read together
    print(", ".join(f"{key} {value}" for key, value in describe_machine().items()))
    print("together over apart, shared tokens", *SHARED)
    for name, heads in HEADS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for num_rows in ROWS:
                ratios = [measure(heads, dtype, num_rows, n, args.repeats) for n in SHARED]
                shown = "  ".join(f"{ratio:.2f}" for ratio in ratios)
                print(f"{name} {str(dtype)[6:]} {num_rows:>2} rows  {shown}", flush=True)


if __name__ == "__main__":
    main()
