"""What the machine does at the model's own shapes, and what a workload costs at that rate.

Both limits are per second of CPU time over all threads of the process, as the engines' times are,
so that other processes on the machine disturb them little; the best of many samples counts.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass

from harness.shapes import Shape
from harness.workloads import Workload, ideal_rounds

PREFILL_ROWS = 512  # tokens in the products whose rate is measured
_SAMPLE_S = 0.02
_MANY = 1 << 20  # tokens, which together need every expert


@dataclass(frozen=True)
class Limits:
    """See `measure_limits`."""

    flops: dict[str, float]  # FLOP a CPU second, by routine
    bandwidth: dict[str, float]  # bytes read and written a CPU second, by working set

    def __str__(self) -> str:
        flops, copied = (
            ", ".join(f"{name} {value / 1e9:,.0f}" for name, value in each.items())
            for each in (self.flops, self.bandwidth)
        )
        return f"limits: products {flops} GFLOP/s; copies {copied} GB/s, read and written"


@dataclass(frozen=True)
class Floor:
    """CPU seconds of what an ideal cache leaves to compute, at the rates of `Limits`.

    Only an engine that multiplies faster than PyTorch, or reads faster than memory is copied, goes
    below.
    """

    num_prefilled: int
    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def measure_limits(shape: Shape, dtype: str, num_samples: int) -> Limits:
    """Products and copies with torch, on the threads that are set.

    flops       all projections of a layer and the logits' one, PREFILL_ROWS tokens: their FLOPs
                (2 a multiply and add) over the sum of their best times. `linear` is torch's own
                choice; `packed` is oneDNN on weights laid out for it once, where torch has it.
    bandwidth   copy of one half of a buffer into the other, read and written bytes over the best
                time. `weights`: a buffer as large as the model's matrices, which a decode step
                reads whole; `memory`: 512 MiB, beyond any cache.
    """
    import torch
    import torch.nn.functional as F

    def linear(x: torch.Tensor, w: torch.Tensor) -> Callable[[], object]:
        return lambda: F.linear(x, w)

    def packed(x: torch.Tensor, w: torch.Tensor) -> Callable[[], object]:
        weight = torch.ops.mkldnn._reorder_linear_weight(w, PREFILL_ROWS)
        return lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    def copy(num_bytes: int) -> Callable[[], object]:
        source, target = torch.zeros(2, num_bytes // 2, dtype=torch.uint8).add_(1).unbind()
        return lambda: target.copy_(source)

    routines = {"linear": linear}
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        routines["packed"] = packed
    torch_dtype = getattr(torch, dtype)
    shapes = (*shape.projections.values(), (shape.vocab, shape.hidden))
    work = sum(2 * PREFILL_ROWS * n * k for n, k in shapes)
    weights = int(shape.weights_read(_MANY) + shape.head_weights) * torch_dtype.itemsize
    with torch.inference_mode():
        flops = {}
        for name, prepare in routines.items():
            seconds = 0.0
            for n, k in shapes:
                x = torch.randn(PREFILL_ROWS, k).to(torch_dtype)
                seconds += best_time(prepare(x, torch.randn(n, k).to(torch_dtype)), num_samples)
            flops[name] = work / seconds
        sizes = {"weights": weights, "memory": 512 << 20}
        bandwidth = {
            name: size / best_time(copy(size), num_samples) for name, size in sizes.items()
        }
    return Limits(flops, bandwidth)


def best_time(operation: Callable[[], object], num_samples: int) -> float:
    """Least CPU seconds of one call, over samples long enough for the clock."""
    timer = timeit.Timer(operation, timer=time.process_time)
    timer.timeit(1)
    calls = 1
    while (spent := timer.timeit(calls)) < _SAMPLE_S:
        calls *= 2
    return min(spent, *timer.repeat(num_samples, calls)) / calls


def find_floor(
    shape: Shape, dtype: str, limits: Limits, workload: Workload, *, burst: bool
) -> Floor:
    """The floor of a workload; the shape's numbers are L layers, Hq heads of D, hidden H, V tokens.

        W = numbers in the matrices of all layers,  A = 4 L Hq D (FLOPs of a token on a key)

    prefill   of a request whose tokens [c, p) are computed and the last one sampled, over the rate:
                  2 W (p - c)  +  A (sum of i + 1 for i in [c, p))  +  2 V H
    decode    num_new - 1 steps, in a burst all requests of a round together, else each alone. A
              step over requests of l tokens, C distinct ones among them, b bytes a number:
                  max( sum of (2 W + 2 V H + A l) / rate,
                       b (R + V H + C x KV numbers of a token) / bandwidth )
              Of what requests share the step reads one copy. R is W, with experts more: W counts
              those of one token, R those that the step's tokens choose if they choose at random.

    Norms, activations, softmax, embeddings and everything that is no arithmetic cost nothing here.
    """
    number_bytes = 2 if dtype == "bfloat16" else 4
    weights = shape.layer_weights + shape.head_weights
    flops, bandwidth = max(limits.flops.values()), max(limits.bandwidth.values())

    def prefill_s(start: int, end: int) -> float:
        keys = (end * (end + 1) - start * (start + 1)) // 2
        work = 2 * shape.layer_weights * (end - start) + shape.score_flops * keys
        return (work + 2 * shape.head_weights) / flops

    def step_s(lengths: list[int], num_distinct: int) -> float:
        work = sum(2 * weights + shape.score_flops * length for length in lengths)
        numbers = shape.weights_read(len(lengths)) + shape.head_weights
        read = number_bytes * (numbers + num_distinct * shape.kv_elements)
        return max(work / flops, read / bandwidth)

    num_prefilled, prefill, decode = 0, 0.0, 0.0
    for ideal in ideal_rounds(workload):
        prompts = [prompt for _, prompt in ideal.requests]
        num_prefilled += sum(prompt - cached for cached, prompt in ideal.requests)
        prefill += sum(prefill_s(*lengths) for lengths in ideal.requests)
        groups = [(prompts, ideal.num_distinct)] if burst else [([n], n) for n in prompts]
        for lengths, distinct in groups:
            for step in range(1, workload.num_new):
                decode += step_s([n + step for n in lengths], distinct + step * len(lengths))
    return Floor(num_prefilled, prefill, decode)
