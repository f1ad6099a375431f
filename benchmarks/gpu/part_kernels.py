"""Every kernel against its definition in float64: odd shapes, poisoned outputs, poisoned pools.

Whatever memory torch hands out is filled with NaN first, workspaces and outputs of the backends
among it; an element that is not written, or read without having been, is found so.
"""

from __future__ import annotations

import torch
from gpu.bench import Bench
from gpu.jobs import Skip
from gpu.kernel_attention import check_direct
from gpu.kernel_backends import check_backend
from gpu.kernel_rows import check_draws, check_rows
from gpu.part_shared import always_share

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PAGE_SIZES = (1, 16, 64)  # that each backend is asked for
LLAMA_LIKE = (8, 2, 128)  # query heads, key heads, features
ODD = ((4, 4, 64), (7, 1, 128))


def run(bench: Bench, group: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is allocated with NaN
    assert torch.empty(1, device=bench.device).isnan().all(), "memory is not poisoned"
    try:
        _check(bench, group)
    finally:
        torch.use_deterministic_algorithms(False)


def _check(bench: Bench, group: str) -> None:
    kind, *words = group.split()
    if kind == "rows":
        check_rows(bench)
    elif kind == "draws":
        check_draws(bench)
    elif kind in ("attention", "odd"):
        heads = ODD if kind == "odd" else (_heads(bench),)
        label = ", other heads" if kind == "odd" else ""
        check_direct(bench, DTYPES[words[0]], int(words[1]), heads, label)
    else:
        _check_paged(bench, kind, DTYPES[words[0]])


def _check_paged(bench: Bench, name: str, dtype: torch.dtype) -> None:
    heads = _heads(bench)
    if reason := bench.unsupported_reason(name, dtype, heads[2]):
        raise Skip(f"no {name}: {reason}")
    always_share()
    for page_size in PAGE_SIZES:
        check_backend(bench, name, dtype, page_size, heads)


def _heads(bench: Bench) -> tuple[int, int, int]:
    return bench.pick(LLAMA_LIKE, LLAMA_LIKE, (4, 2, 16))
